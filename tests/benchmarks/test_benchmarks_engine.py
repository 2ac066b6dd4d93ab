"""The benchmark of the engine runs every policy on a tiny model, and all of them train the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# All policies at once, in the first test: once, in one of the two processes.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("policies")]
KEYS = {
    "policy", "world", "parameters", "median_s", "low_s", "high_s", "ratio_to_ddp", "ratio_low", "ratio_high",
    "peak_storage_bytes", "peak_resident_bytes", "volume_elements", "loss",
}  # fmt: skip
POLICIES = ["zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2", "fsdp2-kept", "alone"]


@pytest.fixture(scope="module")
def ran() -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "benchmarks/engine.py", "--world", "2", "--parameters", "tiny", "--pairs", "2", "--json"]
    argv += ["--policies", ",".join([*POLICIES, "deepspeed3-set"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done


def test_a_row_a_policy_with_the_keys_promised(ran: subprocess.CompletedProcess[str]) -> None:
    rows = {row["policy"]: row for row in map(json.loads, ran.stdout.splitlines())}
    assert [name for name in rows if not name.startswith("deepspeed")] == POLICIES
    assert all(set(row) == KEYS for row in rows.values())
    whole = rows["ddp"]["parameters"]
    assert all(row["peak_storage_bytes"] > 4 * whole for row in rows.values())
    volumes = {name: row["volume_elements"] / whole for name, row in rows.items()}
    assert volumes["alone"] == 0
    assert volumes["ddp"] == pytest.approx(2, rel=1e-3)
    for name in ("zero0", "zero1", "zero2", "fsdp2-kept"):
        assert volumes[name] == pytest.approx(2, rel=1e-2), name
    assert 2 < volumes["zero3"] < 3 and 2 < volumes["fsdp2"] < 3


def test_every_policy_has_the_same_loss(ran: subprocess.CompletedProcess[str]) -> None:
    losses = {row["policy"]: row["loss"] for row in map(json.loads, ran.stdout.splitlines())}
    alone = losses.pop("alone")  # its ranks learn each from their own half of the data
    assert all(loss == pytest.approx(losses["ddp"], abs=1e-5) for loss in losses.values()), losses
    assert alone != losses["ddp"]
    assert len({losses[f"zero{stage}"] for stage in range(4)}) == 1  # bitwise


def test_a_verdict_a_target(ran: subprocess.CompletedProcess[str]) -> None:
    lines = ran.stderr.splitlines()
    assert sum("too few rounds" in line for line in lines) >= 7
    if importlib_finds("deepspeed"):
        return
    assert "not run: deepspeed3-set: deepspeed is not installed" in lines


def test_intervals_hold_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import engine

    chance = random.Random(3)
    values = [1 + chance.gauss(0, 0.05) for _ in range(40)]
    interval = engine.bootstrap(values)
    assert interval is not None and 0.9 < interval[0] < 1 < interval[1] < 1.1
    assert engine.bootstrap(values[:5]) is None
    with pytest.raises(SystemExit, match="no policy zero9"):
        engine.chosen("zero9")
    assert engine.chosen("zero3") == ["zero3", "ddp"]


def importlib_finds(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None
