"""Machines without a scheduler and without a shared disk: direct × SSH, checkpoints in pieces on /scratch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e_site import GPT, PROGRAM, Site, describe_rack
from test_e2e_slurm import TELL, VALUES, wait_for_checkpoint

from launcher.contract.weights import read_weights


def test_four_machines_then_resumed_on_two(rack: Site, testbed: Any, leftovers: Callable[[str], list[str]]) -> None:
    rack.write("jobs/g.yaml", GPT.format(name="g", nodes=4, stage=3, steps=4000, every=20))
    background = ("--set", "checkpoint.background=true")
    run = rack.zerun("submit", "jobs/g.yaml", "--cluster", "rack", *background).stdout.strip()
    wait_for_checkpoint(rack, run, 40)
    rack.zerun("cancel", run, code=None)
    assert rack.json("status", run)["state"] == "cancelled"
    assert leftovers(run) == []
    step = max(c["step"] for c in rack.json("ckpt", "ls", run) if c["whole"])
    said = rack.zerun("resume", run, "--nodes", "2", "--follow", "--set", f"steps={step + 40}")
    assert f"step {step}" in said.stderr
    assert rack.json("status", run)["state"] == "done"
    rack.zerun("collect", run)
    folder = rack.run_folder(run)
    assert len(list((folder / "attempts/1/logs").glob("rank-*.log"))) == 8
    manifest = json.loads(max((folder / "checkpoints").glob("*/manifest.json")).read_bytes())
    assert {s["node"] for s in manifest["shards"]} == {"node01", "node02"}
    rack.zerun("ckpt", "verify", run)
    # The weights alone of an older one: its shards come, one model stays.
    older = min(c["step"] for c in rack.json("ckpt", "ls", run) if c["whole"])
    got = rack.json("collect", run, "--checkpoint", str(older), "--weights")
    assert got["checkpoint"] is None and not (folder / f"checkpoints/step-{older:08d}").exists()
    weights = read_weights(folder / f"weights/step-{older:08d}")
    assert {n: s.shape for n, s in weights.items()} == {
        p["name"]: tuple(p["shape"]) for unit in manifest["layout"]["units"] for p in unit["parameters"]
    }
    told = rack.zerun("ckpt", "prune", run, "--remote", "--yes").stderr
    assert f"step {older}: whole" in told and "the newest whole one" in told
    assert [c["step"] for c in rack.json("ckpt", "ls", run)] == [manifest["step"]]


@pytest.mark.parametrize("user", ["tess", "nora"])
def test_values_arrive_byte_equal(site: Site, testbed: Any, node_python: str, user: str) -> None:
    describe_rack(site, testbed, node_python, user)
    site.write("script.py", TELL)
    env = {**VALUES, "NAMES": json.dumps(sorted(VALUES))}
    more = f"env: {json.dumps(env)}"
    site.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=more))
    run = site.zerun("submit", "jobs/p.yaml", "--cluster", "rack", "--follow").stdout.strip()
    want = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in VALUES.items()}
    lines = site.zerun("logs", run).stdout.splitlines()
    assert [json.loads(line.split("  ", 1)[1]) for line in lines if "{" in line] == [want] * 4


def test_the_run_outlives_the_laptop_and_is_found_again(rack: Site, leftovers: Callable[[str], list[str]]) -> None:
    rack.write("script.py", "import time\nfor i in range(1100):\n print('tick', i, flush=True)\n time.sleep(.25)\n")
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=3, time="5:00", python="python3", more=""))
    process = rack.start("submit", "jobs/p.yaml", "--cluster", "rack", "--follow")
    assert process.stdout is not None and process.stderr is not None
    run = process.stdout.readline().decode().strip()
    while b"tick 2" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()  # the laptop is gone, with no chance to say anything
    process.communicate()
    time.sleep(1)
    assert rack.json("status", run)["state"] == "running"
    end = time.monotonic() + 30  # a busy machine may have begun one rank and not yet the other
    while len(lines := rack.zerun("logs", run, "--rank", "0,4", "--tail", "2").stdout.splitlines()) < 4:
        assert time.monotonic() < end, lines
    assert {line.split("  ")[0] for line in lines} == {"0@node01", "4@node03"} and len(lines) == 4
    rack.zerun("cancel", run, code=None)
    assert leftovers(run) == []
    assert rack.json("status", run)["state"] == "cancelled"


def test_a_machine_that_loses_power(rack: Site, testbed: Any, leftovers: Callable[[str], list[str]]) -> None:
    rack.write("script.py", "import time\ntime.sleep(500)\n")
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=3, time="5:00", python="python3", more=""))
    run = rack.zerun("submit", "jobs/p.yaml", "--cluster", "rack").stdout.strip()
    testbed.kill("node03")
    try:
        end = time.monotonic() + 120  # of the others' 500 s
        while any(testbed.processes(h, run) for h in ("node01", "node02")):
            assert time.monotonic() < end, "the others were not stopped"
            time.sleep(0.5)
        state = rack.json("status", run)
        assert state["state"] in ("failed", "unknown")
        assert "node03" in json.dumps(state)
    finally:
        testbed.start("node03")


def test_the_machines_are_checked(rack: Site, testbed: Any) -> None:
    done = rack.zerun("cluster", "check", "rack", code=None)
    assert all(node in done.stdout for node in testbed.nodes), done.stdout + done.stderr
    testbed.cut("node02")
    try:
        cut = rack.zerun("cluster", "check", "rack", code=8)
        assert "node02" in cut.stdout + cut.stderr
    finally:
        testbed.mend("node02")
