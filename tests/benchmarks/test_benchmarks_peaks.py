"""Peaks at stage 3 are what they are stated to be: state, one unit, the buckets and activations, and a tenth more."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def peaks() -> Iterator[Any]:
    before, environment = list(sys.path), dict(os.environ)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import peaks

    yield peaks
    sys.path[:] = before
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):  # what its ranks run with is no other test's
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]


FULL = [(n, w, h) for n in ("GPT, 8 × 192", "convolutions, 8 × 96") for w in (2, 4) for h in ("none", "block")]


@pytest.mark.parametrize(
    ("name", "world", "how"),
    [case if case == FULL[5] else pytest.param(*case, marks=pytest.mark.full) for case in FULL],
)
def test_the_peak_is_within_a_tenth_of_what_it_is_made_of(peaks: Any, name: str, world: int, how: str) -> None:
    import ranks

    found = peaks.worst(ranks.run(world, peaks.measure, name, how))
    assert 1 < found.over <= 1 + peaks.WITHIN, found
    assert found.activations > found.unit and found.buckets <= 4 * found.unit


def test_the_page_shows_every_case(peaks: Any) -> None:
    page = peaks.PAGE.read_text("utf-8").split(peaks.BEGIN, 1)[1].split(peaks.END, 1)[0]
    for name, world, how in peaks.CASES:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {name} | {world} | {how} |")]
        assert 1 < float(row.split("|")[-2].strip().rstrip("×")) <= 1 + peaks.WITHIN
