"""Tensor parallelism: layers that hold a slice of their weights, over plain local tensors.

A **column** layer holds some of its outputs, a **row** layer some of its inputs. One after the other they
need one sum over the tensor group forward and one backward; what lies between them (attention heads, the
inner width of an MLP) is only ever held in part::

    x ── f ──┬── column ── heads or gelu ── row ──┬── g ── + bias      f: identity, backward sums
    (whole)  └──   1/T         1/T        1/T   ──┘      (whole)       g: sums, backward identity

Whatever is outside f … g is whole on every rank of the tensor group and equal to the bit, because sums are
added in rank order (gloo) or by one library for all. An embedding is split by vocabulary, and the loss is
computed from split logits: no rank ever holds a row of logits whole.

A slice comes from a whole weight that was made as it would have been without tensor parallelism, with the
same random numbers, and is dropped at once. ``contract.slices`` says which elements it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..chance import mix
from ..comm import Comm, sum_rows

SPLIT = "zerun_split"


@dataclass(frozen=True)
class Split:
    """How a parameter was cut: kept on it as ``zerun_split``, read by ``units.describe``."""

    shape: tuple[int, ...]  # of the whole
    axis: int
    parts: int = 1
    padded: bool = False


def split_of(tensor: Tensor) -> Split | None:
    """How ``tensor`` was cut, or None where it is whole."""
    found: Split | None = getattr(tensor, SPLIT, None)
    return found


def cut(whole: Tensor, split: Split, comm: Comm) -> Tensor:
    """This rank's slice of ``whole``, as a tensor of its own; padding is zero."""
    stretches = []
    for stretch in whole.chunk(split.parts, split.axis):
        along = stretch.shape[split.axis]
        width = -(-along // comm.size)
        if width * comm.size != along and not split.padded:
            raise ValueError(f"{along} of {split.shape} do not divide by the tensor degree {comm.size}")
        start = min(comm.rank * width, along)
        mine = stretch.narrow(split.axis, start, min(width, along - start))
        lacking = width - mine.shape[split.axis]
        if lacking:
            shape = [lacking if i == split.axis else n for i, n in enumerate(mine.shape)]
            mine = torch.cat([mine, mine.new_zeros(shape)], split.axis)
        stretches.append(mine)
    return (
        torch.cat(stretches, split.axis)
        if len(stretches) > 1
        else stretches[0].clone(memory_format=torch.contiguous_format)
    )


def sliced(whole: Tensor, comm: Comm, axis: int, *, parts: int = 1, padded: bool = False) -> nn.Parameter:
    """The slice of a whole parameter, as a parameter that remembers what it is a slice of."""
    split = Split(tuple(whole.shape), axis, parts, padded)
    with torch.no_grad():
        mine = nn.Parameter(cut(whole.detach(), split, comm), requires_grad=whole.requires_grad)
    setattr(mine, SPLIT, split)
    return mine


def joined(mine: Tensor, split: Split, comm: Comm) -> Tensor:
    """The whole tensor from every rank's slice, padding left out: for looking at it, and for exports."""
    everyone = comm.gather_small(mine.detach(), "whole parameter")
    stretches = []
    for number in range(split.parts):
        shares = [everyone[rank].chunk(split.parts, split.axis)[number] for rank in range(comm.size)]
        along = split.shape[split.axis] // split.parts
        stretches.append(torch.cat(shares, split.axis).narrow(split.axis, 0, along))
    return torch.cat(stretches, split.axis)


# --- messages of the tensor group -----------------------------------------------------------------


def all_reduce(comm: Comm, value: Tensor, what: str) -> Tensor:
    """The sum of every rank's ``value``, the same bits on all of them. ``value`` is left as it is."""
    if comm.size == 1:
        return value
    flat = _padded(value, comm.size)
    comm.all_reduce(flat, what).wait()
    return flat[: value.numel()].view(value.shape)


def _padded(value: Tensor, size: int) -> Tensor:
    """A flat copy, as long as a multiple of ``size``."""
    numel = value.numel()
    flat = value.new_empty(-(-numel // size) * size)
    flat[:numel].view(value.shape).copy_(value)
    flat[numel:].zero_()
    return flat


class _Into(torch.autograd.Function):
    """f: what enters a region whose ranks compute different parts of the same thing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, what: str) -> Tensor:
        ctx.comm, ctx.what = comm, what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce(ctx.comm, gradients[0], ctx.what), None, None


class _OutOf(torch.autograd.Function):
    """g: the parts, added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, what: str) -> Tensor:
        return all_reduce(comm, x, what)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _Side(torch.autograd.Function):
    """Side by side along the last axis, ``width`` of it kept: whole logits from split ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, width: int) -> Tensor:
        ctx.comm, ctx.local = comm, x.shape[-1]
        everyone = comm.gather_small(x, "whole logits")
        return torch.cat(list(everyone.unbind(0)), -1)[..., :width].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        start = ctx.comm.rank * ctx.local
        mine = gradients[0][..., start : start + ctx.local]
        return functional.pad(mine, (0, ctx.local - mine.shape[-1])), None, None


def into(x: Tensor, comm: Comm, what: str) -> Tensor:
    """f. Identity; the gradients of all ranks are summed."""
    return x if comm.size == 1 else _apply(_Into, x, comm, what)


def out_of(x: Tensor, comm: Comm, what: str) -> Tensor:
    """g. The sum of all ranks; the gradient passes as it is."""
    return x if comm.size == 1 else _apply(_OutOf, x, comm, what)


def side_by_side(x: Tensor, comm: Comm, width: int) -> Tensor:
    """(…, local) of every rank → (…, width) on all of them; the gradient is this rank's part."""
    return x[..., :width] if comm.size == 1 else _apply(_Side, x, comm, width)


def _apply(function: Any, *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)
    return found


# --- layers -----------------------------------------------------------------------------------------


class ColumnLinear(nn.Module):
    """Some of a linear layer's outputs: (…, inputs) → (…, outputs / T). ``parts`` stretches are each cut."""

    def __init__(self, whole: nn.Linear, comm: Comm, *, parts: int = 1) -> None:
        super().__init__()
        self.comm = comm
        self.weight = sliced(whole.weight, comm, 0, parts=parts)
        self.bias = None if whole.bias is None else sliced(whole.bias, comm, 0, parts=parts)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(into(x, self.comm, "gradient of a column layer"), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer of some of its inputs: (…, inputs / T) → (…, outputs), whole. The bias is added once."""

    def __init__(self, whole: nn.Linear, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = sliced(whole.weight, comm, 1)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        total = out_of(functional.linear(x, self.weight), self.comm, "sum of a row layer")
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """Some rows of a table of words: (…) → (…, hidden), whole."""

    def __init__(self, whole: nn.Embedding, comm: Comm) -> None:
        super().__init__()
        if whole.max_norm is not None or whole.sparse or whole.padding_idx is not None:
            raise ValueError("an embedding with max_norm, padding_idx or sparse gradients is not split")
        self.comm = comm
        self.vocab = whole.num_embeddings
        self.weight = sliced(whole.weight, comm, 0, padded=True)

    @property
    def first(self) -> int:
        """The word of this rank's first row."""
        return self.comm.rank * self.weight.shape[0]

    def forward(self, words: Tensor) -> Tensor:
        local = words - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = functional.embedding(torch.where(mine, local, 0), self.weight)
        rows = torch.where(mine.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))
        return out_of(rows, self.comm, "sum of the embedding")


class VocabularyLinear(nn.Module):
    """A head over the vocabulary whose logits are put together again: (…, hidden) → (…, vocab)."""

    def __init__(self, whole: nn.Linear, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.vocab = whole.out_features
        self.weight = sliced(whole.weight, comm, 0, padded=True)
        self.bias = None if whole.bias is None else sliced(whole.bias, comm, 0, padded=True)

    def forward(self, x: Tensor) -> Tensor:
        local = functional.linear(into(x, self.comm, "gradient of the head"), self.weight, self.bias)
        return side_by_side(local, self.comm, self.vocab)


class _VocabularyLoss(torch.autograd.Function):
    """Mean cross-entropy of split logits; one small message, of three numbers a token and rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Comm, vocab: int) -> Tensor:
        tokens, width = logits.shape
        first = comm.rank * width
        real = max(0, min(width, vocab - first))  # the rest is padding, and no word
        top = logits[:, :real].amax(1) if real else logits.new_full((tokens,), torch.finfo(logits.dtype).min)
        soft = torch.sub(logits, top.unsqueeze(1)).exp_()
        soft[:, real:] = 0
        local = targets - first
        mine = (local >= 0) & (local < real)
        local = torch.where(mine, local, 0)
        hit = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~mine, 0)
        everyone = comm.gather_small(torch.stack([top, soft.sum(1), hit]), "loss over the vocabulary")
        highest = everyone[:, 0].amax(0)
        scales = torch.exp(everyone[:, 0] - highest)
        total, target = torch.empty_like(highest), torch.empty_like(highest)
        sum_rows(list((everyone[:, 1] * scales).unbind(0)), total)
        sum_rows(list(everyone[:, 2].clone().unbind(0)), target)
        soft.mul_((scales[comm.rank] / total).unsqueeze(1))
        ctx.save_for_backward(soft, local, mine)
        return (torch.log(total) + highest - target).mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        soft, local, mine = ctx.saved_tensors
        each = gradients[0] / soft.shape[0]
        found = soft * each
        found.scatter_add_(1, local.unsqueeze(1), -(mine * each).to(found.dtype).unsqueeze(1))
        return found, None, None, None


def vocabulary_cross_entropy(logits: Tensor, targets: Tensor, comm: Comm, vocab: int) -> Tensor:
    """The mean loss of ``logits`` (tokens, vocabulary / T) against ``targets`` (tokens,), equal on all ranks."""
    return _apply(_VocabularyLoss, logits, targets, comm, vocab)


# --- randomness --------------------------------------------------------------------------------------


@contextmanager
def own_randomness(comm: Comm, device: torch.device, *, active: bool = True) -> Iterator[None]:
    """Inside, this rank of the tensor group draws numbers of its own (dropout of attention heads).

    The seed is drawn from the generator that all ranks of the group share, and after the region that
    generator goes on as if nothing had been drawn inside. So everything still follows from the seed of
    the micro-step, and a recomputation that restores the shared generator draws the same again.
    """
    if comm.size == 1 or not active:
        yield
        return
    drawn = int(torch.randint(2**62, (), dtype=torch.int64))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(mix(drawn, comm.rank))
        yield
