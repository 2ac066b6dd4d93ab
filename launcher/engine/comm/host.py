"""Ranks of one host: each copies what it needs out of the others' memory.

The order of things is that of messages. A rank says that a message is ready and where it lies; whoever needs it reads
it and says so; then the buffer is its owner's again. Nothing happens in the background: a rank hears and reads when it
begins a message or waits for one, also for a small one, so of two ranks the later one reads as soon as it is there too,
and the earlier one at its next message. To begin one never waits. Sums are taken in rank order, piece by piece while a
piece is in the core's cache.
"""

from __future__ import annotations

import struct
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .base import CommError, Pending, sum_rows
from .neighbours import Gone, Neighbours, Unsaid
from .peers import PeerComm

PIECE_BYTES = 1 << 18
_READY, _WAS_READ = 1, 2
_GLANCE_S = 0.001  # between two looks at whether a small message is there
_LONGEST_S = 3600.0  # that poll is asked to wait; it has an upper bound


class _Word(NamedTuple):
    """What one rank says to another about a message: its number in the group, and a digest of what it is."""

    kind: int
    number: int
    digest: int
    address: int = 0
    nbytes: int = 0


_FORM = struct.Struct("<BQIQQ")


class HostComm(PeerComm):
    """What is not in the host's own memory, and small messages, go the way of :class:`PeerComm`."""

    def __init__(self, group: dist.ProcessGroup | None, neighbours: Neighbours, timeout_s: float) -> None:
        super().__init__(group)
        self.neighbours, self.timeout_s = neighbours, timeout_s
        self._number = 0
        self._under_way: dict[int, _Copy] = {}  # by number; holds the buffers that others read
        self._early: dict[int, list[tuple[int, _Word]]] = {}  # said before this rank began the same message
        weakref.finalize(self, neighbours.close)

    def gather(self, flat: Tensor, what: str) -> Pending:
        if self.size == 1 or flat.device.type != "cpu":
            return super().gather(flat, what)
        return self._begin(_Gather(self, flat, what))

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        if self.size == 1 or flat.device.type != "cpu":
            return super().reduce(flat, out, scratch, what, add=add)
        return self._begin(_Sum(self, flat, what, out, scratch, add))

    def scratch_numel(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        if device.type != "cpu":
            return super().scratch_numel(numel, dtype, device)
        return room_for_pieces(numel, dtype, self.size)

    def _begin(self, copy: _Copy) -> Pending:
        self._count(copy.flat)
        self._number += 1
        copy.number = self._number
        self._under_way[copy.number] = copy
        for peer in self.neighbours.of:
            self.tell(peer, _READY, copy, self._part(copy.flat, copy.part_for(peer)).data_ptr())
        self.hear(0.0)
        for peer, word in self._early.pop(copy.number, ()):
            copy.heard(peer, word)
        return copy

    def tell(self, peer: int, kind: int, copy: _Copy, address: int = 0) -> None:
        word = _FORM.pack(*_Word(kind, copy.number, copy.digest, address, copy.nbytes))
        self.neighbours.tell(peer, word, copy.unsaid)

    def hear(self, timeout_s: float) -> None:
        """Does what the others' words ask for; waits for the first one, or for room for words of its own."""
        for peer, said in self.neighbours.hear(timeout_s):
            word = _Word(*_FORM.unpack(said))
            copy = self._under_way.get(word.number)
            if copy is None:
                self._early.setdefault(word.number, []).append((peer, word))
            else:
                copy.heard(peer, word)

    def ended(self, copy: _Copy) -> None:
        del self._under_way[copy.number]

    def _blocking(self, what: str, call: Callable[..., Any]) -> None:
        """Others may wait until this rank has read what they have for it, before they join the small message."""
        if not self._under_way:
            super()._blocking(what, call)
            return
        started = time.perf_counter()
        try:
            work = call(async_op=True)
            while self._under_way and not work.is_completed():
                self.hear(_GLANCE_S)
            work.wait()
        except RuntimeError as error:
            raise self.failed(what, -1, error) from error
        self.traffic.waited_s += time.perf_counter() - started


def room_for_pieces(numel: int, dtype: torch.dtype, ranks: int) -> int:
    """Elements that hold a piece of each other rank's part of a message."""
    return (ranks - 1) * _piece(numel, dtype, ranks)


def _piece(numel: int, dtype: torch.dtype, ranks: int) -> int:
    return min(max(1, PIECE_BYTES // dtype.itemsize), numel // ranks)


class _Copy:
    """A message under way: it is over when this rank has read what it needs, and the others have read it here."""

    number: int

    def __init__(self, comm: HostComm, flat: Tensor, what: str) -> None:
        self.comm, self.flat, self.what = comm, flat, what
        self.digest = zlib.crc32(what.encode())
        self.nbytes = flat.numel() // comm.size * flat.element_size()
        self._to_read = set(comm.neighbours.of)
        self._read_by = set(comm.neighbours.of)
        self.unsaid = Unsaid()

    def part_for(self, peer: int) -> int:
        """Which part of ``flat`` another rank reads."""
        raise NotImplementedError

    def ready(self, peer: int, address: int) -> None:
        """Another rank's part lies at ``address`` of its memory."""
        raise NotImplementedError

    def heard(self, peer: int, word: _Word) -> None:
        if word.kind == _WAS_READ:
            self._read_by.discard(peer)
            self._end()
        elif (word.digest, word.nbytes) != (self.digest, self.nbytes):
            comm = self.comm
            raise CommError(
                f"rank {comm.name(comm.rank)}: {self.what}: rank {comm.name(peer)} is at another message "
                f"({word.nbytes:,} bytes of its part, here {self.nbytes:,}; message {self.number} of the group)",
                hint="every rank must do the same steps on the same model, in the same order",
            )
        else:
            self.ready(peer, word.address)

    def read(self, peer: int, address: int, into: Tensor) -> None:
        try:
            self.comm.neighbours.read(peer, address, into.data_ptr(), into.numel() * into.element_size())
        except OSError as error:
            comm = self.comm
            raise CommError(
                f"rank {comm.name(comm.rank)}: {self.what}: rank {comm.name(peer)} did not take part: its memory "
                f"cannot be read ({error.strerror or error})",
                hint="its process has ended, or let go of the buffer before its wait() returned; see its log",
            ) from error

    def was_read(self, peer: int) -> None:
        self._to_read.discard(peer)
        self.comm.tell(peer, _WAS_READ, self)
        self._end()

    def _end(self) -> None:
        if not self._to_read and not self._read_by:
            self.comm.ended(self)

    def wait(self) -> None:
        self._wait(lambda: self._to_read | self._read_by)

    def _wait(self, lacks: Callable[[], set[int]], *, said: bool = True) -> None:
        """Until no rank lacks, and, if ``said``, all words are said."""
        comm, started = self.comm, time.perf_counter()
        while (lacking := lacks()) or (said and self.unsaid.words):
            for peer in lacking:
                if comm.neighbours.of[peer].gone:
                    raise comm.failed(self.what, peer, Gone("its process has ended, or let go of this group"))
            left = started + comm.timeout_s - time.perf_counter()
            if left <= 0:
                late = min(self._to_read or self._read_by, default=-1)
                raise comm.failed(self.what, late, TimeoutError(f"no answer in {comm.timeout_s:g} s"))
            comm.hear(min(left, _LONGEST_S))
        comm.traffic.waited_s += time.perf_counter() - started


class _Gather(_Copy):
    def arrive(self) -> None:
        """Returns when all is here; others may still read this rank's part, and what is to be said to them may wait. So
        it needs none of them but for what they said when they began (a few hundred messages find room), and a rank may
        do it alone."""
        self._wait(lambda: self._to_read, said=False)

    def part_for(self, peer: int) -> int:
        return self.comm.rank

    def ready(self, peer: int, address: int) -> None:
        self.read(peer, address, self.comm._part(self.flat, peer))
        self.was_read(peer)


class _Sum(_Copy):
    def __init__(self, comm: HostComm, flat: Tensor, what: str, out: Tensor, scratch: Tensor, add: bool) -> None:
        super().__init__(comm, flat, what)
        self._out, self._scratch, self._add = out, scratch, add
        self._lies_at: dict[int, int] = {}

    def part_for(self, peer: int) -> int:
        return peer

    def ready(self, peer: int, address: int) -> None:
        self._lies_at[peer] = address
        if len(self._lies_at) == self.comm.size - 1:  # in rank order, so all of them
            self._sum()
            for other in self._lies_at:
                self.was_read(other)

    def _sum(self) -> None:
        comm, own = self.comm, self.comm._part(self.flat, self.comm.rank)
        size = own.element_size()
        step = max(1, _piece(self.flat.numel(), own.dtype, comm.size))
        arriving = torch.split(self._scratch, step)[: comm.size - 1]
        others = sorted(self._lies_at.items())
        for at in range(0, own.numel(), step):
            width = min(step, own.numel() - at)
            rows = [piece[:width] for piece in arriving]
            for row, (peer, address) in zip(rows, others):  # noqa: B905 (Python 3.9 on the nodes)
                self.read(peer, address + at * size, row)
            rows.insert(comm.rank, own[at : at + width])
            out = self._out[at : at + width]
            if self._add:
                spare = rows[comm.rank] if own.dtype == out.dtype else torch.empty_like(out)
                sum_rows(rows, spare)
                out.add_(spare)
            else:
                sum_rows(rows, out)
