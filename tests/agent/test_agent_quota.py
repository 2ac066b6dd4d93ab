"""What may still be written: the filesystem's word, and a quota's where it is the smaller."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.agent import quota
from launcher.agent.quota import Quota, parse_lfs, parse_quota

NFS = """\
Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
nfs1:/export/home 48000000* 47000000 50000000 1700000000 120000 0 200000 0
/dev/sdb1 10 0 0 0 3 0 0 0
"""


def test_quotas_are_read_in_kib_and_the_smaller_limit_counts() -> None:
    assert parse_quota(NFS, "nfs1:/export/home") == Quota(48_000_000 * 1024, 47_000_000 * 1024, 120_000, 200_000)
    assert parse_quota(NFS, "/dev/sdb1") is None, "no limit is set there"
    assert parse_quota(NFS, "elsewhere") is None and parse_quota("", "x") is None
    one_line = "/lustre/scratch 123456 0 1000000 - 5678 0 10000 -"
    assert parse_lfs(one_line) == Quota(123456 * 1024, 1000000 * 1024, 5678, 10000)
    assert parse_lfs("/a/very/long/path\n        123456* 0 1000 - 1* 0 1 7d") == Quota(123456 * 1024, 1024000, 1, 1)
    assert parse_lfs("quotas are not enabled.") is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = "size=1m,nr_inodes=50"
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", folder]).returncode:
        pytest.skip("a small disk needs a tmpfs of our own (root)")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_folder_that_is_not_there_yet_is_told_by_the_disk_it_will_lie_on(small_disk: Path) -> None:
    (small_disk / "x").write_bytes(bytes(300_000))
    request = {"paths": {"runs": f"{small_disk}/a/b", "odd": "$NOT_SET_HERE/x", "home": "~"}}
    answer = quota.left(request)
    runs = answer["runs"]
    assert (runs["there"], runs["of_bytes"], runs["of_files"], runs["by"]) == (False, 2**20, 50, "filesystem")
    assert 600_000 < runs["free_bytes"] < 760_000 and runs["free_files"] == 48
    assert "NOT_SET_HERE" in answer["odd"]["problem"] and answer["home"]["path"] == os.path.expanduser("~")


def test_a_quota_that_leaves_less_than_the_disk_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is a stand-in that prints what Lustre's does; everything else is as it is."""
    (tmp_path / "lfs").write_text("#!/bin/sh\necho '/lustre 900 0 1000 - 95 0 100 -'\n")
    (tmp_path / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(quota, "_mount_of", lambda folder: ("lustre", "mds:/lustre"))
    told = quota.of_path(str(tmp_path))
    assert (told["free_bytes"], told["free_files"], told["by"]) == (100 * 1024, 5, "lfs quota")
