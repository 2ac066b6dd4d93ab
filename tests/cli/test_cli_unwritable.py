"""Folders that take nothing: the same kind of error from every verb, with the path and what to do next."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.contract.errors import Exit
from launcher.contract.unwritable import of_oserror, of_words
from launcher.transports.local import _problems
from launcher.transports.rsync import _problem

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nobody() -> list[str]:
    """Words before a command that may not write everywhere."""
    words = ["setpriv", "--reuid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    if words and subprocess.run([*words, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("this interpreter is root's alone")
    return words


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """pytest's own folders are one user's alone."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize("verb", ["submit", "render"])
def test_runs_that_may_not_be_written(open_folder: Path, nobody: list[str], verb: str) -> None:
    (open_folder / "runs").mkdir(mode=0o555)
    cluster, job = open_folder / "c.yaml", open_folder / "j.yaml"
    cluster.write_text(
        "name: c\nbackend: direct\nnodes: {names: localhost, slots: 1}\nagent_python: /usr/bin/python3\n"
    )
    job.write_text("name: j\ncode: {exclude: [runs]}\nprogram: {argv: [x]}\n")
    words = [*nobody, sys.executable, "-m", "launcher.cli.main", verb, str(job), "--cluster", str(cluster)]
    own = {"HOME": str(open_folder), "ZERUN_RUNS": str(open_folder / "runs"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **own})
    assert done.returncode == Exit.USAGE, done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ") and error.endswith(f"{open_folder}/runs/.blobs: Permission denied")
    assert hint.startswith("hint: `ls -ld` says whose that is") and "ZERUN_RUNS" in hint and "paths.runs" in hint


def test_whoever_writes_says_it_alike() -> None:
    for number, code in ((errno.EACCES, Exit.USAGE), (errno.EROFS, Exit.USAGE), (errno.EDQUOT, Exit.NO_SPACE)):
        told = of_oserror(OSError(number, os.strerror(number), "/runs/.a.json.17.part"), "node01")
        assert (told.message, told.exit_code) == (f"node01: /runs: {os.strerror(number)}", code) and told.hint
        said = of_words(f"mkdir: cannot create directory '/runs': {os.strerror(number)}", "/runs", "node01")
        assert said is not None and (said.exit_code, said.hint) == (code, told.hint)
        with pytest.raises(type(told), match="this machine: /runs/x: "), _problems("this machine"):
            raise OSError(number, os.strerror(number), "/runs/x")
    assert of_words("Connection reset by peer", "/runs", "node01") is None
    closed = (
        'rsync: [receiver] mkstemp "/runs/.f.xWq" failed: Permission denied (13)\nrsync error: some files (code 23)'
    )
    assert _problem("node01", 23, closed).exit_code == Exit.USAGE
    assert _problem("node01", 255, "alice@node01: Permission denied (publickey).").exit_code == Exit.UNREACHABLE
