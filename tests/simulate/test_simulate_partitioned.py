"""Units, resharding, prefetch, replicas and the library's sum on nothing: the peaks and bytes of a real step."""

from __future__ import annotations

from typing import Any

import pytest
from exactness import PHASES, UPDATE_TOLERANCE, Case, rows
from real_steps import config, plain

from launcher.contract.train import Units, Zero

SMALL = Units(names=("blocks.*.attention", "blocks.*.mlp"))
CASES: dict[str, dict[str, Any]] = {
    "small units, two ahead": {"stage": 3, "unit": SMALL, "prefetch": 2},
    "filled units, released": {"stage": 3, "unit": Units(size_bytes=1_000_000), "reshard": "after_forward"},
    "kept": {"stage": 3, "reshard": "keep", "prefetch": 0},
    "small units of replicas": {"stage": 3, "unit": SMALL, "prefetch": 2, "replicas": 2, "reshard": "after_forward"},
    "native": {"stage": 0, "reduce_with": "native"},
    **{f"replicas {stage}": {"stage": stage, "replicas": 2} for stage in range(4)},
}


def _hold(names: tuple[str, ...], recompute: str) -> None:
    zeros = [Zero(bucket_bytes=70_000, **CASES[name]) for name in names]
    cases = [
        Case(4, zero.stage, recompute, plain(config(zero.stage, recompute=recompute, zero=zero)), name)
        for zero, name in zip(zeros, names, strict=True)
    ]
    found = rows(cases)
    assert len(found) == 2 * len(names)
    for row in found:
        for phase in PHASES[:2]:
            assert row.simulated[phase] == row.real[phase], (row.setting, row.rank, phase, row.differs[phase])
        assert abs(row.simulated["update"] - row.real["update"]) <= UPDATE_TOLERANCE, (row.setting, row.differs)
        assert row.sent[0] == row.sent[1], row.setting


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_every_setting(recompute: str) -> None:
    _hold(tuple(CASES), recompute)
