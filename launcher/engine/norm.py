"""The global norm of a partitioned gradient, with the same bits however it is partitioned.

Every parameter is cut into blocks of 2^16 elements and each block into atoms of 256, counted from the
parameter's own first element. An atom's squares are summed in fp64, atoms make a block's sum, blocks
are summed in parameter order: none of this knows where shards begin. A shard boundary may cut an atom
or a block; the rank that holds a block's first element then gets what it lacks: whole atoms as sums,
cut atoms as raw elements. One small all-to-all and one small all-gather a step.

``torch.sum`` over rows of 256 doubles depends on the row alone (tested), so sums over rows are the one
reduction used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..contract.partition import Unit
from .comm import Comm
from .flat import FlatUnit

ATOM = 256
BLOCK = 2**16
_CHUNK = BLOCK // ATOM  # atoms squared at once: half a megabyte of doubles stays in the cache


class _Full(NamedTuple):
    """``atoms`` whole atoms from position ``source`` of unit ``unit``'s gradient; sums go to ``slot``."""

    unit: int
    source: int
    atoms: int
    slot: int


class _Fragment(NamedTuple):
    """A run of one parameter on one rank, cut at atoms: whole ones, or less than one."""

    block: int
    atom: int  # in the parameter
    start: int  # in the parameter
    stop: int
    source: int  # position in the rank's gradient
    whole: bool


class NormPlan:
    """Indices made once; :meth:`sum_of_squares` then runs a fixed number of tensor operations."""

    def __init__(self, units: Sequence[FlatUnit], comm: Comm) -> None:
        self.units = [u for u in units if u.gradient is not None]
        self.comm = comm
        self.device = units[0].full.device
        self._block_base: list[list[int]] = []  # of each unit, each parameter: its first block's number
        self._owner: list[int] = []  # of each block
        for flat in self.units:
            self._number_blocks(flat.unit)
        self._plan()

    def _number_blocks(self, unit: Unit) -> None:
        bases = []
        for placed in unit.placed:
            bases.append(len(self._owner))
            for start in range(placed.start, placed.stop, BLOCK):
                self._owner.append(owner_of(unit, start))
        self._block_base.append(bases)

    def _fragments(self, rank: int) -> list[tuple[int, _Fragment]]:
        """Everything that ``rank`` holds, cut at atoms and blocks, with the unit's number, in a fixed order."""
        found: list[tuple[int, _Fragment]] = []
        for number, flat in enumerate(self.units):
            unit = flat.unit
            index_of = {placed.parameter.name: i for i, placed in enumerate(unit.placed)}
            for piece in unit.pieces(rank):
                index = index_of[piece.parameter.name]
                at = piece.start
                while at < piece.stop:
                    block_stop = min(piece.stop, (at // BLOCK + 1) * BLOCK)
                    if at % ATOM == 0 and block_stop - at >= ATOM:
                        stop, whole = at + (block_stop - at) // ATOM * ATOM, True
                    else:
                        stop, whole = min(block_stop, (at // ATOM + 1) * ATOM), False
                    if flat.whole_gradient:
                        source = unit.placed[index].start + at
                    else:
                        source = piece.offset + at - piece.start
                    block = self._block_base[number][index] + at // BLOCK
                    found.append((number, _Fragment(block, at // ATOM, at, stop, source, whole)))
                    at = stop
        return found

    def _plan(self) -> None:
        """What goes to whom: each message holds raw elements and atom sums, in the sender's order."""
        me, size = self.comm.rank, self.comm.size
        sends: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # ranges of positions of the stage vector
        receives = [0] * size
        rows: dict[tuple[int, int], list[tuple[int, int, int]]] = {}  # (block, atom): (in atom, position, numel)
        sums: dict[tuple[int, int], int] = {}  # (block, atom): position among what was received
        full: list[_Full] = []
        raw: list[list[tuple[int, int, int]]] = [[] for _ in self.units]  # (source, numel, position)
        staged = received = 0
        for rank in range(size):
            for number, fragment in self._fragments(rank):
                owner = self._owner[fragment.block]
                numel = fragment.stop - fragment.start
                width = numel // ATOM if fragment.whole else numel
                if rank == me:
                    if fragment.whole:
                        full.append(_Full(number, fragment.source, width, staged))
                    else:
                        raw[number].append((fragment.source, numel, staged))
                    sends[owner].append((staged, width))
                    staged += width
                if owner == me:
                    if fragment.whole:
                        for i in range(width):
                            sums[fragment.block, fragment.atom + i] = received + i
                    else:
                        row = rows.setdefault((fragment.block, fragment.atom), [])
                        row.append((fragment.start % ATOM, received, numel))
                    received += width
                    receives[rank] += width
        self._full = full
        self._staged = torch.zeros(staged, dtype=torch.float64, device=self.device)
        self._raw = [self._raw_index(r) for r in raw]
        self._order = self._ranges([r for row in sends for r in row])
        self._send_counts = [sum(width for _, width in row) for row in sends]
        self._receive_counts = receives
        self._atoms_of_owned(rows, sums, received)
        self._gather_order()
        self._squares = torch.empty((_CHUNK, ATOM), dtype=torch.float64, device=self.device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _ranges(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        if not ranges:
            return self._index([])
        pieces = [torch.arange(a, a + n, dtype=torch.int32, device=self.device) for a, n in ranges]
        return torch.cat(pieces)

    def _raw_index(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor] | None:
        if not rows:
            return None
        return self._ranges([(s, n) for s, n, _ in rows]), self._ranges([(p, n) for _, n, p in rows]).long()

    def _atoms_of_owned(
        self, rows: dict[tuple[int, int], list[tuple[int, int, int]]], sums: dict[tuple[int, int], int], received: int
    ) -> None:
        """Index matrices over what was received (and a zero behind it): atoms of elements, blocks of atoms."""
        zero = received
        cut = torch.full((len(rows), ATOM), zero, dtype=torch.int32)
        where = dict(sums)
        for number, (key, parts) in enumerate(sorted(rows.items())):
            for at, position, numel in parts:
                cut[number, at : at + numel] = torch.arange(position, position + numel, dtype=torch.int32)
            where[key] = received + 1 + number
        owned = sorted({block for block, _ in where})
        number_of = {block: i for i, block in enumerate(owned)}
        blocks = torch.full((len(owned), BLOCK // ATOM), zero, dtype=torch.int32)
        for (block, atom), position in where.items():
            blocks[number_of[block], atom % (BLOCK // ATOM)] = position
        self._cut = cut.to(self.device)
        self._blocks = blocks.to(self.device)

    def _gather_order(self) -> None:
        """Where block b, in parameter order, stands in the gathered sums of all owners."""
        counts = [0] * self.comm.size
        position = []
        for owner in self._owner:
            position.append((owner, counts[owner]))
            counts[owner] += 1
        self._widest = max(counts)
        self._in_order = self._index([owner * self._widest + n for owner, n in position])

    def sum_of_squares(self) -> float:
        """Σ g² over the whole gradient of all ranks; equal on every rank, to the bit."""
        for run in self._full:
            self._square_whole(run)
        for number, index in enumerate(self._raw):
            gradient = self.units[number].gradient
            if index is not None and gradient is not None:
                self._staged[index[1]] = gradient.index_select(0, index[0]).double()
        received = self.comm.exchange(
            self._staged.index_select(0, self._order), self._send_counts, self._receive_counts, "gradient norm"
        )
        padded = torch.cat([received, received.new_zeros(1)])
        cut = padded.index_select(0, self._cut.view(-1)).view(self._cut.shape)
        atoms = torch.cat([padded, cut.mul_(cut).sum(1)])
        blocks = atoms.index_select(0, self._blocks.view(-1)).view(self._blocks.shape).sum(1)
        owned = blocks.new_zeros(self._widest)
        owned[: blocks.numel()] = blocks
        everyone = self.comm.gather_small(owned, "gradient norm")
        return float(sum_in_rows(everyone.view(-1).index_select(0, self._in_order)))

    def _square_whole(self, run: _Full) -> None:
        gradient = self.units[run.unit].gradient
        assert gradient is not None
        for first in range(0, run.atoms, _CHUNK):
            count = min(_CHUNK, run.atoms - first)
            at = run.source + first * ATOM
            squares = self._squares[:count]
            squares.copy_(gradient[at : at + count * ATOM].view(count, ATOM))
            squares.mul_(squares)
            torch.sum(squares, 1, out=self._staged[run.slot + first : run.slot + first + count])


def owner_of(unit: Unit, position: int) -> int:
    """The rank that owns flat element ``position`` of ``unit``."""
    start, stop = unit.bucket_range(position // unit.bucket)
    return (position - start) // ((stop - start) // unit.ranks)


def sum_in_rows(values: Tensor) -> Tensor:
    """A sum whose order depends on the number of values alone: rows of 256, again and again."""
    while values.numel() > 1:
        rows = -(-values.numel() // ATOM)
        padded = values.new_zeros(rows * ATOM)
        padded[: values.numel()] = values
        values = padded.view(rows, ATOM).sum(1)
    return values.sum()
