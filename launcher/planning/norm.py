"""What the engine keeps for the global norm and beside the optimizer, counted as it is made (engine/reduce/norm.py,
Pieces in engine/update/optim.py): of data-parallel rank 0; where shards cut atoms differs a little from rank to rank.

A transformer's blocks are alike, so a unit is counted once for all that have its sizes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ..contract.atoms import ATOM, BLOCK, cut, spans
from ..contract.partition import ITEM_BYTES, Layout, Parameter, Unit, stored_dtype
from .plan import Alive

_LANES = 16  # elements of a padding row (engine/update/optim.py)


class _Counts(NamedTuple):
    """Of one unit on one rank. ``staged`` numbers are sent, atoms and ``loose`` elements; ``received`` those of the
    ``rows`` blocks that begin here, with ``cut_rows`` atoms that arrive in pieces; ``blocks`` are the unit's."""

    staged: int
    loose: int
    received: int
    rows: int
    cut_rows: int
    blocks: int


def norm_alive(layout: Layout, scratch: int) -> Alive:
    """Kept always, with ``scratch`` bytes of the optimizer; and what comes and goes while the norm is summed."""
    trained = [unit for unit in layout.units if unit.trainable]
    found = [_of_unit(unit) for unit in trained]
    staged, loose, received, rows, cut_rows, blocks = (sum(column) for column in zip(*found, strict=True))
    always = 8 * ATOM * (BLOCK // ATOM)  # a chunk of squares
    always += (8 + 4) * staged + 4 * loose + 4 * ATOM * (cut_rows + rows) + 4 * blocks
    if layout.ranks > 1:
        always += 8 * staged  # what is sent is kept
    if layout.tensor > 1:
        of_all = (c.blocks * (layout.tensor if u.split else 1) for c, u in zip(found, trained, strict=True))
        always += 4 * sum(of_all)
    always += scratch
    passing = 8 * (3 * received + 2 + cut_rows) + 8 * ATOM * (cut_rows + rows)
    return Alive(always, always, always + passing)


def optimizer_scratch(layout: Layout, zero_stage: int, moments: int, *, whole_gradients: bool) -> int:
    """Bytes of the rows in which the optimizer updates what fills no register: of parameters, gradients, moments."""
    total = 0
    for unit in layout.units:
        if unit.trainable:
            stage = zero_stage if layout.ranks > 1 else 0
            master = stored_dtype(unit.dtype) != unit.dtype
            if stage == 0:
                runs = [unit.padded]
            elif not whole_gradients and (stage == 3 or master):
                runs = [unit.shard_numel]
            else:
                runs = [part.stop - part.start for part in unit.parts(0)]
            rests = sum(1 for numel in runs if numel % _LANES)
            total += rests * _LANES * (2 + moments) * ITEM_BYTES[stored_dtype(unit.dtype)]
    return total


def _of_unit(unit: Unit) -> _Counts:
    sizes = tuple(placed.stop - placed.start for placed in unit.placed)
    return _counted(sizes, unit.ranks, unit.bucket, unit.replicas)


@lru_cache(maxsize=4096)
def _counted(sizes: tuple[int, ...], ranks: int, bucket: int, replicas: int) -> _Counts:
    parameters = tuple(Parameter(str(number), (size,)) for number, size in enumerate(sizes))
    unit = Unit("", parameters, ranks, bucket, replicas=replicas)
    staged = loose = received = rows = cut_rows = 0
    for piece in unit.pieces(0):
        for start, stop, whole in cut(piece.start, piece.stop):
            staged += (stop - start) // ATOM if whole else stop - start
            loose += 0 if whole else stop - start
        placed = unit.placed[int(piece.parameter.name)]
        numel = placed.stop - placed.start
        for first in range(-(-piece.start // BLOCK) * BLOCK, piece.stop, BLOCK):
            rows += 1
            atoms = set()
            for _, a, b in spans(unit, placed.start + first, placed.start + min(first + BLOCK, numel)):
                for start, stop, whole in cut(a - placed.start, b - placed.start):
                    received += (stop - start) // ATOM if whole else stop - start
                    atoms |= set() if whole else {start // ATOM}
            cut_rows += len(atoms)
    return _Counts(staged, loose, received, rows, cut_rows, sum(-(-size // BLOCK) for size in sizes))
