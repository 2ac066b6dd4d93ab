"""What the norm keeps, and the optimizer beside its moments: counted by the planner as a real engine has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine
from launcher.planning.norm import norm_alive, optimizer_scratch

QUICK: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "bucket_bytes": 70_000},
    {"stage": 2, "bucket_bytes": 70_000, "precision": "bf16"},
    {"stage": 3, "bucket_bytes": 300_004, "optimizer": SGD(0.1, 0.9)},
]
REST = [
    {"stage": stage, "bucket_bytes": bucket, "precision": precision, "reduce_every": how, "optimizer": optimizer}
    for stage in range(4)
    for bucket in (12_004, 1_000_000)
    for precision in ("fp32", "bf16")
    for how in ("step", "micro_step")
    for optimizer in (AdamW(1e-3), SGD(0.1, 0.0))
]


class _Blocks(nn.Module):
    """Parameters of several of the norm's blocks, of less than one, and of a few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(301, 457 + 512 * more, bias=bool(more)) for more in (0, 1, 0))
        self.scale = nn.Parameter(torch.ones(5))


def _kept(_rank: int, _world: int, cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    found = []
    for case in cases:
        given = dict(case)
        optimizer, precision = given.pop("optimizer", AdamW(1e-3)), given.pop("precision", "fp32")
        engine = ZeroEngine(_Blocks(), EngineConfig(Zero(**given), optimizer, precision=precision))
        moments = len(engine.optimizer.moments)
        whole = any(unit.whole_gradient for unit in engine.units)
        scratch = optimizer_scratch(engine.layout, case["stage"], moments, whole_gradients=whole)
        found.append((norm_alive(engine.layout, scratch).backward, engine.memory()["norm"]))
    return found


@pytest.mark.parametrize(
    ("world", "cases"),
    [(3, QUICK), *(pytest.param(world, REST, marks=pytest.mark.full) for world in (1, 2, 3, 4))],
    ids=lambda value: str(value) if isinstance(value, int) else "cases",
)
def test_it_is_counted_to_the_byte(world: int, cases: list[dict[str, Any]]) -> None:
    for case, (planned, real) in zip(cases, run_ranks(world, _kept, cases, timeout_s=200.0)[0], strict=True):
        assert planned == real, case
