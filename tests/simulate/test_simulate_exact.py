"""The simulated peak is the real one: to the byte in forward and backward, within 64 KiB in the update."""

from __future__ import annotations

import pytest
from exactness import (
    PHASES,
    RECOMPUTE,
    STAGES,
    UPDATE_TOLERANCE,
    WORLDS,
    Case,
    Row,
    cases_of,
    plain_cases,
    ranks_of,
    rows,
)
from real_steps import SETTINGS

# All cases at once, in the first test, which takes four minutes on a busy machine: once, in one of the two processes.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("real steps")]
QUICK: dict[str, tuple[int, ...]] = {
    "bf16": (3,),
    "fp16": (1,),
    "SGD with momentum": (2,),
    "2 tensor ranks, activations partitioned": (1, 3),
    "2 tensor ranks, activations in host memory": (3,),
}


def _quick() -> list[Case]:
    """With recomputation; the product is below, marked full."""
    found = [case for name, stages in QUICK.items() for case in cases_of(name, stages=stages)]
    return [case for case in found if case.recompute == "block"]


@pytest.fixture(scope="module")
def everything() -> list[Row]:
    return rows([*plain_cases(), *_quick()])


@pytest.fixture(scope="module")
def table(everything: list[Row]) -> list[Row]:
    return [row for row in everything if not row.setting]


def _said(row: Row, phase: str) -> str:
    case = f"{row.setting or 'fp32'}, stage {row.stage}, recompute {row.recompute}, rank {row.rank} of {row.world}"
    sizes = f"simulated {row.simulated[phase]:,}, real {row.real[phase]:,}"
    return f"{case}, {phase}: {sizes}; by category {row.differs[phase]}"


def _is_exact(row: Row) -> None:
    for phase in PHASES[:2]:
        assert row.simulated[phase] == row.real[phase], _said(row, phase)
        assert not row.differs[phase], _said(row, phase)
    assert abs(row.simulated["update"] - row.real["update"]) <= UPDATE_TOLERANCE, _said(row, "update")
    assert row.sent[0] == row.sent[1]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_peak_is_the_real_one(table: list[Row], world: int, stage: int, recompute: str) -> None:
    chosen = [r for r in table if (r.world, r.stage, r.recompute) == (world, stage, recompute)]
    assert {r.rank for r in chosen} == set(ranks_of(world))
    for row in chosen:
        _is_exact(row)


@pytest.mark.parametrize("setting", QUICK)
def test_other_precisions_optimizers_and_tensor_ranks(everything: list[Row], setting: str) -> None:
    chosen = [row for row in everything if row.setting == setting]
    assert len(chosen) == 2 * len(QUICK[setting])
    for row in chosen:
        _is_exact(row)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_at_every_stage(setting: str) -> None:
    for row in rows(cases_of(setting)):
        _is_exact(row)


def test_recomputation_and_stages_lower_the_peak(table: list[Row]) -> None:
    """What the numbers are for: that they tell settings apart."""
    peak = {(r.world, r.stage, r.recompute): max(r.simulated.values()) for r in table if r.rank == 0}
    for world in WORLDS:
        for stage in STAGES:
            assert peak[world, stage, "block"] < peak[world, stage, "none"]
    assert peak[4, 3, "none"] < peak[4, 2, "none"] < peak[4, 1, "none"] < peak[4, 0, "none"]
