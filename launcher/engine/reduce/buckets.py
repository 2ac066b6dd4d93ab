"""What gradients pass through: buckets, the places of parameters in them, and the buffers that go round.

Buckets are summed in one order on all ranks, that in which backward fills them (:func:`order`): a bucket that waits
for its turn holds a buffer. :func:`expected` reads the order of gradients off autograd's graph before backward begins.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..model.flat import FlatUnit

T = TypeVar("T")
IN_FLIGHT = 2


@dataclass(eq=False)
class Bucket:
    """One bucket: in this micro-step, how many parameter elements have not arrived, and where they go."""

    flat: FlatUnit
    index: int
    start: int
    stop: int
    numel: int  # without padding
    missing: int = 0
    buffer: Tensor | None = None
    turn: int = 0  # its place in the order of sums

    @property
    def wire(self) -> torch.dtype:
        """The dtype in which gradients are summed over passing buckets: that of the parameters."""
        return self.flat.full.dtype

    @property
    def sum(self) -> torch.dtype:
        """The dtype of the accumulated gradient."""
        assert self.flat.gradient is not None
        return self.flat.gradient.dtype


class Segment(NamedTuple):
    """Elements [start, stop) of a parameter lie at ``offset`` of ``bucket``."""

    bucket: Bucket
    start: int
    stop: int
    offset: int


@dataclass(eq=False)
class Place:
    """Where the gradient of one parameter goes. ``step`` and ``micro_step`` say when one came last."""

    name: str
    segments: list[Segment]
    whole: Tensor | None  # the part of the unit's whole gradient, in the parameter's shape; None: in passing buckets
    step: int = -1
    micro_step: int = -1


def places_of(flat: FlatUnit, *, passing: bool) -> list[Place]:
    """Those of a unit's parameters, over buckets of its own; none of a frozen unit. ``passing``: in buffers that go
    round, not in the unit's whole gradient."""
    unit = flat.unit
    if not unit.trainable:
        return []
    assert flat.gradient is not None
    ranges = [unit.bucket_range(index) for index in range(len(unit.buckets))]
    buckets = [Bucket(flat, i, a, b, max(0, min(b, unit.numel) - a)) for i, (a, b) in enumerate(ranges)]
    places = []
    for placed, tensor in zip(unit.placed, flat.tensors):  # noqa: B905 (Python 3.9 on the nodes)
        segments, at = [], placed.start
        while at < placed.stop:
            bucket = buckets[at // unit.bucket]
            end = min(placed.stop, bucket.stop)
            segments.append(Segment(bucket, at - placed.start, end - placed.start, at - bucket.start))
            at = end
        whole = None if passing else flat.gradient[placed.start : placed.stop].view(tensor.shape)
        places.append(Place(placed.parameter.name, segments, whole))
    return places


@dataclass
class Pool:
    """Buffers of one dtype: ``IN_FLIGHT`` of them, allocated once and reused. More are made where gradients do not come
    in the order of sums, and each is dropped when it is given back."""

    numel: int
    dtype: torch.dtype
    device: torch.device
    free: list[Tensor] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    grew: bool = False

    def fill(self) -> None:
        self.made = [self._make() for _ in range(IN_FLIGHT)]
        self.free = list(self.made)

    def take(self) -> Tensor:
        if self.free:
            return self.free.pop()
        self.grew = True
        self.made.append(self._make())
        return self.made[-1]

    def give(self, buffer: Tensor) -> None:
        for at in range(IN_FLIGHT, len(self.made)):
            if self.made[at] is buffer:
                del self.made[at]
                return
        self.free.append(buffer)

    def _make(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)


def pools(kinds: Sequence[tuple[torch.dtype, int]], device: torch.device) -> dict[torch.dtype, Pool]:
    """A filled pool of each dtype, its buffers as long as the longest of (dtype, elements)."""
    found: dict[torch.dtype, Pool] = {}
    for dtype, numel in kinds:
        pool = found.setdefault(dtype, Pool(0, dtype, device))
        pool.numel = max(pool.numel, numel)
    for pool in found.values():
        pool.fill()
    return found


# --- the order of sums ----------------------------------------------------------------------------------


def order(places: Sequence[Place], arrivals: Sequence[Place]) -> list[Bucket]:
    """Every bucket, in the order in which gradients that come as ``arrivals`` fill them; parameters that are not among
    them come last. Of those that one gradient fills, the one that was begun first: it holds a buffer already."""
    first: dict[Bucket, int] = {}
    last: dict[Bucket, int] = {}
    came = set(arrivals)
    for at, place in enumerate([*arrivals, *(p for p in reversed(places) if p not in came)]):
        for segment in sorted(place.segments, key=lambda segment: segment.start, reverse=True):
            first.setdefault(segment.bucket, at)
            last[segment.bucket] = at
    return sorted(last, key=lambda bucket: (last[bucket], first[bucket]))


def expected(loss: Tensor, wanted: Mapping[int, T]) -> list[T]:
    """``wanted``, by the ``id`` of the parameter, in the order in which backward from ``loss`` will complete gradients.

    Autograd takes, of the nodes whose outputs' gradients are all there, the one that forward made last, and hands a
    parameter's gradient over at once. What runs a backward of its own inside backward is not seen.
    """
    if loss.grad_fn is None:
        return []
    owing: Counter[Any] = Counter()  # gradients that a node still waits for
    seen = {loss.grad_fn}
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        for node, _ in ahead.pop().next_functions:
            if node is not None:
                owing[node] += 1
                if node not in seen:
                    seen.add(node)
                    ahead.append(node)
    found = []
    ready: list[tuple[int, int, Any]] = [(0, 0, loss.grad_fn)]
    posted = 0
    while ready:
        done = heapq.heappop(ready)[2]
        one = wanted.get(id(getattr(done, "variable", None)))
        if one is not None:
            found.append(one)
        for node, _ in done.next_functions:
            if node is not None:
                owing[node] -= 1
                if not owing[node]:
                    posted += 1
                    heapq.heappush(ready, (-node._sequence_nr(), posted, node))
    return found
