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

Buckets are summed in one order on every rank, whatever order autograd happens to take there: otherwise ranks would
answer each other's messages crosswise. It is the order in which rank 0's first backward fills them, read off autograd's
graph and broadcast before any message; where passing buckets then had to wait for their turn, it is settled anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract.errors import UsageError
from ..comm import Alone, Comm, Pending
from ..model.flat import FlatUnit
from .buckets import IN_FLIGHT, Bucket, Place, expected, order, places_of, pools

DENSE = "gradients are partitioned as dense ones; sparse=False gives the same numbers"


@dataclass
class _Flight:
    pending: Pending
    bucket: Bucket
    scratch: Tensor | None
    buffer: Tensor | None = None


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
        self.comm = comm
        self.replica = replica or Alone()
        self.every_micro_step = every_micro_step
        self.native = native and comm.size > 1
        self.device = units[0].full.device
        self.places = [places_of(flat, passing=every_micro_step) for flat in units]
        """Of each unit, each parameter; none of a frozen unit."""
        self._places = [place for row in self.places for place in row]
        self._of_tensor = {
            id(tensor): place
            for flat, row in zip(units, self.places)  # noqa: B905 (Python 3.9 on the nodes)
            for tensor, place in zip(flat.tensors, row)  # noqa: B905
        }
        self._first = self._last = True
        self._step = self._micro_step = 0
        self._used = 0  # parameters that had a gradient in this step
        self._arrivals: list[Place] = []  # in this micro-step
        self._order = order(self._places, [])
        self._settled = comm.size == 1
        self._told: set[Place] | None = None  # of which the order of this micro-step was made
        self._hidden = False  # once a gradient came that the graph did not show
        self.disturbed = False
        """Buckets of rank 0 had to wait for their turn since the order was settled: :meth:`settle_anew`."""
        self._next = 0
        self._flights: deque[_Flight] = deque()
        self._landed: deque[Bucket] = deque()  # summed; what follows has not been sent
        self._crossings: deque[_Flight] = deque()
        self._gathers: list[Pending] = []
        whole = [(self._wire(b), b.stop - b.start) for b in self._order] if comm.size > 1 and not self.native else []
        shares = [(b.sum, (b.stop - b.start) // comm.size) for b in self._order if self.replica.size > 1]
        self._buffers = pools(whole if every_micro_step else [], self.device)
        self._scratch = pools([(dtype, self._room(comm, numel, dtype)) for dtype, numel in whole], self.device)
        self._shares = pools([(dtype, self._room(self.replica, numel, dtype)) for dtype, numel in shares], self.device)

    def _room(self, comm: Comm, numel: int, dtype: torch.dtype) -> int:
        return comm.scratch_numel(numel, dtype, self.device)

    def _wire(self, bucket: Bucket) -> torch.dtype:
        """The dtype of the messages: the working one for passing buckets, the accumulated one for slices."""
        return bucket.wire if self.every_micro_step else bucket.sum

    def storages(self) -> list[Tensor]:
        """Every buffer that this object keeps."""
        kinds = (self._buffers, self._scratch, self._shares)
        return [t for kind in kinds for pool in kind.values() for t in pool.made]

    # --- the order of sums ---------------------------------------------------------------------------

    def _settle(self, loss: Tensor) -> None:
        """Every rank takes rank 0's order; it stays when it comes out twice. Where a graph did not show all (a backward
        inside backward), it is that of the last micro-step."""
        arrivals = self._arrivals if self._hidden else expected(loss, self._of_tensor)
        self._told = set(arrivals)
        default = order(self._places, [])
        at = {bucket: number for number, bucket in enumerate(default)}
        turns = [at[bucket] for bucket in order(self._places, arrivals)]
        own = torch.tensor(turns, dtype=torch.int32).to(self.device)
        agreed = own.clone()
        for comm in (self.replica, self.comm):
            comm.broadcast(agreed, 0, "the order in which gradients are summed")
        new = [default[number] for number in (agreed.tolist() if bool((agreed != own).any()) else turns)]
        self._settled = new == self._order
        self._order = new
        for turn, bucket in enumerate(new):
            bucket.turn = turn
        for place in self._places:
            place.segments.sort(key=lambda segment: segment.bucket.turn)

    def settle_anew(self) -> None:
        """Before the next sums; every rank says so, if :attr:`disturbed` is true of any."""
        self._settled = self.disturbed = False

    def _is_disturbed(self) -> bool:
        grew = [pool for pool in self._buffers.values() if pool.grew]
        for pool in grew:
            pool.grew = False
        first = self.comm.rank == self.replica.rank == 0
        return bool(grew) and first and order(self._places, self._arrivals) != self._order

    # --- what was used -------------------------------------------------------------------------------

    @property
    def all_used(self) -> bool:
        """Whether every parameter has had a gradient in this step, on this rank."""
        return self._used == len(self._places)

    def used(self) -> list[bool]:
        """Of each trainable parameter, unit by unit: whether it has had a gradient in this step, on this rank."""
        return [place.step == self._step for place in self._places]

    # --- a micro-step --------------------------------------------------------------------------------

    def begin(self, loss: Tensor, *, first: bool, last: bool) -> None:
        """Backward from ``loss`` follows; ``first`` and ``last`` say where in the step it stands."""
        self._first, self._last = first, last
        self._micro_step += 1
        if first:
            self._step += 1
            self._used = 0
        if self._sums and not self._settled:
            self._settle(loss)
        self._arrivals = []
        self._next = 0
        for bucket in self._order:
            bucket.missing = bucket.numel

    @property
    def _sums(self) -> bool:
        """Whether gradients are summed over ranks in this micro-step."""
        return self.every_micro_step or self._last

    def arrived(self, place: Place, gradient: Tensor) -> None:
        """The gradient of one of ``places`` is complete."""
        if place.micro_step == self._micro_step:
            raise UsageError(
                f"the gradient of parameter {place.name} came twice in one backward",
                hint="it is used in several parts that run a backward of their own: checkpoint(…, use_reentrant=False)",
            )
        if gradient.is_sparse:
            raise UsageError(f"the gradient of parameter {place.name} is sparse", hint=DENSE)
        place.micro_step = self._micro_step
        self._arrivals.append(place)
        fresh = place.step != self._step
        if fresh:
            place.step = self._step
            self._used += 1
        if place.whole is None:
            self._into_buckets(place, gradient)
            return
        if fresh:
            place.whole.copy_(gradient)
        else:
            place.whole.add_(gradient)
        if self._last:
            self._complete(place)

    def _complete(self, place: Place) -> None:
        """What lies in the whole gradient is all that there will be."""
        for segment in place.segments:
            segment.bucket.missing -= segment.stop - segment.start
        self._advance()

    def _into_buckets(self, place: Place, gradient: Tensor | None) -> None:
        """None: zeros."""
        segments = place.segments  # in the order of sums
        flattened = gradient if gradient is None or len(segments) == 1 else gradient.reshape(-1)
        for segment in segments:
            bucket = segment.bucket
            into = self._buffer_of(bucket)[segment.offset : segment.offset + segment.stop - segment.start]
            if flattened is None:
                into.zero_()
            elif len(segments) == 1:
                into.view(flattened.shape).copy_(flattened)
            else:
                into.copy_(flattened[segment.start : segment.stop])
            bucket.missing -= segment.stop - segment.start
            self._advance()

    def _buffer_of(self, bucket: Bucket) -> Tensor:
        if bucket.buffer is None:
            pool = self._buffers[bucket.wire]
            while not pool.free and self._flights:
                self._land()
            bucket.buffer = pool.take()
        return bucket.buffer

    def finish(self) -> None:
        """Backward has ended: what never got a gradient counts as zero; everything is summed."""
        if len(self._arrivals) < len(self._places) and self._sums:
            for place in reversed(self._places):  # as :func:`order` has them
                if place.micro_step != self._micro_step:
                    self._absent(place)
        self._advance()
        while self._flights or self._landed:
            self._follow_up()
        while self._crossings:
            self._cross_back()
        for pending in self._gathers:
            pending.wait()
        self._gathers = []
        if self._told is not None:
            self._hidden = self._hidden or not self._told.issuperset(self._arrivals)
            self._told = None
        self.disturbed = self._is_disturbed() or self.disturbed

    def _absent(self, place: Place) -> None:
        if place.whole is None:
            self._into_buckets(place, None)
            return
        if place.step != self._step:
            place.whole.zero_()
        self._complete(place)

    # --- buckets -------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Sends off every complete bucket whose turn it is."""
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._next += 1
            self._send_off(self._order[self._next - 1])

    def _send_off(self, bucket: Bucket) -> None:
        if self.comm.size == 1:
            return  # the whole gradient is this rank's part
        flat = bucket.flat
        out = flat.gradient_of_part(bucket.index)
        width = bucket.stop - bucket.start
        if self.every_micro_step:
            payload = _first(self._buffer_of(bucket), width)
        else:
            assert flat.gradient is not None
            payload = flat.gradient[bucket.start : bucket.stop]
        if bucket.numel < width:
            payload[bucket.numel :].zero_()
        what = f"sum of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
        if self.native:
            self._flights.append(_Flight(self.comm.library_sum(payload, what), bucket, None))
            return
        while len(self._flights) + len(self._landed) >= IN_FLIGHT:
            self._follow_up()
        scratch = self._scratch[payload.dtype].take()
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
            self._scratch[flight.scratch.dtype].give(flight.scratch)
        if flight.buffer is not None:
            self._buffers[flight.buffer.dtype].give(flight.buffer)
        self._landed.append(flight.bucket)

    def _follow_up(self) -> None:
        """Sends what follows the oldest sum. Not when a sum lands: that is when a rank needs a buffer, which depends on
        the order of its own gradients, and messages may not."""
        if not self._landed:
            self._land()
        bucket = self._landed.popleft()
        if not self._last or self.native:
            return
        if self.replica.size > 1:
            self._cross(bucket)
        else:
            self._spread(bucket)

    def _cross(self, bucket: Bucket) -> None:
        """Starts to sum this rank's part of a bucket over replicas, each of which sums a part of that."""
        flat = bucket.flat
        part = flat.gradient_of_part(bucket.index)
        pool = self._shares[part.dtype]
        while not pool.free:
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
        self._shares[crossing.scratch.dtype].give(crossing.scratch)
        flat = crossing.bucket.flat
        what = f"gather over replicas of the gradients of unit {flat.unit.name}, bucket {crossing.bucket.index}"
        self._gathers.append(self.replica.gather(flat.gradient_of_part(crossing.bucket.index), what))
        if not flat.stage.shards_optimizer:
            self._gathers[-1].wait()
            self._spread(crossing.bucket)

    def _spread(self, bucket: Bucket) -> None:
        """At stage 0 every rank needs every sum."""
        flat = bucket.flat
        if not flat.stage.shards_optimizer:
            assert flat.gradient is not None
            what = f"gather of the gradients of unit {flat.unit.name}, bucket {bucket.index}"
            self._gathers.append(self.comm.gather(flat.gradient[bucket.start : bucket.stop], what))


def _first(buffer: Tensor, count: int) -> Tensor:
    return buffer if count == buffer.numel() else buffer[:count]
