"""What travels to the nodes runs on Python 3.9 with nothing installed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from agent_job import PACKAGE, MakeJob, lives, until

from launcher.contract.launch import Node

ROOMS = ("contract", "agent")


def _python39() -> str | None:
    versions = sorted(
        (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob("3.9.*/bin/python")
    )
    return str(versions[-1]) if versions else shutil.which("python3.9")


def _sources() -> list[Path]:
    return [PACKAGE / "__init__.py", *(p for room in ROOMS for p in sorted((PACKAGE / room).glob("*.py")))]


@pytest.mark.parametrize("path", _sources(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_syntax_and_imports(path: Path) -> None:
    tree = ast.parse(path.read_bytes(), feature_version=(3, 9))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(str(node.module).split(".")[0])
        assert not isinstance(node, ast.Match)
        if isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            assert not (called == "zip" and "strict" in names), f"{path.name}:{node.lineno}: zip(strict=)"
            assert not (called == "dataclass" and names & {"slots", "kw_only"}), f"{path.name}:{node.lineno}"
    assert imported <= set(sys.stdlib_module_names), imported - set(sys.stdlib_module_names)


def test_vermin_agrees() -> None:
    vermin = shutil.which("vermin", path=str(Path(sys.executable).parent))
    if vermin is None:
        pytest.skip("vermin is not installed")
    found = subprocess.run(
        [vermin, "-q", "--no-tips", "--eval-annotations", "-t=3.9-", *map(str, _sources())],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout


def test_a_job_on_python39(job: MakeJob) -> None:
    python = _python39()
    if python is None:
        pytest.skip("no Python 3.9 here")
    nodes = (Node("a", 2, address="127.0.0.1"), Node("b", 1, address="127.0.0.1"))
    one = job(
        "sh", "-c", "test $RANK = 2 && exit 7; exec sleep 60", nodes=nodes, setup="export A=1", agent_python=python
    )
    one.python = python
    for node in nodes:
        assert one.verb("start", node=node.name)[0] in (0, 1)  # 1: it failed while `start` looked on
    until(lambda: not any(lives(owner.pid) for owner in one.owners()))
    failure = one.record("a").failure
    assert failure is not None and (failure.rank, failure.exit_code) == (2, 7)
