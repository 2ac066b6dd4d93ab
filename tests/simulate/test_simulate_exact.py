"""The simulated peak is the real one: to the byte in forward and backward, within 64 KiB in the update."""

from __future__ import annotations

import pytest
from exactness import PHASES, RECOMPUTE, STAGES, UPDATE_TOLERANCE, WORLDS, Row, ranks_of, rows


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def _said(row: Row, phase: str) -> str:
    return f"{phase}: simulated {row.simulated[phase]:,}, real {row.real[phase]:,}; by category {row.differs[phase]}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_the_peak_is_the_real_one(table: list[Row], world: int, stage: int, recompute: str) -> None:
    chosen = [r for r in table if (r.world, r.stage, r.recompute) == (world, stage, recompute)]
    assert {r.rank for r in chosen} == set(ranks_of(world))
    for row in chosen:
        for phase in PHASES[:2]:
            assert row.simulated[phase] == row.real[phase], _said(row, phase)
            assert not row.differs[phase], _said(row, phase)
        assert abs(row.simulated["update"] - row.real["update"]) <= UPDATE_TOLERANCE, _said(row, "update")
        assert row.sent[0] == row.sent[1]


def test_recomputation_and_stages_lower_the_peak(table: list[Row]) -> None:
    """What the numbers are for: that they tell settings apart."""
    peak = {(r.world, r.stage, r.recompute): max(r.simulated.values()) for r in table if r.rank == 0}
    for world in WORLDS:
        for stage in STAGES:
            assert peak[world, stage, "block"] < peak[world, stage, "none"]
    assert peak[4, 3, "none"] < peak[4, 2, "none"] < peak[4, 1, "none"] < peak[4, 0, "none"]
