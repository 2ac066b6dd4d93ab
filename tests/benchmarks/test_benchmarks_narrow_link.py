"""Two engines over a link that the kernel narrows: the counts are exact, and the link's own counters agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_stage_3_sends_its_third_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import narrow_link

    measured = narrow_link.measure("200mbit", "11M", 1)
    two, three = measured.counted[2], measured.counted[3]
    assert two["loss"] == three["loss"], "stages are bitwise equal, whatever lies between"
    assert two["volume_elements"] == 2 * two["padded"]
    assert three["volume_elements"] == 3 * three["padded"] - three["kept"] and three["kept"] > 0
    for stage, counts in measured.counted.items():
        assert counts["sent_bytes"] == counts["volume_elements"] * 4 // 2
        both = 2 * counts["sent_bytes"]
        assert both < measured.passed[stage] < 1.05 * both, "what the engine counts is what the link carried"
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"znl{os.getpid() % 250}a" not in left


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_it_tells_one_ratio_against_its_target() -> None:
    argv = [sys.executable, "benchmarks/narrow_link.py", "--parameters", "tiny", "--rounds", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [f["name"] for f in said["figures"]] == [
        "stage 3, a step, over stage 2",
        "stage 2, a step, over stage 2 that waits",
        "`zero2`, a step",
        "`zero3`, a step",
        "`zero2-waits`, a step",
    ]
    assert said["figures"][0]["at_most"] == pytest.approx(1.65) and said["figures"][0]["verdict"] == "too few rounds"
    assert len(said["samples"]["stage 2"]) == len(said["samples"]["stage 3"]) == 2
