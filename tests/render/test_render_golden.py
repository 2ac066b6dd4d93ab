"""Rendered scripts, byte for byte. ``ZERUN_UPDATE_GOLDEN=1 pytest tests/render`` writes them anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from render_cases import load, script

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "laptop-quickstart": ("quickstart", "laptop", []),
    "ssh-lab-ssh": ("ssh", "ssh-lab", []),
    "ssh-lab-stage3-one-node": ("stage3", "ssh-lab", []),
    "slurm-site-slurm": ("slurm", "slurm-site", []),
    "slurm-site-stage1-no-time": ("stage1", "slurm-site", []),
    "slurm-pools-stage3-spare": (
        "stage3",
        "slurm-pools",
        ["pool=spare", "nodes=2", "slots_per_node=all", "batch.micro=4"],
    ),
    "dgx2-25-stage3-all-nodes": (
        "stage3",
        "dgx2-25",
        ["nodes=25", "slots_per_node=all", "batch.micro=1", "batch.global=400", "time=1-12:00:00"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name: str) -> None:
    job, cluster, sets = CASES[name]
    rendered = script(*load(job, cluster, sets), run_dir=f"/home/ann/runs/{job}-1")
    golden = GOLDEN / f"{name}.sh"
    if os.environ.get("ZERUN_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_bytes(rendered)
    assert rendered.decode() == golden.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_shellcheck_finds_nothing(name: str) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([shellcheck, str(GOLDEN / f"{name}.sh")], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
