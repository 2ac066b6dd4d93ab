"""Which elements of a parameter a tensor rank has, and how one tensor degree is read at another.

A parameter that is split along an axis is seen as rows (everything before the axis), stretches along the
axis (``tensor_parts``, usually one) and what is behind it (``inner`` elements)::

    fused q k v, 6 rows, T = 2, three stretches      stretch     q   q | k   k | v   v
                                                     tensor rank 0   1 | 0   1 | 0   1

So a slice is a list of **runs** that are contiguous both in the slice and in the whole parameter. A
checkpoint's bytes are found by going from the slice that is wanted to the whole parameter, and from there
to the slices that were saved. Padding (of a vocabulary) is in no run: it is neither saved for others nor
read. Pure arithmetic, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from math import prod
from typing import Dict, Iterator, List, NamedTuple, Tuple

from .partition import Copy, Layout, Parameter, check_same_parameters, reshard


class Slice(NamedTuple):
    """``numel`` elements from ``local`` of a tensor rank's slice are those from ``whole`` of the parameter."""

    tensor_rank: int
    local: int
    whole: int
    numel: int


class _Cut(NamedTuple):
    rows: int
    parts: int
    along: int  # of one stretch, in elements
    width: int  # of one rank's share of a stretch, in elements, padding included


def _cut(parameter: Parameter, tensor: int) -> _Cut:
    axis = parameter.tensor_axis
    assert axis is not None
    inner = prod(parameter.shape[axis + 1 :])
    parts = parameter.tensor_parts
    width = parameter.local_shape(tensor)[axis] // parts * inner
    return _Cut(prod(parameter.shape[:axis]), parts, parameter.shape[axis] // parts * inner, width)


def slices(parameter: Parameter, tensor: int, tensor_rank: int, start: int, stop: int) -> Iterator[Slice]:
    """Local elements [start, stop) of ``tensor_rank`` as runs of the whole parameter, in rising order."""
    if not parameter.is_split(tensor):
        if stop > start:
            yield Slice(tensor_rank, start, start, stop - start)
        return
    cut = _cut(parameter, tensor)
    room = max(0, min(cut.width, cut.along - tensor_rank * cut.width))  # without padding
    at = start
    while at < stop:
        stretch, inside = divmod(at, cut.width)
        end = min(stop, stretch * cut.width + room)
        if end > at:
            yield Slice(tensor_rank, at, stretch * cut.along + tensor_rank * cut.width + inside, end - at)
        at = (stretch + 1) * cut.width


def owners(parameter: Parameter, tensor: int, start: int, stop: int) -> Iterator[Slice]:
    """Elements [start, stop) of the whole parameter as runs of tensor ranks' slices, in rising order."""
    if not parameter.is_split(tensor):
        if stop > start:
            yield Slice(0, start, start, stop - start)
        return
    cut = _cut(parameter, tensor)
    at = start
    while at < stop:
        stretch, inside = divmod(at, cut.along)
        rank, offset = divmod(inside, cut.width)
        end = min(stop, stretch * cut.along + min(cut.along, (rank + 1) * cut.width))
        yield Slice(rank, stretch * cut.width + offset, at, end - at)
        at = end


def reshard_tensor(old: Layout, new: Layout, rank: int, tensor_rank: int = 0) -> List[Copy]:
    """What (``rank``, ``tensor_rank``) of ``new`` has to read from the shards of ``old``, at any tensor degrees.

    ``Copy.source_rank`` is the number of the shard: data rank × old tensor degree + tensor rank. What is
    replicated over tensor ranks is saved by tensor rank 0 alone and read there. Raises ``ValueError``
    naming the first parameter that the layouts do not share.
    """
    if old.tensor == new.tensor and _same_slices(old, new):
        copies = reshard(old, new, rank)
        return [
            c._replace(source_rank=c.source_rank * old.tensor + (tensor_rank if old.units[c.source_unit].split else 0))
            for c in copies
        ]
    check_same_parameters(old, new)
    held = _held(old)
    found: List[Copy] = []
    for index, unit in enumerate(new.units):
        for piece in unit.pieces(rank):
            before = old.by_name[piece.parameter.name]
            starts, rows = held[before.name]
            for mine in slices(piece.parameter, new.tensor, tensor_rank, piece.start, piece.stop):
                for theirs in owners(before, old.tensor, mine.whole, mine.whole + mine.numel):
                    at, stop = theirs.local, theirs.local + theirs.numel
                    target = piece.offset + mine.local - piece.start + theirs.whole - mine.whole
                    row = bisect_right(starts, at) - 1
                    while at < stop:
                        start, end, source, source_unit, offset = rows[row]
                        end = min(stop, end)
                        shard = source * old.tensor + theirs.tensor_rank
                        found.append(Copy(shard, source_unit, offset + at - start, index, target, end - at))
                        target, at, row = target + end - at, end, row + 1
    return found


def _same_slices(old: Layout, new: Layout) -> bool:
    def cut(layout: Layout) -> Dict[str, Tuple[object, ...]]:
        return {n: (p.tensor_axis, p.tensor_parts) for n, p in layout.by_name.items() if p.is_split(layout.tensor)}

    return cut(old) == cut(new)


def _held(old: Layout) -> Dict[str, Tuple[List[int], List[Tuple[int, int, int, int, int]]]]:
    """Where each parameter's local elements lie: (start, stop, data rank, unit, offset) by start."""
    rows: Dict[str, List[Tuple[int, int, int, int, int]]] = {}
    for index, unit in enumerate(old.units):
        for source in range(old.ranks):
            for piece in unit.pieces(source):
                row = (piece.start, piece.stop, source, index, piece.offset)
                rows.setdefault(piece.parameter.name, []).append(row)
    return {name: ([row[0] for row in sorted(found)], sorted(found)) for name, found in rows.items()}


class Source(NamedTuple):
    """``numel`` elements from ``whole`` of a parameter are those from ``offset`` of (``shard``, ``unit``)."""

    shard: int
    unit: int
    offset: int
    whole: int
    numel: int


class Whole:
    """Where the elements of whole parameters lie in the shards of a layout: tensor cuts and padding undone."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._rows = _held(layout)

    def sources(self, name: str) -> Iterator[Source]:
        """All of parameter ``name``, each element once, in rising order of the whole."""
        parameter, tensor = self.layout.by_name[name], self.layout.tensor
        starts, rows = self._rows[name] if parameter.numel else ([], [])
        for run in owners(parameter, tensor, 0, parameter.numel):
            at, stop, whole = run.local, run.local + run.numel, run.whole
            row = bisect_right(starts, at) - 1
            while at < stop:
                start, end, rank, unit, offset = rows[row]
                end = min(stop, end)
                shard = rank * tensor + run.tensor_rank
                yield Source(shard, unit, offset + at - start, whole, end - at)
                whole, at, row = whole + end - at, end, row + 1
