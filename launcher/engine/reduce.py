"""How gradients get from autograd to the ranks that own them.

Autograd hands over each parameter's gradient as soon as it is complete. It is copied into its flat
place and freed; a bucket whose last element arrived is summed over ranks while backward goes on.

Two ways, by ``reduce_every``:

- ``step``: the place is the unit's whole gradient, which accumulates over micro-steps; buckets are
  slices of it, summed in the last micro-step only (stages 0 and 1 by default).
- ``micro_step``: the place is a bucket taken from a pool and given back once it is summed, in every
  micro-step; only the shard accumulates (stages 2 and 3 by default).

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

from .comm import Comm, Pending
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
    scratch: Tensor
    buffer: Tensor | None


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
    """Takes gradients, sums them over ranks, leaves the sums in the units' ``gradient``."""

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, *, every_micro_step: bool) -> None:
        self.units = units
        self.comm = comm
        self.every_micro_step = every_micro_step
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
        self._gathers: list[Pending] = []
        self._buffers = self._pools(1 if every_micro_step else 0)
        self._scratch = self._pools(1)

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

    def _pools(self, count: int) -> dict[torch.dtype, _Pool]:
        pools: dict[torch.dtype, _Pool] = {}
        if not count or self.comm.size == 1:
            return pools
        for bucket in self._order:
            dtype, device = self._wire(bucket), self.units[bucket.unit].full.device
            pool = pools.setdefault(dtype, _Pool(0, dtype, device))
            pool.numel = max(pool.numel, bucket.stop - bucket.start)
        for pool in pools.values():
            pool.made = [torch.empty(pool.numel, dtype=pool.dtype, device=pool.device) for _ in range(IN_FLIGHT)]
            pool.free = list(pool.made)
        return pools

    def _wire(self, bucket: _Bucket) -> torch.dtype:
        """The dtype of the messages: the working one for passing buckets, the accumulated one for slices."""
        flat = self.units[bucket.unit]
        assert flat.gradient is not None
        return flat.full.dtype if self.every_micro_step else flat.gradient.dtype

    def storages(self) -> list[Tensor]:
        """Every buffer that this object keeps."""
        return [t for pools in (self._buffers, self._scratch) for pool in pools.values() for t in pool.made]

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
        pool = self._scratch[payload.dtype]
        if not pool.free:
            self._land()
        scratch = pool.take()
        add = self.every_micro_step and not self._first
        what = f"sum of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
        pending = self.comm.reduce(payload, out, _first(scratch, width), what, add=add)
        self._flights.append(_Flight(pending, bucket, scratch, bucket.buffer))
        bucket.buffer = None

    def _land(self) -> None:
        """Waits for the oldest sum under way and takes its buffers back."""
        flight = self._flights.popleft()
        flight.pending.wait()
        flat = self.units[flight.bucket.unit]
        self._scratch[flight.scratch.dtype].free.append(flight.scratch)
        if flight.buffer is not None:
            self._buffers[flight.buffer.dtype].free.append(flight.buffer)
        if self._last and not flat.stage.shards_optimizer:
            assert flat.gradient is not None
            what = f"gather of the gradients of unit {flat.unit.name}, bucket {flight.bucket.index}"
            self._gathers.append(self.comm.gather(flat.gradient[flight.bucket.start : flight.bucket.stop], what))


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if count == buffer.numel() else buffer[:count]
