"""The laptop needs no torch, and ``zerun --help`` loads next to nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROBE = """
import json, sys
sys.argv[0] = "zerun"
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors"):
            raise AssertionError("imported " + name)
        return None
sys.meta_path.insert(0, Refuse())
from launcher.cli.main import run
code = run(sys.argv[1:])
sys.stdout.flush()
print("MODULES " + json.dumps([code, sorted({m.split(".")[0] for m in sys.modules})]), file=sys.stderr)
"""


def probe(*arguments: str, runs: Path) -> tuple[int, set[str], str]:
    """(exit code, top-level modules loaded, stdout) of one command line, where torch cannot be imported."""
    environment = {**os.environ, "ZERUN_RUNS": str(runs)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    last = [line for line in done.stderr.splitlines() if line.startswith("MODULES ")]
    assert last, done.stderr
    code, modules = json.loads(last[-1].removeprefix("MODULES "))
    return code, set(modules), done.stdout


def test_help_loads_typer_and_nothing_heavy(tmp_path: Path) -> None:
    code, modules, text = probe("--help", runs=tmp_path)
    assert code == 0 and "submit" in text
    heavy = {"pydantic", "ruamel", "jinja2", "fabric", "paramiko", "rich", "numpy", "asyncio", "concurrent"}
    assert not heavy & modules


def test_a_dry_run_needs_no_torch(tmp_path: Path) -> None:
    code, modules, script = probe(
        "submit", "jobs/quickstart.yaml", "--cluster", "laptop", "--dry-run", runs=tmp_path / "runs"
    )
    assert code == 0 and script
    assert "torch" not in modules


def test_the_public_names_are_found_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from zerun import app; app.App; assert 'torch' not in sys.modules"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
