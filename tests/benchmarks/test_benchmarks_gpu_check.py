"""The check of one GPU runs on a CPU too, on a tiny model: what it prints, and that both sides train the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"


def _run(*options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, str(SCRIPT), *options], capture_output=True, text=True, timeout=280, check=False)


def test_a_row_and_a_json_value_a_stage_and_equal_losses() -> None:
    done = _run("--tiny", "--pairs", "6", "--stages", "0,3")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [found["stage"] for found in said["stages"]] == [0, 3]
    for found in said["stages"]:
        assert found["pairs"] == 6 and found["at_most"] == 1.03
        assert found["low"] <= found["ratio"] <= found["high"]
        assert found["loss_zero"] == found["loss_plain"], "one model, one optimizer, one clipping: one loss"
    moved = said["activations"]
    assert moved["host_bytes"] == moved["inputs_bytes"] == 2 * 2 * 16 * 32 * 2
    assert moved["losses"]["host"] == moved["losses"]["whole"] and moved["verdict"] == "not measured"
    rows = [line for line in done.stderr.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["0", "3"]
    assert {row.count("|") for row in rows} == {9}, "as many cells as the table in docs/performance.md has"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_is_missing_is_said_and_nothing_is_installed() -> None:
    done = _run()
    assert done.returncode == 2 and done.stdout == ""
    assert "gpu_check: torch sees no GPU" in done.stderr
    if Path("/usr/bin/python3").exists():
        bare = _run(python="/usr/bin/python3")
        assert bare.returncode == 2 and bare.stdout == ""
        assert "has no torch: run this with a Python that has it" in bare.stderr or "no GPU" in bare.stderr


def test_the_large_model_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.machinery
    import importlib.util

    loader = importlib.machinery.SourceFileLoader("gpu_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    check = importlib.util.module_from_spec(spec)
    loader.exec_module(check)
    model = check.make_model(check.LARGE, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) >= 350_000_000
    assert check.PAIRS >= 30
