"""Logs: bytes unchanged, arrival times beside them, and a rank that never waits for a disk."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import MakeJob, until

from launcher.agent.capture import Capture
from launcher.agent.loop import Loop
from launcher.contract.launch import Node


def test_any_bytes_are_stored_unchanged(job: MakeJob, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(300_000) + b"\xff\xfe\r\r\n\x1b[31m \xc3 no newline at the end"
    (tmp_path / "data").write_bytes(data)
    one = job("cat", str(tmp_path / "data"))
    assert one.run() == 0
    assert one.log(0) == data


def test_stdout_and_stderr_keep_their_order(job: MakeJob) -> None:
    one = job("sh", "-c", "for i in 1 2 3; do echo out $i; echo err $i >&2; done")
    assert one.run() == 0
    assert one.log(0) == b"".join(b"out %d\nerr %d\n" % (i, i) for i in (1, 2, 3))


def test_arrival_times(job: MakeJob) -> None:
    one = job(
        "sh", "-c", "date +%s.%N; sleep 1.5; for i in $(seq 2000); do echo 12345678; done; sleep 1.5; date +%s.%N"
    )
    assert one.run() == 0
    text = (one.folder / "logs" / "rank-00000.times").read_text()
    times = [(int(a), float(b)) for a, b in (line.split() for line in text.splitlines())]
    log = one.log(0)
    first, last = float(log.split()[0]), float(log.split()[-1])
    assert times[0][0] == 0 and abs(times[0][1] - first) < 1.2
    assert log[times[-1][0] :] == log.splitlines(keepends=True)[-1] and abs(times[-1][1] - last) < 1.2
    assert times == sorted(times)
    assert all(b[1] - a[1] >= 0.0199 for a, b in itertools.pairwise(times))


def test_an_orphan_that_holds_the_pipe_does_not_hold_the_agent(job: MakeJob) -> None:
    one = job("sh", "-c", "setsid sleep 300 & echo over")
    begun = time.monotonic()
    assert one.run() == 0
    assert time.monotonic() - begun < 30
    assert one.log(0) == b"over\n"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tiny", folder]).returncode:
        pytest.skip("a full disk needs a tmpfs of our own (root)")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_the_log_and_not_the_rank(job: MakeJob, tiny_disk: Path) -> None:
    write = "import sys; sys.stdout.buffer.write(b'x' * 2_000_000); sys.stdout.flush(); print('over', file=sys.stderr)"
    one = job(sys.executable, "-c", write, nodes=(Node("localhost", 1),))
    (one.folder / "logs").mkdir()
    log = tiny_disk / "log"
    (one.folder / "logs" / "rank-00000.log").symlink_to(log)
    assert one.run() == 0
    kept = log.read_bytes()
    lost = one.record().ranks[0].log_bytes_lost
    assert 0 < len(kept) <= 64 * 1024 and kept == b"x" * len(kept)
    assert len(kept) + lost == 2_000_005


def test_a_log_that_takes_no_more_is_counted_without_root(tmp_path: Path) -> None:
    loop = Loop()
    try:
        capture = Capture(loop, Path("/dev/full"), tmp_path / "times")
        writer = os.dup(capture.write_end)
        capture.started()
        os.write(writer, b"x" * 1000)
        loop.after(0.2, loop.stop)
        loop.run()
        os.close(writer)
        capture.close()
        assert capture.lost_bytes == 1000
    finally:
        loop.close()


def test_a_record_and_agent_log_on_a_full_disk_stop_nobody(job: MakeJob, tiny_disk: Path) -> None:
    (tiny_disk / "nodes").mkdir()
    (tiny_disk / "nodes" / "filler").write_bytes(b"")
    one = job("sh", "-c", f"sleep 1; echo over > {tiny_disk.parent}/done")
    (one.folder / "nodes").symlink_to(tiny_disk / "nodes")
    agent = one.agent()
    until(lambda: one.state() == "running")
    with open(tiny_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(b"x" * 4096)
    assert agent.wait(40) == 0
    assert (tiny_disk.parent / "done").exists()
