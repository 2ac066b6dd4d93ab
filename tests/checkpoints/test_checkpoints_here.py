"""Which of a program's own files need not come home again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.checkpoints.foreign import is_here

AT = 1_700_000_000.25


@pytest.mark.parametrize(
    ("kept", "there", "same"),
    [
        (AT, AT, True),
        (float(int(AT)), AT, True),  # by SFTP whole seconds come along
        (AT, AT + 0.5, False),  # written anew within the second
        (AT, AT + 1.5, False),
        (float(int(AT)), AT + 1.0, False),
        (AT, float(int(AT)), False),
    ],
)
def test_a_file_of_equal_size_is_here_when_its_time_is(tmp_path: Path, kept: float, there: float, same: bool) -> None:
    (tmp_path / "latest.txt").write_bytes(b"step 17")
    os.utime(tmp_path / "latest.txt", (kept, kept))
    assert is_here(tmp_path, "latest.txt", {"bytes": 7, "modified": there}) is same
    assert not is_here(tmp_path, "latest.txt", {"bytes": 8, "modified": there})
