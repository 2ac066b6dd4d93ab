"""The plan of jobs/quickstart.yaml beside what its own run then records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETS = ("--set", "steps=4", "--set", "optimizer.warmup=2", "--set", "evaluate.tokens=2048")


def zerun(*arguments: str, runs: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *arguments, "--cluster", "laptop", *SETS],
        cwd=ROOT,
        env={**os.environ, "ZERUN_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_lines(plan: dict[str, Any]) -> int:
    """The most at one moment by the lines that are tensors: slack is what an allocator loses."""
    lines = [line["alive"] for line in plan["step"] if line["what"] != "allocator slack"]
    return max(sum(alive[moment] for alive in lines) for moment in ("loss", "backward", "update"))


@pytest.mark.timeout(900)
def test_the_plan_is_what_the_run_records(tmp_path: Path) -> None:
    """Memory, state and traffic: the simulated peak is the run's own, arithmetic is within one percent."""
    run = zerun("submit", "jobs/quickstart.yaml", "--follow", runs=tmp_path).split()[0]
    plain: dict[str, Any] = json.loads(zerun("plan", "jobs/quickstart.yaml", "--json", runs=tmp_path))
    for rank in (0, 1):
        told = json.loads(
            zerun("plan", "jobs/quickstart.yaml", "--simulate", "--rank", str(rank), "--json", runs=tmp_path)
        )
        metrics = tmp_path / run / "attempts" / "1" / "metrics" / f"rank-{rank:05d}.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert rows[2]["peak_allocated_bytes"] is None, "only the first two steps are recorded"
        recorded = rows[1]["peak_allocated_bytes"]
        assert told["peak_bytes"] == recorded
        assert by_lines(plain) == pytest.approx(recorded, rel=0.01)
        assert told["simulation"]["state_bytes"] == rows[1]["state_bytes"]
        assert told["simulation"]["sent_bytes"] == rows[1]["sent_bytes"] == plain["sent_bytes_per_step"]
