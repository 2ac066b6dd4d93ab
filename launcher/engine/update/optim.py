"""The optimizers on flat shards, with bits that do not depend on where shards begin.

torch's kernels treat the last few elements of a tensor (less than a vector register) by other instructions
than the rest, and the two may differ in the last bit. So a run is updated in two pieces: as many elements
as fill whole registers in place, and the rest of all runs together in scratch rows that are padded.

AdamW and SGD are torch's fused kernels; ``elementwise.FlatTorch`` is any other element-wise optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract.train import SGD, AdamW
from ..model.flat import Run
from ..model.groups import Group

LANES = 16  # fp32 in 512 bits


Done = Callable[[int], None]


def nothing(_unit: int) -> None:
    return


class FlatOptimizer(Protocol):
    """What the engine asks of an optimizer of runs of elements."""

    name: str
    moments: tuple[str, ...]  # its tensors of a parameter's shape, under their names in checkpoints
    updates: int  # of these runs; skipped ones do not count
    counts: bool  # whether an update depends on how many there were before

    def step(self, lr: float, factor: float, done: Done = nothing) -> None:
        """One update of every run with ``factor`` × its gradient (which is clobbered). ``done`` hears the number of
        each unit once all of its runs are updated, in the same order on every rank."""

    def storages(self) -> list[Tensor]:
        """Every tensor that this object keeps beside the moments."""

    def scalars(self) -> dict[str, Any]:
        """All state that is neither a moment nor ``updates``, for a checkpoint; equal on every rank."""

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Takes back ``scalars()``."""


class Pieces:
    """Runs of one group, dtype and device (and, ``by_unit``, of one unit), with all their rests in scratch rows.

    A column is a parameter, its gradient and its moments; ``main`` and ``rows`` hold a list a column.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.group, self.unit = runs[0].group, runs[0].unit
        self.like = runs[0].parameter
        columns = [[r.parameter, r.gradient, *r.moments] for r in runs if r.parameter.numel()]
        kinds = 2 + len(runs[0].moments)
        self.main: list[list[Tensor]] = [[] for _ in range(kinds)]
        self._rest: list[list[Tensor]] = [[] for _ in range(kinds)]
        self._rows: list[list[Tensor]] = [[] for _ in range(kinds)]
        rests = sum(1 for c in columns if c[0].numel() % LANES)
        self.scratch = [torch.zeros(rests, LANES, dtype=self.like.dtype, device=self.like.device) for _ in range(kinds)]
        row = 0
        for column in columns:
            whole = column[0].numel() // LANES * LANES
            for kind, tensor in enumerate(column):
                if whole:
                    self.main[kind].append(tensor[:whole])
                if whole < tensor.numel():
                    self._rest[kind].append(tensor[whole:])
                    self._rows[kind].append(self.scratch[kind][row, : tensor.numel() - whole])
            row += whole < column[0].numel()

    @classmethod
    def of(cls, runs: Sequence[Run], *, by_unit: bool = False) -> list[Pieces]:
        """The runs in sets of one group, dtype and device, sorted; with ``by_unit`` of one unit, units as they come."""
        turns: dict[int, int] = {}
        kinds: dict[tuple[int, int, str, str], list[Run]] = {}
        for run in runs:
            kind = (run.group, str(run.parameter.dtype), str(run.parameter.device))
            turn = turns.setdefault(run.unit, len(turns)) if by_unit else 0
            kinds.setdefault((turn, *kind), []).append(run)
        return [cls(kinds[key]) for key in sorted(kinds)]

    def enter(self) -> list[list[Tensor]]:
        """Brings the rests into the rows; the tensors of every column, gradients in the parameters' dtype."""
        tensors = [list(m) for m in self.main]
        tensors[1] = [g if g.dtype == self.like.dtype else g.to(self.like.dtype) for g in tensors[1]]
        for kind, rest in enumerate(self._rest):
            if rest:
                torch._foreach_copy_(self._rows[kind], rest)
                tensors[kind].append(self.scratch[kind].view(-1))
        return tensors

    def leave(self) -> None:
        """Takes what was updated in the rows back to where it belongs."""
        for kind, rest in enumerate(self._rest):
            if rest and kind != 1:
                torch._foreach_copy_(rest, self._rows[kind])


class _Fused:
    """An optimizer that is one kernel over lists of tensors."""

    name: str
    moments: tuple[str, ...]
    counts = False

    def __init__(self, runs: Sequence[Run], groups: Sequence[Group]) -> None:
        self.groups = groups
        self.updates = 0
        self._sets = Pieces.of(runs, by_unit=True)

    def storages(self) -> list[Tensor]:
        return [rows for chosen in self._sets for rows in chosen.scratch]

    def scalars(self) -> dict[str, Any]:
        return {}

    def restore(self, scalars: Mapping[str, Any]) -> None:
        return

    def step(self, lr: float, factor: float, done: Done = nothing) -> None:
        self.updates += 1
        for unit, sets in groupby(self._sets, key=lambda pieces: pieces.unit):
            for pieces in sets:
                self._step(pieces, lr, factor)
            done(unit)

    def _step(self, pieces: Pieces, lr: float, factor: float) -> None:
        group = self.groups[pieces.group]
        tensors = pieces.enter()
        scale: Tensor | None = None
        if factor != 1.0 and pieces.like.dtype == torch.float32:  # the kernel's own scaling is in fp32
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=pieces.like.device)
        elif factor != 1.0 and tensors[1]:
            torch._foreach_mul_(tensors[1], factor)
        if tensors[0]:
            self._update(tensors, lr * group.lr_scale, group.weight_decay, scale)
        pieces.leave()

    def _update(self, tensors: list[list[Tensor]], lr: float, weight_decay: float | None, scale: Tensor | None) -> None:
        raise NotImplementedError


class FlatAdamW(_Fused):
    """Decoupled weight decay Adam on runs of elements; its moments are ``exp_avg`` and ``exp_avg_sq``."""

    name = "AdamW"
    counts = True
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def __init__(self, runs: Sequence[Run], config: AdamW, groups: Sequence[Group]) -> None:
        super().__init__(runs, groups)
        self.config = config

    def _update(self, tensors: list[list[Tensor]], lr: float, weight_decay: float | None, scale: Tensor | None) -> None:
        config = self.config
        step = torch.tensor(float(self.updates), dtype=torch.float32, device=tensors[0][0].device)
        torch._fused_adamw_(
            tensors[0],
            tensors[1],
            tensors[2],
            tensors[3],
            [],
            [step] * len(tensors[0]),
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=config.weight_decay if weight_decay is None else weight_decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=None,
        )


class FlatSGD(_Fused):
    """As ``torch.optim.SGD``; with momentum it keeps one moment, ``momentum_buffer``, which starts at zero: its first
    value is then the first gradient, as in torch."""

    name = "SGD"

    def __init__(self, runs: Sequence[Run], config: SGD, groups: Sequence[Group]) -> None:
        self.moments = sgd_moments(config)
        super().__init__(runs, groups)
        self.config = config

    def _update(self, tensors: list[list[Tensor]], lr: float, weight_decay: float | None, scale: Tensor | None) -> None:
        config = self.config
        torch._fused_sgd_(
            tensors[0],
            tensors[1],
            tensors[2] if self.moments else [],
            weight_decay=config.weight_decay if weight_decay is None else weight_decay,
            momentum=config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=config.nesterov,
            maximize=False,
            is_first_step=False,
            grad_scale=scale,
            found_inf=None,
        )


def sgd_moments(config: SGD) -> tuple[str, ...]:
    return ("momentum_buffer",) if config.momentum else ()


def learning_rate(config: AdamW | SGD, step: int, steps: int) -> float:
    """The rate for the update that makes step ``step`` (from 1) of ``steps``: warm-up, then the schedule."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    floor = config.lr * config.lr_floor
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
