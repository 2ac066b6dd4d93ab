"""What the command line says: usage errors, suggestions, help, and where each word goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def zerun(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One real command line in ``folder``, off a terminal."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ZERUN_")}
    return subprocess.run(
        [sys.executable, "-c", "from launcher.cli.main import main; main()", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["submti", "x"], "'submit'"), (["logs", "r", "--folow"], "--follow"), (["ckpt", "lss"], "'ls'")],
)
def test_a_typo_is_a_usage_error_with_a_suggestion(tmp_path: Path, typed: list[str], meant: str) -> None:
    done = zerun(*typed, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and meant.lower() in error
    assert hint.startswith("hint: zerun") and hint.endswith("--help")


@pytest.mark.parametrize("verb", ["diagnose", "compare", "bench", "drill", "top"])
def test_a_verb_that_is_not_built_does_not_exist(tmp_path: Path, verb: str) -> None:
    done = zerun(verb, folder=tmp_path)
    assert done.returncode == 2 and "No such command" in done.stderr


def test_a_group_alone_shows_its_verbs(tmp_path: Path) -> None:
    done = zerun("cluster", folder=tmp_path)
    assert done.returncode == 2 and "check" in done.stderr and done.stdout == ""


def test_help_is_data_and_neither_cut_nor_coloured(tmp_path: Path) -> None:
    done = zerun("--help", folder=tmp_path, COLUMNS="40", FORCE_COLOR="1")
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout and "..." not in done.stdout.replace("[ARGS]...", "")
    (line,) = [line for line in done.stdout.splitlines() if line.strip().startswith("resume")]
    assert "another number of ranks" in line


def test_version(tmp_path: Path) -> None:
    from launcher import __version__

    assert zerun("--version", folder=tmp_path).stdout == f"zerun {__version__}\n"


def test_no_run_yet(tmp_path: Path) -> None:
    done = zerun("status", "last", folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "error: there is no run in" in done.stderr and "hint: zerun submit" in done.stderr
    assert json.loads(zerun("ls", "--json", folder=tmp_path).stdout) == []


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    for verb in ("status", "logs", "cancel", "wait", "collect", "resume"):
        done = zerun(verb, "nothing-here", folder=tmp_path)
        assert done.returncode == 2, verb
        assert "no run 'nothing-here'" in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_flag_of_logs_says_what_is_accepted(tmp_path: Path) -> None:
    done = zerun("logs", "last", "--rank", "3-1", folder=tmp_path)
    assert done.returncode == 2
    assert "--rank '3-1'" in done.stderr and "hint: write 1-3" in done.stderr


def test_every_mistake_of_a_job_at_once_each_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nnodse: 2\nsteps: many\nprogram: {argv: [true]}\n")
    done = zerun("plan", "job.yaml", "--cluster", str(ROOT / "clusters/laptop.yaml"), folder=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if "job.yaml:" in line]
    assert len(lines) >= 2
    assert any("job.yaml:2:1: " in line and "nodes" in line for line in lines)
    assert any("job.yaml:3:" in line for line in lines)


def test_a_job_that_is_not_there(tmp_path: Path) -> None:
    done = zerun("render", "nowhere.yaml", "--cluster", "laptop", folder=tmp_path)
    assert done.returncode == 2 and "nowhere.yaml" in done.stderr and "Traceback" not in done.stderr


def test_an_unknown_cluster_names_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "mine.yaml").write_text((ROOT / "clusters/laptop.yaml").read_text())
    done = zerun("cluster", "show", "mien", folder=tmp_path)
    assert done.returncode == 2 and "mine" in done.stderr


def test_the_reader_may_go_away(tmp_path: Path) -> None:
    """``zerun … | head``: no traceback, nothing on stderr."""
    start = "from launcher.cli.main import main; main()"
    command = [sys.executable, "-c", start, "cluster", "show", "--json", "dgx2-25"]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert done.stderr == "" and done.returncode == 141


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_crash(tmp_path: Path, closed: str) -> None:
    line = f"exec '{sys.executable}' -c 'from launcher.cli.main import main; main()' ls {closed}"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr
