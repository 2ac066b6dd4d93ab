"""Machines without a scheduler, shared by several people: slots are held, refused by name, and waited for."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e_site import GPT, PROGRAM, Site
from test_e2e_slurm import wait_for_checkpoint

from launcher.app import App
from launcher.attempts import former
from launcher.contract.errors import Unreachable

UNLIKE = """\
name: rack
backend: direct
nodes:
  - {{name: node01, devices: [0, 1, 3, 5]}}
  - {{name: node02, slots: 2}}
  - {{name: node03, slots: 2}}
ssh: {{config: {config}}}
device: {{kind: {kind}}}
paths: {{runs: /scratch/$USER/zerun, shared: false}}
python: {python}
agent_python: /usr/bin/python3
env: {{OMP_NUM_THREADS: '1'}}
"""
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=index,uuid) printf '0, GPU-aa\\n1, GPU-bb\\n' ;;
  --query-compute-apps=*) printf 'GPU-bb, PID, /usr/bin/sleep\\n' ;;
esac
"""


def describe(site: Site, testbed: Any, python: str, user: str, kind: str = "cpu") -> None:
    text = UNLIKE.format(config=testbed.ssh_config_of(user), python=python, kind=kind)
    site.write(f"clusters/{user}.yaml", text.replace("name: rack", f"name: {user}", 1))


def test_slots_that_others_hold(
    site: Site, testbed: Any, node_python: str, leftovers: Callable[[str], list[str]]
) -> None:
    for user in ("trainer", "nora"):
        describe(site, testbed, node_python, user)
    site.write("script.py", "import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    job = PROGRAM.format(name="p", nodes=2, time="30:00", python="python3", more="").replace("_node: 2", "_node: all")
    site.write("jobs/long.yaml", job)
    site.write("short.py", "import os\nprint(*map(os.environ.get, ('LOCAL_WORLD_SIZE', 'GROUP_RANK', 'LOCAL_RANK')))\n")
    site.write("jobs/short.yaml", job.replace("nodes: 2", "nodes: 3").replace("script.py", "short.py"))
    held = site.zerun("submit", "jobs/long.yaml", "--cluster", "trainer").stdout.strip()

    # Another user's run needs nodes 1 to 3: refused as a whole, also on node03 which is free, and nothing is left.
    there = ["sh", "-c", "ls /scratch/nora/zerun 2>/dev/null"]
    before = testbed.exec("node03", there, user=None, check=False).stdout.split()
    began = time.monotonic()
    refused = site.zerun("submit", "jobs/short.yaml", "--cluster", "nora", code=5)
    assert time.monotonic() - began < 120 and not refused.stdout
    for node, slots in (("node01", "slot 0, 1, 3, 5"), ("node02", "slot 0, 1")):
        assert (
            f"node {node}: " in refused.stderr
            and f"0 of {len(slots.split()) - 1} are free: {slots} held by run " in (refused.stderr)
        ), refused.stderr
    assert refused.stderr.count(f"run {held} of trainer since 20") == 2 and "node03" not in refused.stderr
    assert "--wait-free" in refused.stderr
    assert testbed.exec("node03", there, user=None, check=False).stdout.split() == before
    check = {f["name"]: f for f in site.json("cluster", "check", "nora", code=0)}
    assert check["node01"]["facts"]["leased"] == [f"0,1,3,5 by {h}" for h in [held_by(check, "node01")]]
    assert (
        held_by(check, "node01").startswith(f"run {held} of trainer since 20")
        and not check["node03"]["facts"]["leased"]
    )

    # Waiting: Ctrl-C leaves nothing, a limit is kept, and whoever waits long enough is started.
    waiting = site.start("submit", "jobs/short.yaml", "--cluster", "nora", "--wait-free")
    assert waiting.stderr is not None and b"waiting for node node01" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    late = site.zerun("submit", "jobs/short.yaml", "--cluster", "nora", "--wait-free", "1s", code=5)
    assert "not free within 1 s" in late.stderr
    assert [r["run"] for r in site.json("ls")] == [held]
    waiting = site.start("submit", "jobs/short.yaml", "--cluster", "nora", "--wait-free", "--follow")
    assert waiting.stderr is not None and b"waiting for node node01" in waiting.stderr.readline()
    site.zerun("cancel", held, code=None)
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, err.decode()
    lines = site.zerun("logs", out.decode().strip()).stdout.splitlines()
    seen = sorted(tuple(line.split("  ", 1)[1].split()) for line in lines)
    want = [("4", "0", str(i)) for i in range(4)] + [("2", str(n), str(i)) for n in (1, 2) for i in range(2)]
    assert seen == sorted(want)
    assert leftovers(held) == []


def held_by(check: dict[str, Any], node: str) -> str:
    (told,) = check[node]["facts"]["leased"]
    return str(told).split(" by ", 1)[1]


@pytest.mark.full
def test_unlike_nodes_train_and_go_on_in_another_shape(site: Site, testbed: Any, node_python: str) -> None:
    describe(site, testbed, node_python, "trainer")
    text = GPT.format(name="g", nodes=2, stage=3, steps=4000, every=10).replace("_node: 2", "_node: all")
    site.write("jobs/g.yaml", text.replace("global: 16", "global: 24"))
    run = site.zerun("submit", "jobs/g.yaml", "--cluster", "trainer").stdout.strip()
    wait_for_checkpoint(site, run, 10)
    site.zerun("cancel", run, code=None)
    (newest,) = [c for c in site.json("ckpt", "ls", run) if c["whole"]][-1:]
    assert newest["ranks"] == 6 and newest["where"] == ["node01", "node02"]
    said = site.zerun("resume", run, "--nodes", "3", "--follow", "--set", f"steps={newest['step'] + 20}")
    assert "resumed from step" in said.stderr and "saved by 6 ranks" in said.stderr
    assert site.json("status", run)["state"] == "done"
    site.zerun("collect", run)
    manifest = json.loads(max((site.run_folder(run) / "checkpoints").glob("*/manifest.json")).read_bytes())
    assert [s["node"] for s in manifest["shards"]] == ["node01"] * 4 + ["node02"] * 2 + ["node03"] * 2


@pytest.mark.full
def test_a_stranger_on_a_gpu(site: Site, testbed: Any, node_python: str) -> None:
    describe(site, testbed, node_python, "trainer", kind="gpu")
    site.write("script.py", "print('begun', flush=True)\n")
    job = PROGRAM.format(name="p", nodes=3, time="30:00", python="python3", more="")
    site.write("jobs/p.yaml", job)
    script = (
        "mkdir -p /scratch/bin; mount --bind /scratch/bin /usr/local/bin; setsid setpriv --reuid=nora --regid=nora "
        "--clear-groups sleep 7919 >/dev/null 2>&1 & sleep .2; pgrep -xf 'sleep 7919'"
    )
    pid = testbed.exec("node02", ["bash", "-c", script], user=None).stdout.decode().strip()
    try:
        testbed.exec("node02", ["tee", "/scratch/bin/nvidia-smi"], user=None, stdin=SMI.replace("PID", pid).encode())
        testbed.exec("node02", ["chmod", "755", "/scratch/bin/nvidia-smi"], user=None)
        refused = site.zerun("submit", "jobs/p.yaml", "--cluster", "trainer", code=5)
        told = f"GPU 1 in use by pid {pid} of nora (sleep), which has no lease"
        assert f"node node02: 2 GPUs asked for, 1 of 2 is free: {told}" in refused.stderr, refused.stderr
        check = {f["name"]: f for f in site.json("cluster", "check", "trainer", code=8)}
        assert any(told in problem for problem in check["node02"]["problems"])
        testbed.exec("node02", ["kill", pid], user=None)
        testbed.exec(
            "node02",
            ["tee", "/scratch/bin/nvidia-smi"],
            user=None,
            stdin=SMI.split("  --query-comp")[0].encode() + b"esac\n",
        )
        site.zerun("submit", "jobs/p.yaml", "--cluster", "trainer", "--follow")
    finally:
        testbed.exec("node02", ["bash", "-c", f"kill {pid}; umount /usr/local/bin"], user=None, check=False)


STARTS = """\
import os, subprocess, sys, time
if os.environ["LOCAL_RANK"] == "0":
    subprocess.Popen(["sh", "-c", "sleep 600; : $0", os.environ["ZERUN_RUN_DIR"]], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.full
def test_a_resume_elsewhere_ends_what_killed_agents_left(
    rack: Site, testbed: Any, leftovers: Callable[[str], list[str]], wait_until: Callable[..., None]
) -> None:
    """On nodes that the next attempt does not use; one that does not answer is named, and holds nothing up."""
    rack.write("script.py", STARTS)
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=3, time="30:00", python="python3", more=""))
    run = rack.zerun("submit", "jobs/p.yaml", "--cluster", "rack").stdout.strip()

    def left(node: str) -> list[str]:
        return [line for line in testbed.processes(node, run) if "sleep 600" in line]

    nodes = ("node01", "node02", "node03")
    wait_until(lambda: all(map(left, nodes)), 30, "the ranks did not come up")
    for node in ("node01", "node03"):
        record = testbed.exec(node, ["cat", f"/scratch/{testbed.user}/zerun/{run}/attempts/1/nodes/{node}.json"])
        testbed.exec(node, ["kill", "-9", str(json.loads(record.stdout)["agent"]["pid"])], user=None)
    wait_until(lambda: not left("node02"), 30, "the agent that lives did not stop")
    assert left("node01") and left("node03")
    testbed.cut("node01")
    try:
        assert rack.json("status", run)["state"] == "failed"
        refused = rack.zerun("resume", run, "--nodes", "4", code=4).stderr
        assert "4 nodes to go on, 3 of 4 answer: node01 (" in refused and "--nodes 3" in refused, refused
        said = rack.zerun("resume", run, "--nodes", "1").stderr
        assert "goes on without node01 (" in said and "attempt 1 may still run on node01" in said, said
        assert f"zerun cancel {run}" in said and not left("node03")
    finally:
        testbed.mend("node01")
    assert left("node01"), "nothing was left to find"
    wait_until(lambda: testbed.exec("node01", ["true"], check=False).returncode == 0, 20, "node01 is not back")
    assert rack.json("status", run)["nodes"] == ["node02"]
    rack.zerun("cancel", run, code=None)
    assert leftovers(run) == []


SHARED = """\
name: rack
backend: direct
nodes: {{names: "node[01-04]", slots: 2}}
ssh: {{config: {config}}}
paths: {{runs: ~/zerun}}
python: {python}
agent_python: /usr/bin/python3
"""


@pytest.mark.full
def test_the_only_machine_of_a_run_is_off(
    site: Site, testbed: Any, node_python: str, leftovers: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared disk the agent's beat tells a machine without power from one that cannot be reached."""
    monkeypatch.setattr(former, "_STILL_S", 6.0)  # for minutes' old views of a network's disk, which this one is not
    site.write("clusters/rack.yaml", SHARED.format(config=testbed.ssh_config_of(testbed.user), python=node_python))
    site.write("script.py", "import time\ntime.sleep(600)\n")
    site.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="30:00", python="python3", more=""))
    run = site.zerun("submit", "jobs/p.yaml", "--cluster", "rack").stdout.strip()
    app = App(site.folder)
    said: list[str] = []
    testbed.cut("node01")
    try:
        with pytest.raises(Unreachable, match="whether it still runs is not known"):
            app.resume(run, notice=said.append)
        assert any("node01 is not answering" in line for line in said)
    finally:
        testbed.mend("node01")
    testbed.kill("node01")
    try:
        resumed = app.resume(run)
        assert any("attempt 1 is taken for over: node01 is not answering" in note for note in resumed.notes)
        assert any("goes on without node01" in note for note in resumed.notes)
        assert site.json("status", run)["nodes"] == ["node02"]
        site.zerun("cancel", run, code=None)
    finally:
        testbed.start("node01")
    assert leftovers(run) == []
