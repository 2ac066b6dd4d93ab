"""gloo: messages from rank to rank straight into place, sums in rank order.

gloo's own reduce_scatter is a clone plus an all-reduce, twice the bytes, and its sum depends on an element's place in
the ring; this one's does not, so ZeRO stages, bucket sizes and overlap give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Base, Pending, Waiting, sum_rows

GATHER_TAG, REDUCE_TAG = 101, 102


class _Sum(Waiting):
    """Adds the rows in rank order, which makes the sum independent of everything but the ranks."""

    rows: list[Tensor]
    out: Tensor
    spare: Tensor
    add: bool

    def _finish(self) -> None:
        rows, out = self.rows, self.out
        if self.add:
            spare = self.spare if self.spare.dtype == out.dtype else torch.empty_like(out)
            sum_rows(rows, spare)
            out.add_(spare)
        else:
            sum_rows(rows, out)
        self.rows = []


class PeerComm(Base):
    """Messages from rank to rank into place, sums in rank order. ``passing``: of tensors that are to go soon after."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, passing: bool = False) -> None:
        super().__init__(group)
        self._in_one = self.size == 2 and not passing

    def gather(self, flat: Tensor, what: str) -> Pending:
        handles: list[tuple[Any, int]] = []
        if self.size > 1:
            self._count(flat)
            own = self._part(flat, self.rank)
            try:
                for to, source in self._rounds():
                    handles += self._trade(own, to, self._part(flat, source), source, GATHER_TAG)
            except RuntimeError as error:
                raise self.failed(what, to, error) from error
        return Waiting(self, what, handles)

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        handles: list[tuple[Any, int]] = []
        width = flat.numel() // self.size
        rows = list(torch.split(scratch, width)) if self.size > 1 else []
        rows.insert(self.rank, self._part(flat, self.rank))
        if self.size > 1:
            self._count(flat)
            try:
                for to, source in self._rounds():
                    handles += self._trade(self._part(flat, to), to, rows[source], source, REDUCE_TAG)
            except RuntimeError as error:
                raise self.failed(what, to, error) from error
        pending = _Sum(self, what, handles)
        pending.rows, pending.out, pending.spare, pending.add = rows, out, rows[self.rank], add
        if self.size == 1:
            pending._finish()
        return pending

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        if self.size > 1:
            own = self._part(flat, self.rank)
            scratch = flat.new_empty(self.scratch_numel(flat.numel(), flat.dtype, flat.device))
            self.reduce(flat, own, scratch, what).wait()
        return self.gather(flat, what)

    def _rounds(self) -> Iterator[tuple[int, int]]:
        """To whom this rank sends, and from whom it receives, in the order of distances."""
        for distance in range(1, self.size):
            yield (self.rank + distance) % self.size, (self.rank - distance) % self.size

    def _trade(self, sent: Tensor, to: int, received: Tensor, source: int, tag: int) -> list[tuple[Any, int]]:
        if self._in_one:
            # A thread of gloo sends and receives. A message of its own would be written by whoever posts it, here in
            # the middle of backward, after the thread has let go of what it reads. It keeps both tensors a bit longer.
            counts = [0, sent.numel()] if to else [sent.numel(), 0]
            work = dist.all_to_all_single(received, sent, counts, counts, group=self.group, async_op=True)
            return [(work, to)]
        return [
            (dist.isend(sent, self._global[to], group=self.group, tag=tag), to),
            (dist.irecv(received, self._global[source], group=self.group, tag=tag), source),
        ]
