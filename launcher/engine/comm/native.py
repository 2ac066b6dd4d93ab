"""NCCL and others: the library's own collectives; bits are the library's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Base, Pending, Waiting, all_gather_call, sum_rows


class _Added(Waiting):
    out: Tensor
    summed: Tensor | None = None

    def _finish(self) -> None:
        if self.summed is not None:
            self.out.add_(self.summed)
            self.summed = None


class NativeComm(Base):
    """The library's own collectives, asynchronous, in place where it can."""

    def gather(self, flat: Tensor, what: str) -> Pending:
        if self.size == 1:
            return Waiting(self, what, [])
        self._count(flat)
        work = all_gather_call()(flat, self._part(flat, self.rank), group=self.group, async_op=True)
        return Waiting(self, what, [(work, -1)])

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        pending = _Added(self, what, [])
        pending.out = out
        if flat.dtype != out.dtype:  # the library adds in the message's precision
            flat, scratch = flat.to(out.dtype), torch.empty_like(out)
        target = scratch[: out.numel()] if add else out
        if self.size == 1:
            sum_rows([flat], target)
            pending.summed = target if add else None
            pending._finish()
            return pending
        self._count(flat)
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        pending._handles = [(call(target, flat, group=self.group, async_op=True), -1)]
        pending.summed = target if add else None
        return pending

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        return self.library_sum(flat, what)
