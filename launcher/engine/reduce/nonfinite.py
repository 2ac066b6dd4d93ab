"""A gradient that is not finite: which parameter's, and which rank's loss or own gradient made it so.

What is born in a layer's backward spreads to all that stands before it in the model, so of all parameters whose sum is
not finite the last one is named: it is nearest to where that began. A loss that is no number reaches every one.

A sum that is not finite says nothing of who made it: its owner is merely where it lies. So each rank keeps its
micro-losses until the step, and looks at them, and at what is still there of its own gradient, once the norm of the sum
is not finite; nothing is looked at before. A rank's own gradient is still there where buckets are slices of a whole
gradient that only its owner overwrites: ``reduce_every: step`` at stages 1 and 2. Elsewhere it has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...contract.errors import JobFailed, UsageError

if TYPE_CHECKING:
    from ..model.flat import FlatUnit
    from ..zero import ZeroEngine

_FINITE, _NOT, _NOT_KNOWN = 0, 1, 2
_NAMED = 8  # ranks in one message
_HINT = (
    "zero.reduce_every: step at stage 1 or 2 keeps each rank's own gradient until the step, which then names the rank; "
    "torch.autograd.set_detect_anomaly(True) names the operation"
)


class NonFinite(JobFailed):
    """A gradient or loss that is NaN or infinite; names the parameter, and who made it where that is known."""


class Losses:
    """This rank's losses since the last step: references to scalars that are there anyhow."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def keep(self, loss: Tensor) -> None:
        """Raises :class:`UsageError` for what no backward can begin with."""
        _check(loss)
        loss = loss.detach()
        alone = loss.untyped_storage().nbytes() == loss.element_size()
        self._kept.append(loss if alone else loss.clone())  # an element of something larger would hold all of it

    def forget(self) -> None:
        self._kept = []

    def first_bad(self) -> tuple[int, float]:
        """The first micro-step (from 1) whose loss is not finite, and that loss; 0 where all are."""
        for number, loss in enumerate(self._kept, 1):
            if not bool(torch.isfinite(loss).all()):
                return number, float(loss)
        return 0, 0.0


def _check(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"backward was given {type(loss).__name__}, not a tensor: it needs the loss itself, zero.backward(loss), "
            "not loss.item() or a model's output"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"backward was given a tensor of shape {tuple(loss.shape)}, not one number: it needs the mean loss of the "
            "micro-batch, loss.mean()"
        )
    if not loss.requires_grad:
        raise UsageError(
            "backward was given a loss that no gradient leads to: it was detached, or computed under no_grad, or of "
            "frozen parameters alone"
        )


class Found(NamedTuple):
    """What to tell, and what to do next where the rank is not known."""

    text: str
    hint: str | None


def look(engine: ZeroEngine, norm: float) -> Found:
    """What made the gradient's ``norm`` no number; every rank calls it, and gets the same answer."""
    names = _in_model_order(engine)
    number, loss = engine.losses.first_bad()
    row = torch.tensor([number, loss], dtype=torch.float64, device=engine.device)
    rows = engine.ranks.world.gather_small(row, "non-finite gradients").tolist()
    flags = torch.tensor(_bad_sums(engine, names), dtype=torch.uint8, device=engine.device)
    bad_sums = engine.ranks.world.gather_small(flags, "non-finite gradients").cpu()
    bad_losses = [(rank, int(n), float(value)) for rank, (n, value) in enumerate(rows) if n]
    bad = bad_sums.amax(0).nonzero()[:, 0].tolist()
    if not bad:
        told = _of_losses(bad_losses, engine.config.accumulation) or "every element is finite, their squares are not"
        return Found(f"the gradient's norm is {norm}: {told}", None)
    last = bad[-1]
    own = torch.tensor([_own_gradient(engine, names[last])], device=engine.device)
    owns = engine.ranks.world.gather_small(own, "non-finite gradients")[:, 0].tolist()
    holders = bad_sums[:, last].nonzero()[:, 0].tolist()
    made, known = _who(bad_losses, owns, holders, engine)
    # At stage 0 every rank has every sum; the owner is whoever took it.
    where = f"its sum lies in the shard{'s' * (len(holders) > 1)} of {_ranks(holders)}"
    others = len(bad) - 1
    spread = f"; {others} before it in the model {'is' if others == 1 else 'are'} not finite either" if others else ""
    return Found(
        f"the gradient of parameter {names[last]} is not finite (norm {norm}): {made}; {where}{spread}",
        None if known else _HINT,
    )


def _who(
    bad_losses: Sequence[tuple[int, int, float]], owns: Sequence[int], holders: Sequence[int], engine: ZeroEngine
) -> tuple[str, bool]:
    """Who made it, and whether that is known."""
    seen = [rank for rank, own in enumerate(owns) if own == _NOT]
    if bad_losses:
        further = sorted(set(seen) - {rank for rank, _, _ in bad_losses})
        beside = f"; so was the own gradient of {_ranks(further)}" if further else ""
        return _of_losses(bad_losses, engine.config.accumulation) + beside, True
    finite = "all losses were finite"
    if seen:
        return f"{finite}, the own gradient of {_ranks(seen)} was not", True
    if len(owns) == 1:
        return f"{finite}, the gradient of rank 0 was not", True
    if _NOT_KNOWN in owns:
        return f"{finite}; which rank's own gradient was not is not known, sums were taken as it came", False
    # All that others added is finite, so it is what the owner added itself, or the sum of finite ones is too large.
    own = f"it is the own gradient of {_ranks(holders, 'or')}, or a sum of finite ones is too large"
    return f"{finite}, and so was what other ranks added: {own}", True


def _of_losses(bad: Sequence[tuple[int, int, float]], accumulation: int) -> str:
    if not bad:
        return ""
    rank, number, value = bad[0]
    when = f" in micro-step {number} of {accumulation}" if accumulation > 1 else ""
    others = [rank for rank, _, _ in bad[1:]]
    return f"the loss of rank {rank} was {value}{when}" + (f", and that of {_ranks(others)} too" if others else "")


def _in_model_order(engine: ZeroEngine) -> list[str]:
    """The layout's names as the model defines them: its units may stand in another order."""
    at = {name: number for number, (name, _) in enumerate(engine.model.named_parameters())}
    return sorted(engine.layout.by_name, key=lambda name: at.get(name, -1))


def _bad_sums(engine: ZeroEngine, names: Sequence[str]) -> list[bool]:
    """For each parameter, whether its sum in this rank's shard is not finite somewhere."""
    pieces = (piece for flat in engine.units for piece in flat.own_gradient_pieces())
    bad = {name for tensor, name in pieces if not bool(torch.isfinite(tensor).all())}
    return [name in bad for name in names]


def _own_gradient(engine: ZeroEngine, name: str) -> int:
    """Of a parameter, what this rank added to other ranks' sums."""
    flat = next(f for f in engine.units for p in f.unit.placed if p.parameter.name == name)
    if not _is_kept(flat, engine):
        return _NOT_KNOWN
    assert flat.gradient is not None
    placed = next(p for p in flat.unit.placed if p.parameter.name == name)
    at = placed.start
    for part in (*flat.parts, None):  # what lies between this rank's own parts, which hold sums
        end = placed.stop if part is None else min(max(part.start, at), placed.stop)
        if not bool(torch.isfinite(flat.gradient[at:end]).all()):
            return _NOT
        if part is not None:
            at = min(max(part.stop, at), placed.stop)
    return _FINITE


def _is_kept(flat: FlatUnit, engine: ZeroEngine) -> bool:
    return flat.whole_gradient and flat.stage.shards_optimizer and engine.shard.size > 1


def _ranks(ranks: Sequence[int], last: str = "and") -> str:
    """rank 3 · ranks 0, 1 and 2"""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"ranks {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} {last} {ranks[-1]}"
