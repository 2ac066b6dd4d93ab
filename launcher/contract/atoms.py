"""How the global norm cuts parameters: the engine sums by it, the planner counts by it.

Every parameter is cut into blocks of 2^16 elements and each block into atoms of 256, counted from the parameter's own
first element. A shard boundary may cut an atom or a block; whatever a rank holds of a block goes to the rank that
holds the block's first element.
"""

from __future__ import annotations

from typing import Iterator, Tuple

from .partition import Unit

ATOM = 256
BLOCK = 2**16


def cut(start: int, stop: int) -> Iterator[Tuple[int, int, bool]]:
    """Elements [start, stop) of a parameter, cut at blocks and atoms: (start, stop, whether whole atoms)."""
    while start < stop:
        block_stop = min(stop, (start // BLOCK + 1) * BLOCK)
        if start % ATOM == 0 and block_stop - start >= ATOM:
            end, whole = start + (block_stop - start) // ATOM * ATOM, True
        else:
            end, whole = min(block_stop, (start // ATOM + 1) * ATOM), False
        yield start, end, whole
        start = end


def spans(unit: Unit, start: int, stop: int) -> Iterator[Tuple[int, int, int]]:
    """The owners of flat [start, stop) of ``unit``, in order: (rank, start, stop)."""
    while start < stop:
        first, last = unit.bucket_range(start // unit.bucket)
        width = (last - first) // unit.ranks
        rank = (start - first) // width
        end = min(stop, first + (rank + 1) * width)
        yield rank, start, end
        start = end
