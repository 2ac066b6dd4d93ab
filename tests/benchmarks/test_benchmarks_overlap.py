"""The trace's command: a file that perfetto opens, a picture, a row a rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_it_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    out, svg = tmp_path / "step.json", tmp_path / "step.svg"
    argv = [sys.executable, "benchmarks/overlap.py", "--parameters", "tiny", "--out", str(out), "--svg", str(svg)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["rank", "0", "1"]
    assert "stage 3, 2 ranks, tiny parameters" in lines[3]
    events = json.loads(out.read_text())["traceEvents"]
    assert {"forward blocks.0", "backward blocks.1", "step"} <= {e["name"] for e in events if e["ph"] == "X"}
    shapes = ElementTree.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}rect")
    spans = sum(e["ph"] in "Xe" and e["pid"] == 0 for e in events)
    assert len(shapes) == 1 + spans


def test_what_overlaps_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import overlap

    span = overlap.Span
    assert overlap.covered([span("gather", "a", 0, 4), span("gather", "b", 2, 3), span("gather", "c", 6, 7)]) == 5
    assert overlap.covered([]) == 0
