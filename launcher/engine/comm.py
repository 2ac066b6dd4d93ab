"""The one place where collectives live.

:class:`Comm` is what the engine needs of a group of ranks: gather a flat range in place, sum one over
ranks, and a few small messages. Two implementations, chosen by the backend of the process group:

- :class:`PeerComm` (gloo): gathers by messages from rank to rank straight into place; sums by sending
  each rank its part and adding the parts **in rank order**. gloo's own reduce_scatter is a clone plus an
  all-reduce, twice the bytes, and its sum depends on an element's place in the ring; ours does not, so
  ZeRO stages, bucket sizes and overlap give equal bits.
- :class:`NativeComm` (NCCL and others): the library's collectives; bits are the library's.

Everything is counted here. ``volume_elements`` counts whole messages, as the ZeRO paper does;
``sent_bytes`` what leaves this rank; small messages (norms, digests, agreements) are apart.
Object collectives are banned: bytes travel as uint8 tensors, JSON inside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract.errors import JobFailed
from .absent import absent
from .ending import rest_before_exit

GATHER_TAG, REDUCE_TAG, EXCHANGE_TAG = 101, 102, 103


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
        or part ``rank`` of ``flat`` itself; ``flat`` and ``scratch`` ``((size-1)·k,)`` are clobbered.
        """

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


class _Waiting:
    """Handles of one message, with what has to happen once they are done; both dropped after."""

    def __init__(self, comm: _Base, what: str, handles: list[tuple[Any, int]]) -> None:
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


class _Sum(_Waiting):
    """Adds the rows in rank order, which makes the sum independent of everything but the ranks."""

    rows: list[Tensor]
    out: Tensor
    spare: Tensor
    add: bool

    def _finish(self) -> None:
        rows, out = self.rows, self.out
        if self.add:
            spare = self.spare if self.spare.dtype == out.dtype else torch.empty_like(out)
            sum_rows(rows, spare)
            out.add_(spare)
        else:
            sum_rows(rows, out)
        self.rows = []


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


class _Base:
    """What both kinds share: counting, small messages, errors that name the missing rank."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        rest_before_exit()
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()
        self._last_small: tuple[Tensor, Tensor] | None = None
        self._global = [dist.get_global_rank(group, i) if group else i for i in range(self.size)]

    def failed(self, what: str, peer: int, error: BaseException) -> CommError:
        silent = absent(self._global, self._global[self.rank], what)
        if silent:
            whom = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not take part"
        else:
            whom = f"rank {self._global[peer]} did not take part" if peer >= 0 else "a rank did not take part"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CommError(
            f"rank {self._global[self.rank]}: {what}: {whom} ({first})",
            hint="the first rank that failed, or the one that stands still, is the cause; see its log",
        )

    def _count(self, flat: Tensor) -> None:
        self.traffic.volume_elements += flat.numel()
        self.traffic.sent_bytes += flat.numel() // self.size * (self.size - 1) * flat.element_size()

    def _part(self, flat: Tensor, index: int) -> Tensor:
        width = flat.numel() // self.size
        return flat[index * width : (index + 1) * width]

    def library_sum(self, flat: Tensor, what: str) -> Pending:
        if self.size == 1:
            return _Waiting(self, what, [])
        self._count(flat)
        self._count(flat)  # a sum and a gather in one
        return _Waiting(self, what, [(dist.all_reduce(flat, group=self.group, async_op=True), -1)])

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        if self.size == 1:
            return send
        received = send.new_empty(sum(receive_counts))
        self.traffic.control_bytes += (send.numel() - send_counts[self.rank]) * send.element_size()
        self._blocking(
            what, lambda: dist.all_to_all_single(received, send, list(receive_counts), list(send_counts), self.group)
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
        self._blocking(what, lambda: _all_gather()(everyone, value.unsqueeze(0), group=self.group))
        return everyone

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        if self.size > 1:
            self.traffic.control_bytes += value.numel() * value.element_size() if self.rank == source else 0
            self._blocking(what, lambda: dist.broadcast(value, self._global[source], group=self.group))

    def _blocking(self, what: str, call: Any) -> None:
        started = time.perf_counter()
        try:
            call()
        except RuntimeError as error:
            raise self.failed(what, -1, error) from error
        self.traffic.waited_s += time.perf_counter() - started


class PeerComm(_Base):
    """Messages from rank to rank into place, sums in rank order. ``passing``: of tensors that are to go soon after."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, passing: bool = False) -> None:
        super().__init__(group)
        self._in_one = self.size == 2 and not passing

    def gather(self, flat: Tensor, what: str) -> Pending:
        handles: list[tuple[Any, int]] = []
        if self.size > 1:
            self._count(flat)
            own = self._part(flat, self.rank)
            try:
                for to, source in self._rounds():
                    handles += self._trade(own, to, self._part(flat, source), source, GATHER_TAG)
            except RuntimeError as error:
                raise self.failed(what, to, error) from error
        return _Waiting(self, what, handles)

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        handles: list[tuple[Any, int]] = []
        width = flat.numel() // self.size
        rows = list(torch.split(scratch, width)) if self.size > 1 else []
        rows.insert(self.rank, self._part(flat, self.rank))
        if self.size > 1:
            self._count(flat)
            try:
                for to, source in self._rounds():
                    handles += self._trade(self._part(flat, to), to, rows[source], source, REDUCE_TAG)
            except RuntimeError as error:
                raise self.failed(what, to, error) from error
        pending = _Sum(self, what, handles)
        pending.rows, pending.out, pending.spare, pending.add = rows, out, rows[self.rank], add
        if self.size == 1:
            pending._finish()
        return pending

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        if self.size > 1:
            own = self._part(flat, self.rank)
            self.reduce(flat, own, flat.new_empty(flat.numel() - own.numel()), what).wait()
        return self.gather(flat, what)

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """To whom this rank sends, and from whom it receives, in the order of distances."""
        for distance in range(1, self.size):
            yield (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def _trade(self, sent: Tensor, to: int, received: Tensor, source: int, tag: int) -> list[tuple[Any, int]]:
        if self._in_one:
            # A thread of gloo sends and receives. A message of its own would be written by whoever posts it, here in
            # the middle of backward, after the thread has let go of what it reads. It keeps both tensors a bit longer.
            counts = [0, sent.numel()] if to else [sent.numel(), 0]
            work = dist.all_to_all_single(received, sent, counts, counts, group=self.group, async_op=True)
            return [(work, to)]
        return [
            (dist.isend(sent, self._global[to], group=self.group, tag=tag), to),
            (dist.irecv(received, self._global[source], group=self.group, tag=tag), source),
        ]


def _all_gather() -> Any:
    """Of equal tensors into one; torch renames it."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Added(_Waiting):
    out: Tensor
    summed: Tensor | None = None

    def _finish(self) -> None:
        if self.summed is not None:
            self.out.add_(self.summed)
            self.summed = None


class NativeComm(_Base):
    """The library's own collectives, asynchronous, in place where it can."""

    def gather(self, flat: Tensor, what: str) -> Pending:
        if self.size == 1:
            return _Waiting(self, what, [])
        self._count(flat)
        work = _all_gather()(flat, self._part(flat, self.rank), group=self.group, async_op=True)
        return _Waiting(self, what, [(work, -1)])

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        pending = _Added(self, what, [])
        pending.out = out
        if flat.dtype != out.dtype:  # the library adds in the message's precision
            flat, scratch = flat.to(out.dtype), torch.empty_like(out)
        target = scratch[: out.numel()] if add else out
        if self.size == 1:
            sum_rows([flat], target)
            pending.summed = target if add else None
            pending._finish()
            return pending
        self._count(flat)
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        pending._handles = [(call(target, flat, group=self.group, async_op=True), -1)]
        pending.summed = target if add else None
        return pending

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        return self.library_sum(flat, what)


def connect(group: dist.ProcessGroup | None = None, *, passing: bool = False) -> Comm:
    """The way to communicate that suits the backend of ``group`` (default: all ranks). ``passing``: what is sent are
    activations, not buffers that last."""
    return PeerComm(group, passing=passing) if dist.get_backend(group) == "gloo" else NativeComm(group)


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
