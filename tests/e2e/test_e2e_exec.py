"""``zerun exec``: the same command beside the ranks under Slurm and on machines without a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_site import PROGRAM, Site

SCRIPT = """\
import os, pathlib, time
pathlib.Path(f"{os.environ['ZERUN_RUN_DIR']}/up-{os.environ['RANK']}").touch()
while not os.path.exists(os.environ["ZERUN_STOP_FILE"]):
    time.sleep(0.1)
"""
SHOW = "echo $ZERUN_NODE $RANK $FROM_SETUP ${PLANTED-none}; echo warn >&2; pwd; printf half; exit 3"


def _running(site: Site, cluster: str, testbed: Any, wait_until: Callable[..., None]) -> str:
    path = site.folder / f"clusters/{cluster}.yaml"
    path.write_text(path.read_text() + "setup: export FROM_SETUP=loaded\n")
    site.environment["PLANTED"] = "hush"
    site.write("script.py", SCRIPT)
    job = site.write(
        "jobs/wait.yaml",
        PROGRAM.format(name="wait", nodes=2, time="2:00", python="/usr/bin/python3", more="secrets: [PLANTED]"),
    )
    run = site.zerun("submit", str(job), "--cluster", cluster).stdout.strip()
    folder = "/scratch/trainer/zerun" if cluster == "rack" else "/home/trainer/zerun"

    def up() -> bool:
        counts = [
            testbed.exec(node, ["sh", "-c", f"ls {folder}/{run}/up-* 2>/dev/null | wc -l"]).stdout
            for node in ("node01", "node02")
        ]
        return counts == ([b"2\n"] * 2 if cluster == "rack" else [b"4\n"] * 2)

    wait_until(up, 60, "the ranks did not come up")
    return run


def _hold(site: Site, run: str, testbed: Any, leftovers: Callable[[str], list[str]]) -> None:
    """Everything that exec promises, on any backend."""
    both = site.zerun("exec", run, "--", "sh", "-c", SHOW, code=3)
    said = sorted(both.stdout.splitlines())
    assert [line for line in said if "loaded" in line] == [
        "node01: node01 0 loaded none",
        "node02: node02 2 loaded none",
    ]
    assert [line for line in said if line.endswith("half")] == ["node01: half", "node02: half"]
    assert all(f"{run}/code" in line for line in said if ": /" in line) and both.stdout.count("/code") == 2
    assert sorted(both.stderr.splitlines()) == ["node01: warn", "node02: warn"]
    one = site.zerun("exec", run, "--node", "node02", "--", "sh", "-c", "echo $RANK; kill -9 $$", code=137)
    assert one.stdout == "2\n"
    assert site.zerun("exec", run, "--rank", "3", "--", "printenv", "RANK").stdout == "3\n"
    assert "command not found" in site.zerun("exec", run, "--rank", "0", "--", "no-such-thing", code=127).stderr
    assert (
        "does not run on node01"
        in site.zerun("exec", run, "--rank", "3", "--node", "node01", "--", "true", code=2).stderr
    )
    big = site.zerun("exec", run, "--node", "node01", "--", "seq", "20000").stdout
    assert big == "".join(f"{i}\n" for i in range(1, 20001))
    # Whoever leaves takes the command along.
    left = site.start("exec", run, "--node", "node01", "--", "sh", "-c", "echo on; exec sleep 4321")
    assert left.stdout is not None and left.stdout.readline() == b"on\n"
    left.kill()
    left.communicate()
    assert leftovers("sleep 4321") == [] or _gone(leftovers)
    site.zerun("cancel", run)
    assert "there is no rank" in site.zerun("exec", run, "--", "true", code=2).stderr


def _gone(leftovers: Callable[[str], list[str]]) -> bool:
    import time

    end = time.monotonic() + 20
    while leftovers("sleep 4321"):
        if time.monotonic() > end:
            raise AssertionError(leftovers("sleep 4321"))
        time.sleep(0.3)
    return True


@pytest.mark.full
def test_beside_the_ranks_of_a_slurm_job(
    slurm: Site, testbed: Any, wait_until: Callable[..., None], leftovers: Callable[[str], list[str]]
) -> None:
    _hold(slurm, _running(slurm, "uni", testbed, wait_until), testbed, leftovers)


@pytest.mark.full
def test_beside_the_ranks_of_machines_without_a_scheduler(
    rack: Site, testbed: Any, wait_until: Callable[..., None], leftovers: Callable[[str], list[str]]
) -> None:
    _hold(rack, _running(rack, "rack", testbed, wait_until), testbed, leftovers)


@pytest.mark.full
def test_beside_the_ranks_on_a_laptop(laptop: Site, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    laptop.write("script.py", SCRIPT)
    job = laptop.write("jobs/wait.yaml", PROGRAM.format(name="wait", nodes=1, time="2:00", python="python3", more=""))
    run = laptop.zerun("submit", str(job), "--cluster", "here").stdout.strip()
    wait_until(lambda: len(list(laptop.run_folder(run).glob("up-*"))) == 2, 30, "the ranks did not come up")
    done = laptop.zerun("exec", run, "--rank", "1", "--", "sh", "-c", "echo $RANK $WORLD_SIZE; exit 9", code=9)
    assert done.stdout == "1 2\n"
    laptop.zerun("cancel", run)
    laptop.zerun("exec", run, "--", "true", code=2)
