"""A unit's storages on one rank: what of it is held whole, and what as a shard.

============  =====================================  ==========================================
``full``      parameters, flat and padded            stages 0–2 always; stage 3 while gathered
``shard``     this rank's parameters                 stage 3 only
``gradient``  accumulated gradient                   whole at stages 0 and 1, a shard at 2 and 3
``moments``   the optimizer's tensors                whole at stage 0, a shard at 1 to 3
``master``    fp32 parameters, if those are 16-bit   as moments
============  =====================================  ==========================================

The module's parameters are lasting views of ``full``: they are made once. Releasing a unit shrinks the
storage below them to nothing and gathering grows it again, so whatever autograd saved stays valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...contract.errors import UsageError
from ...contract.partition import Part, Unit, stored_dtype
from ..comm import Comm, Pending
from .deferred import Recording
from .released import Veil


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that the partition calls ``name``."""
    found: torch.dtype = getattr(torch, name)
    return found


class Stage(NamedTuple):
    """A ZeRO stage as data: what of a unit is partitioned over the ranks."""

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool


STAGES = (
    Stage(False, False, False),
    Stage(True, False, False),
    Stage(True, True, False),
    Stage(True, True, True),
)


class Run(NamedTuple):
    """A contiguous run of elements of a unit that the optimizer updates; equal lengths, no copies."""

    parameter: Tensor
    gradient: Tensor
    moments: tuple[Tensor, ...]
    group: int
    unit: int = 0


class FlatUnit:
    """One unit of the partition on this rank; see the module's table."""

    def __init__(
        self,
        unit: Unit,
        tensors: Sequence[nn.Parameter],
        stage: Stage,
        comm: Comm,
        *,
        whole_gradient: bool,
        gradient_dtype: torch.dtype | None = None,
        recording: Recording | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.unit = unit
        self.tensors = list(tensors)
        self.comm = comm
        self.stage = stage
        self.parts: tuple[Part, ...] = tuple(unit.parts(comm.rank))
        self.gathered = True
        self._arriving: list[Pending] = []
        device, dtype = device or tensors[0].device, torch_dtype(unit.dtype)
        self.state_dtype = torch_dtype(stored_dtype(unit.dtype))
        self.master: Tensor | None = None
        if unit.trainable and self.state_dtype != dtype:
            self.master = self._first_master(device, recording)
        self.full = torch.empty(unit.padded, dtype=dtype, device=device)
        self._nbytes = self.full.untyped_storage().nbytes()
        with torch.no_grad():
            for at, placed in enumerate(unit.placed):
                tensor = tensors[at]
                view = self.full[placed.start : placed.stop].view(tensor.shape)
                view.copy_(recording.whole(tensor) if recording else tensor)
                if tensor.device.type == "meta":
                    self.tensors[at] = nn.Parameter(view.data, requires_grad=tensor.requires_grad)
                    self.tensors[at].__dict__.update(tensor.__dict__)  # how it was cut over tensor ranks
                else:
                    tensor.data = view
            self.full[unit.numel :].zero_()
        self.shard: Tensor | None = None
        self._veil: Veil | None = None
        if stage.shards_parameters:
            self._veil = Veil(self.tensors, [placed.parameter.name for placed in unit.placed], unit.modules)
            self.shard = torch.empty(unit.shard_numel, dtype=dtype, device=device)
            self._own = self._beside(self.shard)
            for place, own in self._own:
                own.copy_(place)
        self.gradient: Tensor | None = None
        if unit.trainable:
            width = unit.padded if whole_gradient else unit.shard_numel
            self.gradient = torch.zeros(width, dtype=gradient_dtype or self.state_dtype, device=device)
        self.whole_gradient = whole_gradient
        self.moments: tuple[Tensor, ...] = ()

    # --- parameters ----------------------------------------------------------------------------------

    def _first_master(self, device: torch.device, recording: Recording | None) -> Tensor:
        """The fp32 values that the model came with, of what this rank updates."""
        whole = torch.zeros(self.unit.padded, dtype=self.state_dtype, device=device)
        with torch.no_grad():
            for at, placed in enumerate(self.unit.placed):
                value = recording.whole(self.tensors[at]) if recording else self.tensors[at]
                whole[placed.start : placed.stop].copy_(value.reshape(-1))
        if not self.stage.shards_optimizer:
            return whole
        return torch.cat([whole[part.start : part.stop] for part in self.parts])

    def master_to_parameters(self) -> None:
        """Rounds the updated master into the working parameters (this rank's part)."""
        if self.master is None:
            return
        if not self.stage.shards_optimizer:
            self.full.copy_(self.master)
        elif self.shard is not None:
            self.shard.copy_(self.master)
        else:
            for place, own in self._beside(self.master):
                place.copy_(own)

    def _beside(self, shard: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This rank's parts of ``full`` and the same elements in ``shard``, as few views as it takes: the buckets of
        full width are rows of one, and the last, narrower one stands for itself."""
        unit = self.unit
        rows, width = unit.padded // unit.bucket, unit.bucket // unit.ranks
        pairs: list[tuple[Tensor, Tensor]] = []
        if rows:
            places = self.full[: rows * unit.bucket].view(rows, unit.ranks, width)[:, self.comm.rank]
            pairs.append((places, shard[: rows * width].view(rows, width)))
        for part in self.parts[rows:]:
            own = shard[part.offset : part.offset + part.stop - part.start]
            pairs.append((self.full[part.start : part.stop], own))
        return pairs

    def own_parameters(self) -> list[Tensor]:
        """This rank's shard of the parameters, as runs in shard order."""
        return self.parameters_of(self.comm.rank)

    def parameters_of(self, rank: int) -> list[Tensor]:
        """The shard of ``rank`` in full precision, as runs in shard order; another rank's only where it is
        held here."""
        if self.shard is not None:
            return [self.shard if self.master is None else self.master]
        if self.master is not None and self.stage.shards_optimizer:
            return [self.master]
        whole = self.full if self.master is None else self.master
        return [whole[part.start : part.stop] for part in self.unit.parts(rank)]

    def gather(self) -> None:
        """Starts to fill ``full`` from all ranks' shards (stage 3), unless it is there or on its way."""
        if self.gathered or self._arriving or self.shard is None:
            return
        self.full.untyped_storage().resize_(self._nbytes)
        self._fill()

    def renew(self) -> None:
        """Starts to fill ``full`` anew where it is there (stage 3): the shards have changed."""
        self.wait()
        if self.gathered and self.shard is not None:
            self.gathered = False
            self._fill()

    def _fill(self) -> None:
        for place, own in self._own:
            place.copy_(own)
        self._gather_buckets()

    def gather_updated(self) -> None:
        """Starts to fill ``full`` from the parts that each rank has just updated in place (stages 1, 2)."""
        self._gather_buckets()

    def _gather_buckets(self) -> None:
        buckets = torch.split(self.full, self.unit.bucket)
        for index, bucket in zip(range(len(self.parts)), buckets):  # noqa: B905 (Python 3.9 on the nodes)
            self._arriving.append(self.comm.gather(bucket, f"gather of unit {self.unit.name}, bucket {index}"))

    @property
    def under_way(self) -> bool:
        return bool(self._arriving)

    def wait(self) -> None:
        """Returns when ``full`` is filled."""
        for pending in self._arriving:
            pending.wait()
        if self._arriving:
            self._arriving = []
            self.gathered = True
            if self._veil is not None:
                self._veil.lift()

    def arrive(self) -> None:
        """Returns when ``full`` may be read. Other ranks may still read this one's part where they read memory, for
        which they need not be waited for before it is changed: :meth:`wait`."""
        read_from = [pending for pending in self._arriving if hasattr(pending, "arrive")]
        if not read_from:
            self.wait()
        for pending in read_from:
            pending.arrive()

    def release(self) -> None:
        """Gives back the storage of ``full`` (stage 3); what the parameters hold is gone with it."""
        if self.shard is None or not (self.gathered or self._arriving):
            return
        self.wait()  # a message still writes into it
        storage = self.full.untyped_storage()
        if not storage.resizable():
            raise UsageError(
                f"unit {self.unit.name} cannot be released: something outside holds its memory (an array of numpy?)",
                hint="copy what you want to keep: tensor.clone()",
            )
        self.gathered = False
        storage.resize_(0)
        if self._veil is not None:
            self._veil.draw()

    # --- gradients and optimizer ---------------------------------------------------------------------

    def gradient_of_part(self, index: int) -> Tensor:
        """Where the sum of bucket ``index`` goes: this rank's part of it."""
        assert self.gradient is not None
        part = self.parts[index]
        if self.whole_gradient:
            return self.gradient[part.start : part.stop]
        return self.gradient[part.offset : part.offset + part.stop - part.start]

    def make_moments(self, count: int) -> None:
        """Allocates the optimizer's tensors, zero, for what this rank updates."""
        if self.unit.trainable:
            width = self.unit.shard_numel if self.stage.shards_optimizer else self.unit.padded
            self.moments = tuple(
                torch.zeros(width, dtype=self.state_dtype, device=self.full.device) for _ in range(count)
            )

    def own_moments(self, index: int) -> list[Tensor]:
        """This rank's shard of moment ``index``, as runs in shard order."""
        return self.moments_of(index, self.comm.rank)

    def moments_of(self, index: int, rank: int) -> list[Tensor]:
        moment = self.moments[index]
        if self.stage.shards_optimizer:
            return [moment]
        return [moment[part.start : part.stop] for part in self.unit.parts(rank)]

    def runs(self) -> list[Run]:
        """What this rank's optimizer updates: everything at stage 0, else its shard."""
        if self.gradient is None:
            return []
        group = self.unit.group
        if not self.stage.shards_optimizer:
            return [Run(self.full if self.master is None else self.master, self.gradient, self.moments, group)]
        whole = self.shard if self.master is None else self.master
        if whole is not None and not self.whole_gradient:
            return [Run(whole, self.gradient, self.moments, group)]
        runs = []
        for index, part in enumerate(self.parts):
            at, width = part.offset, part.stop - part.start
            own = whole[at : at + width] if whole is not None else self.full[part.start : part.stop]
            moments = tuple(m[at : at + width] for m in self.moments)
            runs.append(Run(own, self.gradient_of_part(index), moments, group))
        return runs

    def runs_of(self, start: int, stop: int) -> list[Run]:
        """What of the flat elements from ``start`` to ``stop`` this rank's optimizer updates: at least one run, which
        is empty where that is nothing."""
        assert self.gradient is not None
        if self.stage.shards_optimizer:
            spans = [(p, max(p.start, start), min(p.stop, stop)) for p in self.parts]
            nothing = (self.parts[0], self.parts[0].start, self.parts[0].start)
            spans = [span for span in spans if span[1] < span[2]] or [nothing]
        else:
            spans = [(Part(0, self.unit.padded, 0), start, stop)]
        held = self.shard if self.master is None else self.master
        runs = []
        for part, first, end in spans:
            at, width = part.offset + first - part.start, end - first
            own = self.full[first:end] if held is None else held[at : at + width]
            gradient = self.gradient[first:end] if self.whole_gradient else self.gradient[at : at + width]
            runs.append(Run(own, gradient, tuple(m[at : at + width] for m in self.moments), self.unit.group))
        return runs

    def own_gradient_pieces(self) -> list[tuple[Tensor, str]]:
        """This rank's shard of the summed gradient, parameter by parameter."""
        if self.gradient is None:
            return []
        flat_start = {p.parameter.name: p.start for p in self.unit.placed}
        found = []
        for piece in self.unit.pieces(self.comm.rank):
            width = piece.stop - piece.start
            at = flat_start[piece.parameter.name] + piece.start if self.whole_gradient else piece.offset
            found.append((self.gradient[at : at + width], piece.parameter.name))
        return found
