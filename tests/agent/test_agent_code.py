"""The job's code arrives whole, stays what it was, and cannot leave its folder."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from agent_job import MakeJob

from launcher.agent import code
from launcher.contract.errors import Refused
from launcher.contract.launch import Node


def _bundle(path: Path, *members: tuple[str, bytes | str | None, bytes]) -> str:
    """Members are (name, content | link target | None, type)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type = kind
            if isinstance(content, bytes):
                member.size = len(content)
                member.mode = 0o755
                archive.addfile(member, io.BytesIO(content))
            else:
                member.linkname = content or ""
                archive.addfile(member)
    return str(path)


FILE, LINK, HARD, FOLDER = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


def test_ranks_work_in_their_code(job: MakeJob, tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "1.tar.gz", ("bin/hello", b"#!/bin/sh\necho hi from $PWD\n", FILE))
    one = job("bin/hello", code=bundle)
    assert one.run() == 0
    assert one.log(0) == f"hi from {one.spec.run_dir}/code\n".encode()


def test_one_node_unpacks_for_all_that_share(job: MakeJob, tmp_path: Path) -> None:
    bundle = _bundle(tmp_path / "1.tar.gz", ("word", b"shared\n", FILE))
    nodes = (Node("a", 1, address="127.0.0.1"), Node("b", 1, address="127.0.0.1"))
    one = job("cat", "word", code=bundle, nodes=nodes)
    one.agent("b")
    one.agent("a")
    assert [one.agents[n].wait(40) for n in "ab"] == [0, 0]
    assert one.log(0) == one.log(1) == b"shared\n"


def test_links_inside_stay_and_another_bundle_replaces(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    first = _bundle(
        tmp_path / "1.tar.gz", ("d", None, FOLDER), ("d/f", b"1", FILE), ("l", "d/f", LINK), ("h", "d/f", HARD)
    )
    folder = code.unpack(first, str(run))
    assert (folder / "l").is_symlink() and (folder / "l").read_bytes() == (folder / "h").read_bytes() == b"1"
    (folder / "mine").touch()
    code.unpack(first, str(run))
    assert (folder / "mine").exists()  # the same bundle is not unpacked again
    code.unpack(_bundle(tmp_path / "2.tar.gz", ("f", b"2", FILE)), str(run))
    assert [p.name for p in folder.iterdir()] == ["f"]


@pytest.mark.parametrize(
    "members",
    [
        [("../out", b"x", FILE)],
        [("/tmp/out", b"x", FILE)],
        [("a/../../out", b"x", FILE)],
        [("l", "/etc", LINK)],
        [("l", "../..", LINK)],
        [("d", "x", LINK), ("d/f", b"x", FILE)],
        [("p/q/r/s", "../../..", LINK), ("t", "p/q/r/s/../../..", LINK)],
        [("h", "../../secret", HARD)],
        [("dev", None, tarfile.CHRTYPE)],
        [("fifo", None, tarfile.FIFOTYPE)],
        [("f", b"1", FILE), ("f", b"2", FILE)],
    ],
)
def test_an_archive_that_would_leave_its_folder_is_refused(
    tmp_path: Path, members: list[tuple[str, bytes | str | None, bytes]]
) -> None:
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    with pytest.raises((Refused, OSError)):
        code.unpack(_bundle(tmp_path / "bad.tar.gz", *members), str(run))
    assert list(run.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.tar.gz", "deep", "secret"]


def test_a_broken_bundle_names_itself(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "broken.tar.gz").write_bytes(b"not a tar")
    one = job("true", code=str(tmp_path / "broken.tar.gz"))
    assert one.run() == 1
    failure = one.record().failure
    assert failure is not None and failure.kind == "start_failed" and "code" in failure.message
