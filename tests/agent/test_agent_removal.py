"""A run's files go only when nothing of it runs: without them nobody would find its processes again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launcher.agent.removal import remove
from launcher.contract.errors import Refused, UsageError


def a_run(folder: Path, token: str) -> Path:
    attempt = folder / "r-1" / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "launch.json").write_text(json.dumps({"token": token}))
    (attempt / "script").write_bytes(b"x" * 100)
    return folder / "r-1"


def test_what_a_killed_agent_left_is_ended_first(tmp_path: Path) -> None:
    run = a_run(tmp_path, "a-token-of-this-test")
    left = subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin", "ZERUN_TOKEN": "a-token-of-this-test"})
    try:
        with pytest.raises(UsageError, match="r-1 still has 1 running here") as told:
            remove({"run_dir": str(run), "really": True})
        assert told.value.hint is not None and "zerun cancel r-1" in told.value.hint and run.is_dir()
    finally:
        left.kill()
        left.wait()
    assert remove({"run_dir": str(run), "really": False})["bytes"] > 100 and run.is_dir()
    assert remove({"run_dir": str(run), "really": True})["removed"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["link", "other", "relative"])
def test_nothing_else_is_removed(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, "t")
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused):
        remove({"run_dir": "r-1" if what == "relative" else str(tmp_path / what), "really": True})
    assert run.is_dir() and (tmp_path / "other").is_dir()
