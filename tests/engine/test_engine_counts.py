"""A parameter's own count of updates: torch's numbers where parameters are left out of steps, at any stage, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import digest, relative, whole_state
from engine_ranks import run_ranks
from test_engine_elementwise import CASES
from torch import Tensor, nn

from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine

STEPS, ROWS = 7, 4
OURS = AdamW(0.02, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1, clip=1.0)


class Part(nn.Module):
    """Two parameters that are used together, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 7) / 3)
        self.b = nn.Parameter(torch.randn(7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w + self.b)


class Now(nn.Module):
    """``parts.1`` and ``late`` are first used in step 3, ``parts.2`` and ``other`` in every other one; ``parts.3`` and
    ``still`` are always used, and frozen in steps 2 to 4; ``never`` is never used, ``tail``, of which rank 0 has no
    element where shards are, in every third step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.late, self.other, self.still, self.never, self.tail = (
            nn.Parameter(torch.randn(n)) for n in (7, 300, 17, 5, 5)
        )
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def freeze(self, step: int) -> None:
        for parameter in (self.still, *self.parts[3].parameters()):
            parameter.requires_grad_(not 1 <= step <= 3)

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = self.parts[0](x) + self.still.sum()
        if step >= 2:
            x = self.parts[1](x) * self.late
        if step % 2:
            x = self.parts[2](x) + self.other.square().mean()
        if step % 3 == 1:
            x = x + self.tail.mean()
        return self.parts[3](x).square().mean()


def _inputs(step: int) -> Tensor:
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _rate(lr: float, step: int) -> float:
    return lr * (1 - 0.1 * step)


def _adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, OURS.lr, OURS.betas, OURS.eps, OURS.weight_decay)


def _reference(make: Callable[[Any], torch.optim.Optimizer], clip: float | None) -> dict[str, Tensor]:
    model = Now().double()
    optimizer = make(list(model.parameters()))
    lr = optimizer.param_groups[0]["lr"]
    for step in range(STEPS):
        model.freeze(step)
        optimizer.param_groups[0]["lr"] = _rate(lr, step)
        optimizer.zero_grad()
        model(_inputs(step), step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def _engine(stage: int, config: AdamW | SGD, choice: Any, dtype: torch.dtype = torch.float64) -> ZeroEngine:
    return ZeroEngine(Now().to(dtype), EngineConfig(Zero(stage, 1000), config), optimizer=choice)


def _train(engine: ZeroEngine, lr: float, steps: range) -> None:
    for step in steps:
        engine.model.freeze(step)
        engine.lr = _rate(lr, step)
        mine = _inputs(step).chunk(engine.comm.size)[engine.comm.rank]
        engine.backward(engine.model(mine.to(next(engine.model.parameters()).dtype), step))
        engine.step()
    engine.model.freeze(0)


def _settings(case: str) -> tuple[AdamW | SGD, Any, float, Any]:
    """The engine's config and choice, the rate, and the undistributed optimizer."""
    if case == "ours":
        return OURS, None, OURS.lr, _adamw
    config, make = CASES[case]
    lr = make([torch.zeros(1)]).param_groups[0]["lr"]
    return (AdamW(1.0), make, lr, make) if config is None else (config, None, lr, make)


def _distributed(rank: int, world: int, cases: list[str], folder: str) -> None:
    for case in cases:
        config, choice, lr, make = _settings(case)
        expected, bits = _reference(make, config.clip), set()
        for stage in range(4):
            whole = _engine(stage, config, choice)
            _train(whole, lr, range(STEPS))
            state = whole_state(whole)
            bits.add(digest(state))
            for name, value in state.items():
                assert relative(value, expected[name]) < 1e-12, (case, stage, name)
            if stage == 3:  # resumed in the middle, from another stage's checkpoint
                first, second = _engine(1, config, choice), _engine(stage, config, choice)
                _train(first, lr, range(4))
                first.save(f"{folder}/{case}", 4)
                second.load(f"{folder}/{case}")
                _train(second, lr, range(4, STEPS))
                bits.add(digest(whole_state(second)))
        assert len(bits) == 1, case
    bits = set()
    for stage in range(4):  # where the kernel scales
        engine = _engine(stage, OURS, None, torch.float32)
        _train(engine, OURS.lr, range(STEPS))
        bits.add(digest(whole_state(engine)))
    assert len(bits) == 1


FIRST = ["ours", "Adam amsgrad", "NAdam", "RAdam"]


@pytest.mark.parametrize("cases", [FIRST, pytest.param([c for c in CASES if c not in FIRST], marks=pytest.mark.full)])
def test_every_class_is_torchs_where_parameters_are_left_out(cases: list[str], tmp_path: Path) -> None:
    run_ranks(2, _distributed, cases, str(tmp_path))
    for case in cases:  # and on another number of ranks
        config, choice, lr, make = _settings(case)
        engine = _engine(0, config, choice)
        engine.load(tmp_path / case)
        assert engine.optimizer.updates == 4
        _train(engine, lr, range(4, STEPS))
        expected = _reference(make, config.clip)
        for name, value in whole_state(engine).items():
            assert relative(value, expected[name]) < 1e-12, (case, name)


def test_what_was_apart_joins_again_where_updates_do_not_count_and_memory_has_what_is_apart() -> None:
    engine = _engine(0, SGD(0.1, 0.9), None)
    _train(engine, 0.1, range(4))
    assert engine.optimizer.scalars() == {} and engine.optimizer.updates == 4
    engine = _engine(0, OURS, None)
    before = engine.memory()["norm"]
    _train(engine, OURS.lr, range(4))
    behind = {tuple(c["parameters"]): c["updates"] for c in engine.optimizer.scalars()["behind"]}
    assert behind == {
        ("late", "parts.1.b", "parts.1.w"): 2,
        ("other", "parts.2.b", "parts.2.w"): 2,
        ("parts.3.b", "parts.3.w", "still"): 1,
        ("tail",): 1,
        ("never",): 0,
    }
    assert engine.memory()["norm"] > before
