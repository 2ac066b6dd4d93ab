"""The global norm of a partitioned gradient, with the same bits however it is partitioned.

Every parameter is cut into blocks of 2^16 elements and each block into atoms of 256, counted from the
parameter's own first element. An atom's squares are summed in fp64, atoms make a block's sum, blocks
are summed in parameter order: none of this knows where shards begin. A shard boundary may cut an atom
or a block; the rank that holds a block's first element then gets what it lacks: whole atoms as sums,
cut atoms as raw elements. One small all-to-all and one small all-gather a step.

``torch.sum`` over rows of 256 doubles depends on the row alone (tested), so sums over rows are the one
reduction used.

A rank plans for itself: what it holds, and what it lacks of the blocks that begin with it. Nobody walks
over the shards of all ranks; the one list as long as the model has a number a block.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract.atoms import ATOM, BLOCK, cut, spans
from ...contract.partition import Placed, Unit
from ..comm import Comm
from ..model.flat import FlatUnit

_CHUNK = BLOCK // ATOM  # atoms squared at once: half a megabyte of doubles stays in the cache


class _Run(NamedTuple):
    """``atoms`` whole atoms from position ``source`` of unit ``unit``'s gradient."""

    unit: int
    source: int
    atoms: int


class _Arrival(NamedTuple):
    """A fragment of a block that this rank sums, sorted as the messages that bring it: by sender, then place."""

    sender: int
    unit: int
    at: int  # in the unit
    block: int
    atom: int  # in the parameter
    first: int  # in the atom
    width: int  # atoms, or elements of a cut one
    whole: bool


class NormPlan:
    """Indices made once; :meth:`sum_of_squares` then runs a fixed number of tensor operations."""

    def __init__(self, units: Sequence[FlatUnit], comm: Comm, tensor: Comm | None = None) -> None:
        self.units = [u for u in units if u.gradient is not None]
        self.comm = comm
        self.tensor = tensor if tensor is not None and tensor.size > 1 else None
        self.device = units[0].full.device
        self._block_base: list[list[int]] = []  # of each unit, each parameter: its first block's number
        self._owner = array("i")  # of each block
        for flat in self.units:
            self._number_blocks(flat.unit)
        self._plan_sends()
        self._plan_arrivals()
        self._gather_order()
        if self.tensor is not None:
            self._tensor_order = self._order_over_tensor_ranks()
        self._squares = torch.empty((_CHUNK, ATOM), dtype=torch.float64, device=self.device)

    def _number_blocks(self, unit: Unit) -> None:
        bases = []
        for placed in unit.placed:
            bases.append(len(self._owner))
            start = placed.start
            while start < placed.stop:
                first, stop = unit.bucket_range(start // unit.bucket)
                width = (stop - first) // unit.ranks
                starts = range(start, min(stop, placed.stop), BLOCK)
                self._owner.extend([(at - first) // width for at in starts])
                start += len(starts) * BLOCK
        self._block_base.append(bases)

    def _plan_sends(self) -> None:
        """What this rank holds goes to whoever sums its block. Staged are first the sums of all whole atoms, then
        the elements of cut ones; a message holds its part of them in the order of the shard."""
        sends: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.comm.size)]  # (staged, width, whole)
        self._runs: list[_Run] = []
        raw: list[list[tuple[int, int]]] = [[] for _ in self.units]  # (source, numel)
        atoms = elements = 0
        for number, placed, index, start, stop, offset in self._own():
            base = self._block_base[number][index]
            source_of = placed.start if self.units[number].whole_gradient else offset - start
            for at, end, whole in cut(start, stop):
                to = sends[self._owner[base + at // BLOCK]]
                if whole:
                    width = (end - at) // ATOM
                    to.append((atoms, width, True))
                    self._add_run(number, source_of + at, width)
                    atoms += width
                else:
                    to.append((elements, end - at, False))
                    raw[number].append((source_of + at, end - at))
                    elements += end - at
        self._atoms = atoms
        self._staged = torch.zeros(atoms + elements, dtype=torch.float64, device=self.device)
        self._raw = [self._index(_ranges(rows)) for rows in raw]
        self._order = self._index(_ranges([(at if whole else atoms + at, n) for to in sends for at, n, whole in to]))
        # Kept, because gloo's threads let go of a message's buffer only some time after it has arrived.
        self._sent = None if self.comm.size == 1 else torch.empty_like(self._staged)
        self._send_counts = [sum(width for _, width, _ in to) for to in sends]

    def _own(self) -> Iterator[tuple[int, Placed, int, int, int, int]]:
        """This rank's pieces: (unit, placed parameter, its index, start and stop in it, offset in the shard)."""
        for number, flat in enumerate(self.units):
            index_of = {placed.parameter.name: i for i, placed in enumerate(flat.unit.placed)}
            for piece in flat.unit.pieces(self.comm.rank):
                index = index_of[piece.parameter.name]
                yield number, flat.unit.placed[index], index, piece.start, piece.stop, piece.offset

    def _add_run(self, number: int, source: int, atoms: int) -> None:
        """Neighbours in gradient and stage become one run, which need not end where a block does."""
        last = self._runs[-1] if self._runs else None
        if last is not None and last.unit == number and last.source + last.atoms * ATOM == source:
            self._runs[-1] = _Run(number, last.source, last.atoms + atoms)
        else:
            self._runs.append(_Run(number, source, atoms))

    def _plan_arrivals(self) -> None:
        """What arrives of the blocks that begin with this rank, and where each atom of them then stands."""
        arrivals: list[_Arrival] = []
        for number, placed, index, start, stop, _ in self._own():
            unit, base = self.units[number].unit, self._block_base[number][index]
            numel = placed.stop - placed.start
            for first in range(-(-start // BLOCK) * BLOCK, stop, BLOCK):
                block = base + first // BLOCK
                for sender, a, b in spans(unit, placed.start + first, placed.start + min(first + BLOCK, numel)):
                    for at, end, whole in cut(a - placed.start, b - placed.start):
                        width = (end - at) // ATOM if whole else end - at
                        where = (placed.start + at, block, at // ATOM, at % ATOM)
                        arrivals.append(_Arrival(sender, number, *where, width, whole))
        arrivals.sort()
        self._receive_counts = [0] * self.comm.size
        for arrival in arrivals:
            self._receive_counts[arrival.sender] += arrival.width
        self._atoms_of_owned(arrivals, sum(self._receive_counts))

    def _atoms_of_owned(self, arrivals: Sequence[_Arrival], received: int) -> None:
        """Index matrices over what was received (and a zero behind it): atoms of elements, blocks of atoms."""
        atoms_a_block = BLOCK // ATOM
        row_of = {block: row for row, block in enumerate(sorted({a.block for a in arrivals}))}
        cut_row = {key: row for row, key in enumerate(sorted({(a.block, a.atom) for a in arrivals if not a.whole}))}
        blocks = array("i", [received]) * (len(row_of) * atoms_a_block)
        cut = array("i", [received]) * (len(cut_row) * ATOM)
        for (block, atom), row in cut_row.items():
            blocks[row_of[block] * atoms_a_block + atom % atoms_a_block] = received + 1 + row
        position = 0
        for a in arrivals:
            if a.whole:
                place, into = row_of[a.block] * atoms_a_block + a.atom % atoms_a_block, blocks
            else:
                place, into = cut_row[a.block, a.atom] * ATOM + a.first, cut
            into[place : place + a.width] = array("i", range(position, position + a.width))
            position += a.width
        self._cut = self._index(cut).view(len(cut_row), ATOM)
        self._blocks = self._index(blocks).view(len(row_of), atoms_a_block)

    def _gather_order(self) -> None:
        """Where block b, in parameter order, stands in the gathered sums of all owners."""
        self._widest = max(Counter(self._owner).values())
        place = [owner * self._widest for owner in range(self.comm.size)]
        order = array("i")
        for owner in self._owner:
            order.append(place[owner])
            place[owner] += 1
        self._in_order = self._index(order)

    def _index(self, values: array[int]) -> Tensor:
        if not values:
            return torch.empty(0, dtype=torch.int32, device=self.device)
        found = torch.frombuffer(values, dtype=torch.int32).clone()  # torch.tensor would make an object of each number
        return found.to(self.device)

    def storages(self) -> list[Tensor]:
        """Every tensor that this object keeps."""
        kept = [self._squares, self._staged, self._order, self._cut, self._blocks, self._in_order, *self._raw]
        kept += [] if self._sent is None else [self._sent]
        return kept if self.tensor is None else [*kept, self._tensor_order]

    def sum_of_squares(self) -> float:
        """Σ g² over the whole gradient of all ranks; equal on every rank, to the bit."""
        self._square_whole()
        at = self._atoms
        for number, index in enumerate(self._raw):
            gradient = self.units[number].gradient
            if index.numel() and gradient is not None:
                self._staged[at : at + index.numel()].copy_(gradient.index_select(0, index))
                at += index.numel()
        send = torch.index_select(self._staged, 0, self._order, out=self._sent)
        received = self.comm.exchange(send, self._send_counts, self._receive_counts, "gradient norm")
        padded = torch.cat([received, received.new_zeros(1)])
        cut = padded.index_select(0, self._cut.view(-1)).view(self._cut.shape)
        atoms = torch.cat([padded, cut.mul_(cut).sum(1)])
        blocks = atoms.index_select(0, self._blocks.view(-1)).view(self._blocks.shape).sum(1)
        owned = blocks.new_zeros(self._widest)
        owned[: blocks.numel()] = blocks
        everyone = self.comm.gather_small(owned, "gradient norm")
        return float(sum_in_rows(self._over_tensor_ranks(everyone.view(-1).index_select(0, self._in_order))))

    def _over_tensor_ranks(self, blocks: Tensor) -> Tensor:
        """The blocks of all tensor ranks, a parameter's after another's: replicated ones once, split ones of each."""
        if self.tensor is None:
            return blocks
        everyone = self.tensor.gather_small(blocks, "gradient norm")
        return everyone.view(-1).index_select(0, self._tensor_order)

    def _order_over_tensor_ranks(self) -> Tensor:
        """Where each of those blocks stands in what all tensor ranks gather, one rank's blocks after another's."""
        count, degree = len(self._owner), 1 if self.tensor is None else self.tensor.size
        order = array("i")
        ends = [*(bases[0] for bases in self._block_base[1:]), count]
        for flat, bases, end in zip(self.units, self._block_base, ends):  # noqa: B905 (Python 3.9 on the nodes)
            ranks = degree if flat.unit.split else 1
            for block in range(bases[0], end):
                order.extend(range(block, block + ranks * count, count))
        return self._index(order)

    def _square_whole(self) -> None:
        """Sums of squares of all whole atoms, a chunk of them at a time, of as many runs as it takes to fill one."""
        done = filled = 0
        for run in self._runs:
            gradient = self.units[run.unit].gradient
            assert gradient is not None
            first = 0
            while first < run.atoms:
                count = min(_CHUNK - filled, run.atoms - first)
                values = gradient.as_strided((count, ATOM), (ATOM, 1), run.source + first * ATOM)
                self._squares[filled : filled + count].copy_(values)
                first, filled = first + count, filled + count
                if filled == _CHUNK:
                    done, filled = self._sum_chunk(done, filled), 0
        self._sum_chunk(done, filled)

    def _sum_chunk(self, done: int, count: int) -> int:
        if count:
            squares = self._squares[:count]
            squares.mul_(squares)
            torch.sum(squares, 1, out=self._staged[done : done + count])
        return done + count


def _ranges(ranges: Sequence[tuple[int, int]]) -> array[int]:
    """Every number of (first, count) after (first, count)."""
    found = array("i")
    for first, count in ranges:
        found.extend(range(first, first + count))
    return found


def sum_in_rows(values: Tensor) -> Tensor:
    """A sum whose order depends on the number of values alone: rows of 256, again and again."""
    while values.numel() > 1:
        rows = -(-values.numel() // ATOM)
        padded = values.new_zeros(rows * ATOM)
        padded[: values.numel()] = values
        values = padded.view(rows, ATOM).sum(1)
    return values.sum()
