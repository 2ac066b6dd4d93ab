"""A run's files go only when nothing of it runs: without them nobody would find its processes again."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from launcher.agent.removal import remove
from launcher.contract.bundle import SUFFIX, File, Listing, is_content, keep_content
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


def shipped(runs: Path, *contents: bytes) -> str:
    """A tree of these files below ``runs``, its listing's name; all of it as old as a submit of last week."""
    files = [File(str(at), hashlib.sha256(data).hexdigest(), len(data)) for at, data in enumerate(contents)]
    for file, data in zip(files, contents, strict=True):
        keep_content(runs, file.digest, [data])
    data = Listing(tuple(files)).encode()
    name = hashlib.sha256(data).hexdigest() + SUFFIX
    (runs / ".blobs" / name).write_bytes(data)
    age(runs)
    return name


def age(runs: Path) -> None:
    for path in (runs / ".blobs").rglob("*"):
        os.utime(path, (time.time() - 7 * 86400,) * 2)


def has(runs: Path, *contents: bytes) -> list[bool]:
    return [is_content(runs, hashlib.sha256(data).hexdigest()) for data in contents]


def test_code_that_no_other_run_needs_goes_with_the_last_that_did(tmp_path: Path) -> None:
    both, mine, theirs = b"in both", b"mine alone", b"theirs alone"
    names = {"r-1": shipped(tmp_path, both, mine), "r-2": shipped(tmp_path, both, theirs)}
    (tmp_path / ".blobs/old.zip").write_bytes(b"runtime of r-1")
    (tmp_path / ".blobs/new.zip").write_bytes(b"runtime of both")
    age(tmp_path)
    for run, name in names.items():
        folder = tmp_path / run / "attempts/1"
        folder.mkdir(parents=True)
        launch = {"token": f"none-{run}", "code": f"{tmp_path}/.blobs/{name}", "runtime": f"{tmp_path}/.blobs/new.zip"}
        (folder / "launch.json").write_text(json.dumps(launch))
        (tmp_path / run / "run.json").write_text(json.dumps({"code": {"name": name}}))
    (tmp_path / "r-1/attempts/2").mkdir()  # an attempt that is being made
    (tmp_path / "a folder of mine").mkdir()
    request = {"run_dir": str(tmp_path / "r-1"), "really": False}
    # A journal that cannot be read may name anything: nothing goes.
    readable = (tmp_path / "r-2/attempts/1/launch.json").read_bytes()
    (tmp_path / "r-2/attempts/1/launch.json").write_bytes(b"{")
    assert remove(request)["shipped"] == {"bytes": 0, "files": 0}
    (tmp_path / "r-2/attempts/1/launch.json").write_bytes(readable)
    size = (tmp_path / ".blobs" / names["r-1"]).stat().st_size + len(mine) + len(b"runtime of r-1")
    assert remove(request)["shipped"] == {"bytes": size, "files": 3} and has(tmp_path, mine) == [True]
    # A submit is under way: what it sent, or found and needs, is young.
    os.utime(tmp_path / ".blobs/old.zip")
    assert remove({**request, "really": True})["shipped"] == {"bytes": size - len(b"runtime of r-1"), "files": 2}
    assert has(tmp_path, both, mine, theirs) == [True, False, True]
    assert sorted(path.name for path in (tmp_path / ".blobs").iterdir()) == sorted(
        ["contents", "new.zip", "old.zip", names["r-2"]]
    )
    remove({"run_dir": str(tmp_path / "r-2"), "really": True})
    left = [path.name for path in (tmp_path / ".blobs").rglob("*") if path.is_file()]
    assert left == ["old.zip"] and (tmp_path / "a folder of mine").is_dir()
