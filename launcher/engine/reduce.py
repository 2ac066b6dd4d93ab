"""How gradients get from autograd to the ranks that own them.

Autograd hands over each parameter's gradient as soon as it is complete. It is copied into its flat
place and freed; a bucket whose last element arrived is summed over ranks while backward goes on.

Two ways, by ``reduce_every``:

- ``step``: the place is the unit's whole gradient, which accumulates over micro-steps; buckets are
  slices of it, summed in the last micro-step only (stages 0 and 1 by default).
- ``micro_step``: the place is a bucket taken from a pool and given back once it is summed, in every
  micro-step; only the shard accumulates (stages 2 and 3 by default).

At stage 0 ``native`` takes the library's all-reduce of those slices instead, where bits need not be a stage's own.

With replicas the sum over a replica's ranks is one more rank's part: in the last micro-step it is summed over the ranks
that hold the same part, one in each replica, rank by rank and in place.

Buckets are summed in one fixed order on every rank (the reverse of the partition's), whatever order
autograd happens to take: otherwise ranks would answer each other's messages crosswise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .comm import Alone, Comm, Pending
from .flat import FlatUnit

IN_FLIGHT = 2


class _Segment(NamedTuple):
    """Elements [start, stop) of a parameter lie at ``offset`` of bucket ``bucket`` of its unit."""

    bucket: int
    start: int
    stop: int
    offset: int


@dataclass
class _Bucket:
    """One bucket in one micro-step: how many parameter elements have not arrived, and where they go."""

    unit: int
    index: int
    start: int
    stop: int
    numel: int  # without padding
    missing: int = 0
    buffer: Tensor | None = None


@dataclass
class _Flight:
    pending: Pending
    bucket: _Bucket
    scratch: Tensor | None
    buffer: Tensor | None = None


@dataclass
class _Pool:
    """Buffers of one dtype, allocated once and reused; grows only when gradients arrive out of order."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    free: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def take(self) -> Tensor:
        if not self.free:
            self.made.append(torch.empty(self.numel, dtype=self.dtype, device=self.device))
            self.free.append(self.made[-1])
        return self.free.pop()


class GradientFlow:
    """Takes gradients, sums them over ranks, leaves the sums in the units' ``gradient``.

    ``comm`` are the ranks that a unit is partitioned over, ``replica`` those that hold the same shard.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        comm: Comm,
        *,
        every_micro_step: bool,
        replica: Comm | None = None,
        native: bool = False,
    ) -> None:
        self.units = units
        self.comm = comm
        self.replica = replica or Alone()
        self.every_micro_step = every_micro_step
        self.native = native and comm.size > 1
        self.touched: set[tuple[int, int]] = set()  # (unit, parameter) that had a gradient in this step
        self._arrived: set[tuple[int, int]] = set()  # … in this micro-step
        self._first = self._last = True
        self._segments: list[list[list[_Segment]]] = []
        self._buckets: list[list[_Bucket]] = []
        for number, flat in enumerate(units):
            self._plan(number, flat)
        self._order = [b for row in reversed(self._buckets) for b in reversed(row)]
        self._next = 0
        self._flights: deque[_Flight] = deque()
        self._crossings: deque[_Flight] = deque()
        self._gathers: list[Pending] = []
        whole = [(self._wire(b), b.stop - b.start) for b in self._order] if comm.size > 1 and not self.native else []
        shares = [(self._sum(b), (b.stop - b.start) // comm.size) for b in self._order if self.replica.size > 1]
        self._buffers = self._pools(whole if every_micro_step else [])
        self._scratch = self._pools([(dtype, self._room(comm, numel, dtype)) for dtype, numel in whole])
        self._shares = self._pools([(dtype, self._room(self.replica, numel, dtype)) for dtype, numel in shares])

    def _plan(self, number: int, flat: FlatUnit) -> None:
        unit = flat.unit
        if not unit.trainable:
            self._segments.append([])
            self._buckets.append([])
            return
        ranges = [unit.bucket_range(i) for i in range(len(unit.buckets))]
        self._buckets.append(
            [_Bucket(number, i, a, b, max(0, min(b, unit.numel) - a)) for i, (a, b) in enumerate(ranges)]
        )
        rows = []
        for placed in unit.placed:
            row = []
            at = placed.start
            while at < placed.stop:
                bucket = at // unit.bucket
                end = min(placed.stop, ranges[bucket][1])
                row.append(_Segment(bucket, at - placed.start, end - placed.start, at - ranges[bucket][0]))
                at = end
            rows.append(row)
        self._segments.append(rows)

    def _pools(self, kinds: Sequence[tuple[torch.dtype, int]]) -> dict[torch.dtype, _Pool]:
        """``IN_FLIGHT`` buffers of each dtype, as long as the longest of (dtype, elements)."""
        pools: dict[torch.dtype, _Pool] = {}
        for dtype, numel in kinds:
            pool = pools.setdefault(dtype, _Pool(0, dtype, self.units[0].full.device))
            pool.numel = max(pool.numel, numel)
        for pool in pools.values():
            pool.made = [torch.empty(pool.numel, dtype=pool.dtype, device=pool.device) for _ in range(IN_FLIGHT)]
            pool.free = list(pool.made)
        return pools

    def _room(self, comm: Comm, numel: int, dtype: torch.dtype) -> int:
        return comm.scratch_numel(numel, dtype, self.units[0].full.device)

    def _wire(self, bucket: _Bucket) -> torch.dtype:
        """The dtype of the messages: the working one for passing buckets, the accumulated one for slices."""
        return self.units[bucket.unit].full.dtype if self.every_micro_step else self._sum(bucket)

    def _sum(self, bucket: _Bucket) -> torch.dtype:
        """The dtype of the accumulated gradient."""
        gradient = self.units[bucket.unit].gradient
        assert gradient is not None
        return gradient.dtype

    def storages(self) -> list[Tensor]:
        """Every buffer that this object keeps."""
        kinds = (self._buffers, self._scratch, self._shares)
        return [t for pools in kinds for pool in pools.values() for t in pool.made]

    # --- a micro-step --------------------------------------------------------------------------------

    def begin(self, *, first: bool, last: bool) -> None:
        """A backward follows; ``first`` and ``last`` say where in the step it stands."""
        self._first, self._last = first, last
        if first:
            self.touched.clear()
        self._arrived.clear()
        self._next = 0
        for bucket in self._order:
            bucket.missing = bucket.numel

    def arrived(self, number: int, index: int, gradient: Tensor) -> None:
        """The gradient of parameter ``index`` of unit ``number`` is complete."""
        self._arrived.add((number, index))
        flat = self.units[number]
        placed = flat.unit.placed[index]
        if not self.every_micro_step:
            assert flat.gradient is not None
            place = flat.gradient[placed.start : placed.stop].view(gradient.shape)
            if self._first or (number, index) not in self.touched:
                place.copy_(gradient)
            else:
                place.add_(gradient)
            if self._last:
                for segment in self._segments[number][index]:
                    self._buckets[number][segment.bucket].missing -= segment.stop - segment.start
        else:
            self._into_buckets(number, index, gradient)
        self.touched.add((number, index))
        self._advance()

    def _into_buckets(self, number: int, index: int, gradient: Tensor) -> None:
        segments = self._segments[number][index]
        flattened = gradient if len(segments) == 1 else gradient.reshape(-1)
        for segment in reversed(segments):  # the order in which buckets are summed
            bucket = self._buckets[number][segment.bucket]
            buffer = self._buffer_of(bucket)
            place = buffer[segment.offset : segment.offset + segment.stop - segment.start]
            if len(segments) == 1:
                place.view(gradient.shape).copy_(gradient)
            else:
                place.copy_(flattened[segment.start : segment.stop])
            bucket.missing -= segment.stop - segment.start
            self._advance()

    def _buffer_of(self, bucket: _Bucket) -> Tensor:
        if bucket.buffer is None:
            pool = self._buffers[self._wire(bucket)]
            if not pool.free and self._flights:
                self._land()
            bucket.buffer = pool.take()
        return bucket.buffer

    def finish(self) -> None:
        """Backward has ended: what never got a gradient counts as zero; everything is summed."""
        for number, rows in enumerate(self._segments):
            for index in range(len(rows)):
                if (number, index) not in self._arrived:
                    self._absent(number, index)
        self._advance()
        while self._flights:
            self._land()
        while self._crossings:
            self._cross_back()
        for pending in self._gathers:
            pending.wait()
        self._gathers = []

    def _absent(self, number: int, index: int) -> None:
        flat = self.units[number]
        placed = flat.unit.placed[index]
        if not self.every_micro_step:
            if self._last:
                assert flat.gradient is not None
                if (number, index) not in self.touched:
                    flat.gradient[placed.start : placed.stop].zero_()
                for segment in self._segments[number][index]:
                    self._buckets[number][segment.bucket].missing -= segment.stop - segment.start
            return
        for segment in reversed(self._segments[number][index]):
            bucket = self._buckets[number][segment.bucket]
            width = segment.stop - segment.start
            self._buffer_of(bucket)[segment.offset : segment.offset + width].zero_()
            bucket.missing -= width
            self._advance()

    # --- buckets -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Sends off every complete bucket whose turn it is."""
        if not self.every_micro_step and not self._last:
            return
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._send_off(self._order[self._next])
            self._next += 1

    def _send_off(self, bucket: _Bucket) -> None:
        flat = self.units[bucket.unit]
        out = flat.gradient_of_part(bucket.index)
        width = bucket.stop - bucket.start
        if self.comm.size == 1:
            return  # the whole gradient is this rank's part
        if self.every_micro_step:
            if bucket.buffer is None:
                bucket.buffer = self._buffer_of(bucket)
            payload = _first(bucket.buffer, width)
        else:
            assert flat.gradient is not None
            payload = flat.gradient[bucket.start : bucket.stop]
        if bucket.numel < width:
            payload[bucket.numel :].zero_()
        what = f"sum of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
        if self.native:
            self._flights.append(_Flight(self.comm.library_sum(payload, what), bucket, None))
            return
        pool = self._scratch[payload.dtype]
        if not pool.free:
            self._land()
        scratch = pool.take()
        add = self.every_micro_step and not self._first
        room = _first(scratch, self._room(self.comm, width, payload.dtype))
        pending = self.comm.reduce(payload, out, room, what, add=add)
        self._flights.append(_Flight(pending, bucket, scratch, bucket.buffer))
        bucket.buffer = None

    def _land(self) -> None:
        """Waits for the oldest sum under way and takes its buffers back."""
        flight = self._flights.popleft()
        flight.pending.wait()
        if flight.scratch is not None:
            self._scratch[flight.scratch.dtype].free.append(flight.scratch)
        if flight.buffer is not None:
            self._buffers[flight.buffer.dtype].free.append(flight.buffer)
        if not self._last or self.native:
            return
        if self.replica.size > 1:
            self._cross(flight.bucket)
        else:
            self._spread(flight.bucket)

    def _cross(self, bucket: _Bucket) -> None:
        """Starts to sum this rank's part of a bucket over replicas, each of which sums a part of that."""
        flat = self.units[bucket.unit]
        part = flat.gradient_of_part(bucket.index)
        pool = self._shares[part.dtype]
        if not pool.free:
            self._cross_back()
        scratch, width = pool.take(), part.numel() // self.replica.size
        out = part[self.replica.rank * width : (self.replica.rank + 1) * width]
        what = f"sum over replicas of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
        room = _first(scratch, self._room(self.replica, part.numel(), part.dtype))
        pending = self.replica.reduce(part, out, room, what)
        self._crossings.append(_Flight(pending, bucket, scratch))

    def _cross_back(self) -> None:
        """Waits for the oldest sum over replicas, and starts to gather its parts from them."""
        crossing = self._crossings.popleft()
        crossing.pending.wait()
        assert crossing.scratch is not None
        self._shares[crossing.scratch.dtype].free.append(crossing.scratch)
        flat = self.units[crossing.bucket.unit]
        what = f"gather over replicas of the gradients of unit {flat.unit.name}, bucket {crossing.bucket.index}"
        self._gathers.append(self.replica.gather(flat.gradient_of_part(crossing.bucket.index), what))
        if not flat.stage.shards_optimizer:
            self._gathers[-1].wait()
            self._spread(crossing.bucket)

    def _spread(self, bucket: _Bucket) -> None:
        """At stage 0 every rank needs every sum."""
        flat = self.units[bucket.unit]
        if not flat.stage.shards_optimizer:
            assert flat.gradient is not None
            what = f"gather of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
            self._gathers.append(self.comm.gather(flat.gradient[bucket.start : bucket.stop], what))


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if count == buffer.numel() else buffer[:count]
