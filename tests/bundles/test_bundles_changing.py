"""A tree that changes while it is packed, and stores in which something else lies where contents belong."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_bundles_shipment import LIMIT, Laptop

from launcher.agent import expand
from launcher.bundles import code, code_bundle
from launcher.contract.errors import NoSpace, Refused, UsageError


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    made = Laptop(tmp_path)
    for name in ("a.py", "b.py"):
        (made.tree / name).write_text(name)
    return made


def changing(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """``change`` happens after the files were found, before they are read."""
    find = code.find

    def found(*args: Any, **more: Any) -> Any:
        tree = find(*args, **more)
        change()
        return tree

    monkeypatch.setattr(code, "find", found)


def test_a_file_that_is_gone_when_its_turn_comes_does_not_travel(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing(monkeypatch, (laptop.tree / "a.py").unlink)
    bundle = code_bundle(laptop.tree, limit=LIMIT)
    assert (bundle.num_files, set(bundle.files), len(bundle.contents)) == (1, {"b.py"}, 1)


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_what_takes_a_files_place_is_told_and_neither_followed_nor_waited_for(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = laptop.tree / "a.py"
    make = {"link": lambda: path.symlink_to("/etc/hostname"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}
    changing(monkeypatch, lambda: (path.unlink(), make[what]()))
    with pytest.raises(UsageError, match=r"a\.py became .* while the code was read"):
        code_bundle(laptop.tree, limit=LIMIT)


def test_a_folder_that_cannot_be_looked_into_is_said(laptop: Laptop) -> None:
    at = os.open(laptop.tree, os.O_RDONLY)
    for _ in range(18):  # deeper than a path may be long
        os.mkdir("d" * 240, dir_fd=at)
        below = os.open("d" * 240, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("lost.py", os.O_CREAT, dir_fd=at))
    os.close(at)
    assert ["cannot be looked into" in note for note in code_bundle(laptop.tree, limit=LIMIT).notes] == [True]
    (laptop.tree / ".zerunignore").write_text("dddd*/\n")
    assert code_bundle(laptop.tree, limit=LIMIT).notes == ()


@pytest.mark.parametrize("where", ["home", "place"])
def test_a_folder_in_a_contents_place_is_named(laptop: Laptop, where: str) -> None:
    (path,) = [laptop.path(b"a.py")]
    path = getattr(laptop, where) / path.relative_to(laptop.place)
    (path / "of somebody's").mkdir(parents=True)
    with pytest.raises(Refused, match=f"{path} is a folder"):
        laptop.submit()
    (path / "of somebody's").rmdir()
    path.rmdir()
    _, bundle, _ = laptop.submit()
    assert laptop.laid_out(bundle.name)["a.py"] == b"a.py"


def test_what_a_submit_takes_up_cannot_become_old_before_its_run_is_there(laptop: Laptop) -> None:
    """A removal passes over what is younger than a day: what is hardly younger has to be given a new date."""
    _, bundle, _ = laptop.submit()
    listing = [folder / ".blobs" / bundle.name for folder in (laptop.home, laptop.place)]
    stored = [*laptop.home.glob(".blobs/contents/??/*"), *laptop.place.glob(".blobs/contents/??/*"), listing[1]]
    assert len(stored) == 5
    for path in stored:
        os.utime(path, (time.time() - 86390,) * 2)
    laptop.submit()
    assert [path.name for path in stored if time.time() - path.stat().st_mtime > 3600] == []


def test_what_a_killed_submit_left_half_at_home_goes_with_the_next(laptop: Laptop) -> None:
    laptop.submit()
    half = laptop.home / ".blobs/contents/parts/tmpkilled"
    half.write_bytes(b"half")
    laptop.submit()
    assert half.exists()  # another may be writing it
    os.utime(half, (time.time() - 2 * 86400,) * 2)
    laptop.submit()
    assert not half.exists()


def test_equal_names_but_for_case_or_composition_are_different_files(laptop: Laptop) -> None:
    names = {"A.py": b"1", "é.py": b"2", "e\u0301.py": b"3", "new\nline.py": b"4", "n" * 255: b"5"}
    for name, data in names.items():
        (laptop.tree / name).write_bytes(data)
    _, bundle, _ = laptop.submit()
    assert json.loads(bundle.data)["files"]
    assert {**names, "a.py": b"a.py", "b.py": b"b.py"} == laptop.laid_out(bundle.name)


def test_what_a_removal_takes_during_the_look_is_sent_again(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had found it old before it was given a new date."""
    laptop.submit()
    path, renew = laptop.path(b"a.py"), os.utime
    os.utime(path, (1, 1))

    def renewed(file: str, *more: Any) -> None:
        renew(file, *more)
        os.unlink(file)

    monkeypatch.setattr(os, "utime", renewed)
    names = {"blobs": [], "contents": [path.name, laptop.path(b"b.py").name]}
    assert expand.look({"runs": str(laptop.place), "literal": True, **names})["lacking"] == [path.name]


def test_a_full_disk_is_named_and_nothing_half_stays(laptop: Laptop) -> None:
    (laptop.tree / "big.bin").write_bytes(os.urandom(3_000_000))
    laptop.place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "small", laptop.place]).returncode:
        pytest.skip("a full disk needs a tmpfs of our own (root)")
    try:
        with pytest.raises(NoSpace, match=f"no room for the job's code below {laptop.place}"):
            laptop.submit()
        assert [path for path in laptop.place.rglob("*") if "parts" in path.parts and path.is_file()] == []
        (laptop.tree / "big.bin").unlink()
        _, bundle, _ = laptop.submit()
        assert set(laptop.laid_out(bundle.name)) == {"a.py", "b.py"}
    finally:
        subprocess.run(["umount", laptop.place], check=True)
