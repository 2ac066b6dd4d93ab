"""What the engine needs of a group of ranks, and what every way to communicate shares.

Everything is counted here. ``volume_elements`` counts whole messages, as the ZeRO paper does;
``sent_bytes`` what leaves this rank; small messages (norms, digests, agreements) are apart.
Object collectives are banned: bytes travel as uint8 tensors, JSON inside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...contract.errors import JobFailed, UsageError
from .absent import absent, first_to_fail
from .ending import rest_before_exit


class CommError(JobFailed):
    """A message that another rank never answered; says which, and whom."""


@dataclass
class Traffic:
    """What this rank has communicated so far, and how long it stood waiting for it."""

    volume_elements: int = 0
    sent_bytes: int = 0
    control_bytes: int = 0
    waited_s: float = 0.0


class Pending(Protocol):
    """A message under way. Buffers belong to it until ``wait`` returned; ``wait`` may be called again."""

    def wait(self) -> None: ...


class Comm(Protocol):
    """A group of ``size`` ranks; every method is called by all of them in the same order."""

    rank: int
    size: int
    traffic: Traffic

    def gather(self, flat: Tensor, what: str) -> Pending:
        """All-gather in place: ``flat`` is ``(size·k,)``, part ``rank`` of it is sent, the others filled."""

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        """Reduce-scatter: part ``rank`` of the sum of every rank's ``flat`` ``(size·k,)`` into ``out`` ``(k,)``.

        ``add`` adds to what is in ``out``. ``out`` may be wider than ``flat`` (fp32 sums of 16-bit messages),
        or part ``rank`` of ``flat`` itself; that part and ``scratch`` (``scratch_numel``) are clobbered.
        """

    def scratch_numel(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """Elements of scratch that ``reduce`` needs for a message of ``numel``."""

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        """The sum of every rank's ``flat`` ``(size·k,)``, in place, with the same bits on all of them."""

    def library_sum(self, flat: Tensor, what: str) -> Pending:
        """The library's own all-reduce, in place: equal on all ranks, in whatever order it adds."""

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        """Small all-to-all: ``send`` holds ``send_counts[i]`` elements for rank ``i``, in rank order."""

    def gather_small(self, value: Tensor, what: str) -> Tensor:
        """``(size, *value.shape)``: every rank's small tensor of equal shape."""

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        """Overwrites ``value`` by that of rank ``source``."""

    def kept(self) -> Sequence[Tensor]:
        """What this group holds on to between messages."""


class Waiting:
    """Handles of one message, with what has to happen once they are done; both dropped after."""

    def __init__(self, comm: Base, what: str, handles: list[tuple[Any, int]]) -> None:
        self._comm, self._what, self._handles = comm, what, handles

    def wait(self) -> None:
        if not self._handles:
            return
        started = time.perf_counter()
        for work, peer in self._handles:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._comm.failed(self._what, peer, error) from error
        self._comm.traffic.waited_s += time.perf_counter() - started
        self._handles = []  # handles hold their buffers
        self._finish()

    def _finish(self) -> None:
        """What is left to do with the bytes that arrived."""


def sum_rows(rows: Sequence[Tensor], out: Tensor) -> None:
    """``((rows[0] + rows[1]) + rows[2]) + …`` into ``out``, which may be one of the rows.

    An explicit loop: ``torch.sum`` over the rank axis adds in another order from five ranks on.
    Intermediate sums stand in ``rows[0]``, so that a row that ``out`` aliases is read before it is written.
    """
    if rows[0].dtype != out.dtype:  # 16-bit messages, summed in out's precision
        out.copy_(rows[0])
        for row in rows[1:]:
            out.add_(row)
        return
    if len(rows) == 1:
        if out.data_ptr() != rows[0].data_ptr():
            out.copy_(rows[0])
        return
    total = rows[0]
    for row in rows[1:-1]:
        total.add_(row)
    torch.add(total, rows[-1], out=out)


class Base:
    """What all kinds share: counting, small messages, errors that name the missing rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        rest_before_exit()
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        self._last_small: tuple[Tensor, Tensor] | None = None
        self._global = [dist.get_global_rank(group, i) if group else i for i in range(self.size)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a group of ranks cannot be copied or pickled, nor what holds one: a layer that is cut over tensor ranks, "
            "an engine",
            hint="copy the values: model.state_dict() inside zero.gathered()",
        )

    def name(self, rank: int) -> int:
        """The number among all ranks of the group's ``rank``."""
        return self._global[rank]

    def failed(self, what: str, peer: int, error: BaseException) -> CommError:
        own = self._global[self.rank]
        silent = absent(self._global, own, what)
        first = None if silent else first_to_fail(self._global)
        if first is not None and first[0] != own:
            whom = f"rank {first[0]} failed before, at: {first[1]}"
        elif silent:
            whom = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not take part"
        else:
            whom = f"rank {self._global[peer]} did not take part" if peer >= 0 else "a rank did not take part"
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CommError(
            f"rank {own}: {what}: {whom} ({said})",
            hint="the first rank that failed, or the one that stands still, is the cause; see its log",
        )

    def _count(self, flat: Tensor) -> None:
        self.traffic.volume_elements += flat.numel()
        self.traffic.sent_bytes += flat.numel() // self.size * (self.size - 1) * flat.element_size()

    def scratch_numel(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        return numel - numel // self.size  # what arrives from the others

    def _part(self, flat: Tensor, index: int) -> Tensor:
        width = flat.numel() // self.size
        return flat[index * width : (index + 1) * width]

    def library_sum(self, flat: Tensor, what: str) -> Pending:
        if self.size == 1:
            return Waiting(self, what, [])
        self._count(flat)
        self._count(flat)  # a sum and a gather in one
        return Waiting(self, what, [(dist.all_reduce(flat, group=self.group, async_op=True), -1)])

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        if self.size == 1:
            return send
        received = send.new_empty(sum(receive_counts))
        self.traffic.control_bytes += (send.numel() - send_counts[self.rank]) * send.element_size()
        self._blocking(
            what,
            lambda **how: dist.all_to_all_single(
                received, send, list(receive_counts), list(send_counts), self.group, **how
            ),
        )
        return received

    def gather_small(self, value: Tensor, what: str) -> Tensor:
        value = value.contiguous()
        if self.size == 1:
            return value.unsqueeze(0)
        everyone = value.new_empty((self.size, *value.shape))
        self.traffic.control_bytes += value.numel() * value.element_size() * (self.size - 1)
        # Kept until the next: a thread of gloo lets go of them some time after, which would show in a step's peak.
        self._last_small = value, everyone
        # Into one tensor: a list would be a view a rank.
        self._blocking(what, lambda **how: all_gather_call()(everyone, value.unsqueeze(0), group=self.group, **how))
        return everyone

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        if self.size > 1:
            self.traffic.control_bytes += value.numel() * value.element_size() if self.rank == source else 0
            self._blocking(what, lambda **how: dist.broadcast(value, self._global[source], self.group, **how))

    def kept(self) -> Sequence[Tensor]:
        return self._last_small or ()

    def _blocking(self, what: str, call: Callable[..., Any]) -> None:
        started = time.perf_counter()
        try:
            call()
        except RuntimeError as error:
            raise self.failed(what, -1, error) from error
        self.traffic.waited_s += time.perf_counter() - started


def all_gather_call() -> Any:
    """Of equal tensors into one; torch renames it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Alone:
    """A group of one rank that needs no process group at all."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def gather(self, flat: Tensor, what: str) -> Pending:
        return _Done()

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        if add:
            out.add_(flat)
        else:
            sum_rows([flat], out)
        return _Done()

    def scratch_numel(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        return 0

    def library_sum(self, flat: Tensor, what: str) -> Pending:
        return _Done()

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        return _Done()

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        return send

    def gather_small(self, value: Tensor, what: str) -> Tensor:
        return value.unsqueeze(0)

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        return

    def kept(self) -> Sequence[Tensor]:
        return ()


class _Done:
    def wait(self) -> None:
        return


def gather_bytes(comm: Comm, data: bytes, what: str, device: torch.device | None = None) -> list[bytes]:
    """Every rank's bytes, in rank order. For messages of at most a few megabytes."""
    sizes = [int(n) for n in comm.gather_small(torch.tensor([len(data)], device=device), what)[:, 0]]
    padded = torch.zeros(max([*sizes, 1]), dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = comm.gather_small(padded.to(device) if device else padded, what).cpu()
    return [bytes(everyone[i, : sizes[i]].tolist()) for i in range(comm.size)]


def barrier(comm: Comm, what: str, device: torch.device | None = None) -> None:
    comm.gather_small(torch.zeros(1, device=device), what)


def largest(comm: Comm, value: float, what: str, device: torch.device | None = None) -> float:
    """The largest of every rank's value: how ranks agree on a flag."""
    return float(comm.gather_small(torch.tensor([value], dtype=torch.float64, device=device), what).max())
