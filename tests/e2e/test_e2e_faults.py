"""What an unlucky user meets on this very machine, through the command line."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from e2e_site import PROGRAM, Site

DAEMON = """\
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("daemon-%s" % os.environ["RANK"], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
time.sleep(600)
"""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_cancel_ends_what_a_killed_agent_left_behind(laptop: Site, wait_until: Callable[..., None]) -> None:
    """A kernel that kills the agent takes its ranks along, but not what they had put into sessions of their own."""
    laptop.write("script.py", DAEMON)
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    run = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here").stdout.strip()
    folder = laptop.run_folder(run)
    marks = [folder / "code" / f"daemon-{rank}" for rank in range(2)]
    wait_until(lambda: all(m.exists() and m.read_text() for m in marks), 30, "the daemons did not come up")
    daemons = [int(mark.read_text()) for mark in marks]
    agent = json.loads((folder / "attempts/1/nodes/localhost.json").read_text())["agent"]["pid"]
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: laptop.json("status", run)["state"] == "failed", 30, "the agent's death was not seen")
    assert all(map(_lives, daemons))
    assert laptop.zerun("cancel", run).stdout.startswith(f"{run}  failed")
    assert not any(map(_lives, daemons))


def test_a_submit_that_is_interrupted_names_the_run_that_may_be_there(laptop: Site) -> None:
    laptop.write("script.py", "import time\ntime.sleep(600)\n")
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    process = laptop.start("submit", "jobs/p.yaml", "--cluster", "here", "--set", "cluster.setup=sleep 30")
    while not list((laptop.folder / "runs").glob("p-*/attempts/1/nodes/localhost.json")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    (run,) = (path.name for path in (laptop.folder / "runs").glob("p-*"))
    assert process.returncode == 130 and out == b"" and f"zerun cancel {run}".encode() in err, err
    assert laptop.zerun("cancel", run).stdout.startswith(f"{run}  cancelled")


def test_a_run_that_is_being_submitted_is_no_failed_one(laptop: Site) -> None:
    """Another shell that looks in the middle of a submit must not write down that it failed."""
    laptop.write("script.py", "import time\ntime.sleep(600)\n")
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more="env: {A: b}"))
    slow = ("--set", "cluster.setup=sleep 3", "--set", "cluster.leases=false")  # both runs on the same slots
    laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", *slow)
    submitting = laptop.start("submit", "jobs/p.yaml", "--cluster", "here", *slow)
    states = set()
    while submitting.poll() is None:
        states |= {row["state"] for row in laptop.json("ls")}
        time.sleep(0.05)
    out, _ = submitting.communicate()
    assert states <= {"submitting", "running", "unknown"}, states
    for row in laptop.json("ls"):
        assert row["state"] == "running"
        laptop.zerun("cancel", row["run"])
    assert out.decode().strip() in {row["run"] for row in laptop.json("ls")}


def test_what_was_shipped_and_got_damaged_is_shipped_again(laptop: Site) -> None:
    """A power cut can leave an empty file under a digest's name; no later run may die of it."""
    laptop.write("script.py", "print('well')\n")
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    first = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow").stdout.strip()
    blobs = [path for path in (laptop.folder / "runs" / ".blobs").rglob("*") if path.is_file()]
    assert sorted(path.suffix for path in blobs if path.suffix) == [".tree", ".zip"] and len(blobs) > 3
    for damage in (b"", b"junk"):
        for blob in blobs:
            blob.write_bytes(damage)
        assert laptop.json("status", first)["state"] == "done"
        second = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow").stdout.strip()
        if not damage:
            laptop.zerun("rm", second, "--yes")
    for path in (laptop.folder / "runs" / ".blobs").rglob("*"):
        os.utime(path, (1e9, 1e9))
    laptop.zerun("rm", second, "--yes")
    assert all(path.exists() for path in blobs if path.suffix != ".zip"), "the first run has the same code"
    gone = laptop.zerun("rm", first, "--yes").stderr
    assert "of shipped code that no run needs any more" in gone, gone
    left = [path.suffix for path in (laptop.folder / "runs" / ".blobs").rglob("*") if path.is_file()]
    assert set(left) <= {".zip"}
