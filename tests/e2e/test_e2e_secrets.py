"""Secrets under Slurm: in the ranks and in one file, until the last attempt has ended; nowhere else, ever."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_site import PROGRAM, Site

VALUE = "planted-77b1,'\"$x é"
SCRIPT = """\
import hashlib, os, sys, time
print("secret", hashlib.sha256(os.environ["MY_TOKEN"].encode()).hexdigest(), flush=True)
if os.environ["ZERUN_ATTEMPT"] == "1":
    time.sleep(600)
"""


def places_of(value: bytes, *folders: Path) -> list[str]:
    """Files below ``folders`` that hold the value."""
    found = []
    for folder in folders:
        for at, _, names in os.walk(folder):
            paths = [Path(at, name) for name in names]
            found += [str(p) for p in paths if p.is_file() and not p.is_symlink() and value in p.read_bytes()]
    return found


@pytest.mark.full
def test_secrets_live_through_a_requeue_and_are_gone_at_the_end(
    slurm: Site, testbed: Any, wait_until: Callable[..., None]
) -> None:
    text = (slurm.folder / "clusters" / "uni.yaml").read_text()
    text = text.replace(
        "slurm: {partition: train}\nnodes: {names:", "pools: {spot: {partition: train, preemptible: true, nodes:"
    )
    slurm.write("clusters/uni.yaml", text.replace("memory_per_slot: 1GiB}", "memory_per_slot: 1GiB}}"))
    slurm.write("script.py", SCRIPT)
    slurm.write(
        "jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python", more="secrets: [MY_TOKEN]")
    )
    submit = ("submit", "jobs/p.yaml", "--cluster", "uni")
    refused = slurm.zerun(*submit, code=2)
    assert "MY_TOKEN" in refused.stderr and refused.stdout == "" and not list(slurm.folder.glob("runs/p-*"))
    slurm.environment["MY_TOKEN"] = VALUE
    (slurm.folder / "notes.py").write_text(f"token = {VALUE}\n")
    assert "the value of the secret MY_TOKEN stands in notes.py" in slurm.zerun(*submit, "--dry-run").stderr
    (slurm.folder / "notes.py").unlink()
    run = slurm.zerun(*submit).stdout.strip()
    home = testbed.home() / "zerun"
    kept = home / ".secrets" / f"{run}.json"
    log = home / run / "attempts" / "1" / "logs" / "rank-00000.log"
    wait_until(lambda: log.is_file() and b"secret" in log.read_bytes(), 60, "the first attempt did not start")
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert places_of(b"planted-77b1", home, slurm.folder / "runs") == [str(kept)]
    for host in ("login", *testbed.nodes):
        assert not testbed.processes(host, "planted-77b1"), "in an argument list"
    job = slurm.json("status", run)["handle"]["data"]["job"]
    shown = testbed.exec("login", ["scontrol", "-o", "show", "job", job]).stdout
    shown += testbed.exec("login", ["sacct", "-P", "-o", "ALL", "-j", job]).stdout
    assert b"planted" not in shown and b"planted" not in slurm.zerun("status", run, "--json").stdout.encode()
    testbed.exec("login", ["scontrol", "requeue", job], user=None)

    def waits() -> bool:
        return testbed.exec("login", ["squeue", "-h", "-j", job, "-o", "%T"]).stdout.strip() == b"PENDING"

    wait_until(waits, 60, "Slurm did not queue it again")
    queued = slurm.json("status", run)
    assert queued["state"] == "queued" and "attempt 1 was ended by Slurm, the next one waits" in queued["why"]
    assert kept.exists(), "the next attempt needs it"
    testbed.exec("login", ["scontrol", "update", f"jobid={job}", "starttime=now"], user=None)
    done = slurm.zerun("wait", run, timeout_s=200)
    assert done.returncode == 0
    assert hashlib.sha256(VALUE.encode()).hexdigest() in slurm.zerun("logs", run).stdout
    assert slurm.json("status", run)["attempt"] == 2
    slurm.zerun("collect", run)
    assert not kept.exists() and places_of(b"planted-77b1", home, slurm.folder / "runs") == []
    # One that waits in the queue has a file too, which cancel removes.
    submitted = slurm.zerun(*submit, "--set", "cluster.slurm.extra.begin=now+1hour")
    assert "already there" in submitted.stderr, "the same code is not sent twice"
    waiting = submitted.stdout.strip()
    assert (home / ".secrets" / f"{waiting}.json").exists()
    slurm.zerun("cancel", waiting, code=None)
    assert not (home / ".secrets" / f"{waiting}.json").exists()
