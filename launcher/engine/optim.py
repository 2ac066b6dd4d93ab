"""AdamW on flat shards, by torch's fused kernel, with bits that do not depend on where shards begin.

The kernel treats the last few elements of a tensor (less than a vector register) by other instructions
than the rest, and the two differ in the last bit. So a run is updated in two pieces: as many elements
as fill whole registers in place, and the rest of all runs together in scratch rows that are padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..contract.train import AdamW
from .flat import Run
from .units import Group

LANES = 16  # fp32 in 512 bits


class FlatAdamW:
    """Decoupled weight decay Adam on runs of elements; its moments are ``exp_avg`` and ``exp_avg_sq``."""

    MOMENTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, runs: Sequence[Run], config: AdamW, groups: Sequence[Group]) -> None:
        self.config = config
        self.groups = groups
        self.updates = 0  # steps taken; skipped ones do not count
        self._sets: list[_Set] = []
        for key in sorted({(r.group, str(r.parameter.dtype), str(r.parameter.device)) for r in runs}):
            members = [r for r in runs if (r.group, str(r.parameter.dtype), str(r.parameter.device)) == key]
            self._sets.append(_Set(members))

    def storages(self) -> list[Tensor]:
        """Every tensor that this object keeps beside the moments."""
        return [rows for chosen in self._sets for rows in chosen.storages]

    def step(self, lr: float, factor: float) -> None:
        """One update of every run with ``factor`` × its gradient (which is clobbered)."""
        self.updates += 1
        for chosen in self._sets:
            group = self.groups[chosen.group]
            decay = self.config.weight_decay if group.weight_decay is None else group.weight_decay
            chosen.step(self.updates, lr * group.lr_scale, decay, self.config, factor)


class _Set:
    """Runs of one group, dtype and device, with the rests of all of them in scratch rows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.group = runs[0].group
        like = runs[0].parameter
        columns = [[r.parameter, r.gradient, *r.moments] for r in runs if r.parameter.numel()]
        self._main: list[list[Tensor]] = [[] for _ in range(4)]
        self._rest: list[list[Tensor]] = [[] for _ in range(4)]
        self._rows: list[list[Tensor]] = [[] for _ in range(4)]
        rests = sum(1 for c in columns if c[0].numel() % LANES)
        self._scratch = [torch.zeros(rests, LANES, dtype=like.dtype, device=like.device) for _ in range(4)]
        self.storages = list(self._scratch)
        row = 0
        for column in columns:
            whole = column[0].numel() // LANES * LANES
            for kind, tensor in enumerate(column):
                if whole:
                    self._main[kind].append(tensor[:whole])
                if whole < tensor.numel():
                    self._rest[kind].append(tensor[whole:])
                    self._rows[kind].append(self._scratch[kind][row, : tensor.numel() - whole])
            row += whole < column[0].numel()
        self._scales = like.dtype == torch.float32  # the kernel's own scaling is in fp32
        self._like = like

    def step(self, updates: int, lr: float, weight_decay: float, config: AdamW, factor: float) -> None:
        tensors = [list(m) for m in self._main]
        tensors[1] = [g if g.dtype == self._like.dtype else g.to(self._like.dtype) for g in tensors[1]]
        for kind in range(4):
            if self._rest[kind]:
                torch._foreach_copy_(self._rows[kind], self._rest[kind])
                tensors[kind].append(self._scratch[kind].view(-1))
        scale: Tensor | None = None
        if factor != 1.0 and self._scales:
            scale = torch.tensor(1.0 / factor, dtype=torch.float32, device=self._like.device)
        elif factor != 1.0:
            torch._foreach_mul_(tensors[1], factor)
        if tensors[0]:
            torch._fused_adamw_(
                tensors[0],
                tensors[1],
                tensors[2],
                tensors[3],
                [],
                [torch.tensor(float(updates), dtype=torch.float32, device=self._like.device)] * len(tensors[0]),
                lr=lr,
                beta1=config.betas[0],
                beta2=config.betas[1],
                weight_decay=weight_decay,
                eps=config.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
                found_inf=None,
            )
        for kind in (0, 2, 3):
            if self._rest[kind]:
                torch._foreach_copy_(self._rest[kind], self._rows[kind])


def learning_rate(config: AdamW, step: int, steps: int) -> float:
    """The rate for the update that makes step ``step`` (from 1) of ``steps``: warm-up, then the schedule."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup) / max(1, steps - config.warmup))
    floor = config.lr * config.lr_floor
    return floor + (config.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
