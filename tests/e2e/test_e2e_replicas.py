"""A disk that is gone: its node's shards come from the next node's copies, byte for byte, from node to node."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from e2e_site import GPT, Site
from test_e2e_slurm import wait_for_checkpoint

RUNS = "/scratch/trainer/zerun"


def job(nodes: int, steps: int, replicas: int) -> str:
    text = GPT.format(name="g", nodes=nodes, stage=3, steps=steps, every=10).replace("_node: 2", "_node: 1")
    return text.replace("keep: 3", f"keep: 2, replicas: {replicas}").replace("global: 16", "global: 12")


def sums(testbed: Any, node: str, run: str, step: int) -> dict[str, str]:
    """Digest by file of a checkpoint's folder on a node; empty when there is none."""
    script = f"cd {RUNS}/{run}/checkpoints/step-{step:08d} 2>/dev/null && sha256sum *.safetensors"
    lines = testbed.exec(node, ["bash", "-c", script], check=False).stdout.decode().splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def test_one_lost_disk_loses_nothing(
    rack: Site, testbed: Any, leftovers: Callable[[str], list[str]], wait_until: Callable[..., None]
) -> None:
    rack.write("jobs/g.yaml", job(3, 20, 1))
    said = rack.zerun("submit", "jobs/g.yaml", "--cluster", "rack", "--follow")
    run = said.stdout.strip()
    assert "one lost disk loses no checkpoint: each node keeps a copy" in said.stderr
    before = {node: sums(testbed, node, run, 20) for node in testbed.nodes[:3]}
    names = [f"rank-{rank:05d}.safetensors" for rank in range(3)]
    assert [sorted(found) for found in before.values()] == [
        sorted([names[0], names[2]]), sorted([names[1], names[0]]), sorted([names[2], names[1]])
    ]  # fmt: skip
    assert all(before[node][name] == before[other][name]
               for node, other, name in zip(testbed.nodes, testbed.nodes[1:3], names, strict=False))  # fmt: skip
    note = testbed.exec("node01", ["cat", f"{RUNS}/{run}/checkpoints/step-00000020/replicas.json"]).stdout
    assert {k: v for k, v in json.loads(note).items() if k != "verified_by"} == {
        "node": "node01", "attempt": 1, "of": {"node03": [2]}
    }  # fmt: skip
    kept = testbed.exec("node02", ["ls", "-A", f"{RUNS}/{run}/checkpoints"]).stdout.decode().split()
    assert kept == ["step-00000010", "step-00000020"]  # no part is left

    testbed.exec("node03", ["rm", "-rf", RUNS])  # the disk
    listed = rack.zerun("ckpt", "ls", run).stdout.splitlines()[-1]
    assert listed.split()[:2] == ["20", "yes"] and listed.endswith("whole (node03's shards from node01's replica)")
    rack.zerun("collect", run)

    resumed = rack.zerun("resume", run, "--follow", "--set", "steps=30")
    assert "from node to node: 1 shard (" in resumed.stderr and "node01 → node03" in resumed.stderr
    assert "step 20: whole (node03's shards from node01's replica), taken" in resumed.stderr
    assert "resumed from step 20" in resumed.stderr
    assert sums(testbed, "node03", run, 20) == {names[2]: before["node03"][names[2]]}
    wait_until(lambda: leftovers(run) == [], 30, "agents stay")  # they leave after their last word
    assert sorted(sums(testbed, "node01", run, 30)) == sorted([names[0], names[2]])


@pytest.mark.full
def test_without_copies_and_where_nodes_do_not_reach_each_other(rack: Site, testbed: Any) -> None:
    rack.write("jobs/g.yaml", job(4, 4000, 0))
    said = rack.zerun("submit", "jobs/g.yaml", "--cluster", "rack")
    run = said.stdout.strip()
    assert "one lost disk loses the checkpoint" in said.stderr
    wait_for_checkpoint(rack, run, 10)
    rack.zerun("cancel", run, code=None)
    step = max(c["step"] for c in rack.json("ckpt", "ls", run) if c["whole"])
    shard = sums(testbed, "node04", run, step)
    for node in ("node01", "node02"):
        testbed.exec(node, ["ip", "route", "add", "prohibit", testbed.address("node04")], user=None)
    try:
        resumed = rack.zerun("resume", run, "--nodes", "2", "--follow", "--set", f"steps={step + 10}")
    finally:
        for node in ("node01", "node02"):
            testbed.exec(node, ["ip", "route", "del", "prohibit", testbed.address("node04")], user=None, check=False)
    assert "not from node to node to node02: " in resumed.stderr and "come here first" in resumed.stderr
    assert sums(testbed, "node02", run, step)["rank-00003.safetensors"] == shard["rank-00003.safetensors"]
    parts = testbed.exec("node02", ["ls", "-A", f"{RUNS}/{run}/checkpoints"]).stdout.decode()
    assert ".incoming" not in parts

    testbed.exec("node02", ["rm", "-rf", RUNS])
    (listed,) = [c for c in rack.json("ckpt", "ls", run) if c["step"] == step + 10]
    assert not listed["whole"] and "missing on node02" in listed["problem"]
