"""A disk that the ranks fill: how they ended is told all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import MakeJob

from launcher.agent.digest import of_file
from launcher.contract.data_files import DataFile
from launcher.contract.launch import Node
from launcher.runs.diagnosis import first_cause


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "small", folder]).returncode:
        pytest.skip("a full disk needs a tmpfs of our own (root)")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("code", [0, 7])
def test_the_last_word_is_written_though_the_ranks_filled_the_disk(small_disk: Path, job: MakeJob, code: int) -> None:
    fill = f"import sys; sys.stdout.buffer.write(b'x' * 3_000_000); sys.stdout.flush(); sys.exit({code})"
    one = job(sys.executable, "-c", fill, nodes=(Node("localhost", 2),))
    assert one.run() == code
    record = one.record()
    assert record.state == "ended" and code in [rank.exit_code for rank in record.ranks]
    assert (record.failure is not None) == bool(code)
    assert any(rank.log_bytes_lost for rank in record.ranks)


def test_data_that_have_no_room_end_the_attempt_before_it_begins(
    small_disk: Path, job: MakeJob, tmp_path: Path
) -> None:
    tokens = tmp_path / "train.bin"
    tokens.write_bytes(b"x" * 5000)
    file = DataFile("tokens", str(tokens), 5000, str(of_file(str(tokens))))
    one = job(sys.executable, "-c", "pass", stage=(file,), node_local=str(small_disk / "local"))
    assert one.run() != 0
    failure = one.record().failure
    assert failure is not None and failure.kind == "no_space" and "are to be staged to" in failure.message
    cause = first_cause([one.record()], None, {})
    assert cause is not None and cause.no_space and cause.rank is None
