"""A disk that the ranks fill: how they ended is told all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import MakeJob

from launcher.contract.launch import Node


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
