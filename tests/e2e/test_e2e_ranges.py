"""A resume on other machines, each with a disk of its own: only what ranks read moves, and they read the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
from e2e_site import Site
from test_e2e_replicas import RUNS, job, sums

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def large_job(steps: int) -> str:
    """Shards of about 6 MiB on three machines."""
    return job(3, steps, 0).replace("hidden: 33", "hidden: 240").replace(", replicas: 0", "")


def at(run: str, step: int, name: str = "") -> str:
    return f"{RUNS}/{run}/checkpoints/step-{step:08d}/{name}"


def sizes(testbed: Any, node: str, run: str, step: int) -> dict[str, int]:
    script = f"cd {at(run, step)} && stat -c '%n %s' rank-*"
    lines = testbed.exec(node, ["bash", "-c", script]).stdout.decode().splitlines()
    return {name: int(size) for name, size in (line.split() for line in lines)}


def checkpoints(testbed: Any, run: str) -> list[str]:
    """What lies beside node04's checkpoints, and among them."""
    found = testbed.exec("node04", ["ls", "-A", f"{RUNS}/{run}/checkpoints"], check=False)
    return str(found.stdout.decode()).split()


def copy_whole(testbed: Any, run: str, step: int, ranks: dict[int, str], to: list[str]) -> None:
    """What an undisturbed resume would find: every shard whole on every node."""
    for rank, node in ranks.items():
        path = at(run, step, f"rank-{rank:05d}.safetensors")
        data = testbed.exec(node, ["cat", path]).stdout
        for other in set(to) - {node}:
            testbed.exec(other, ["bash", "-c", f"mkdir -p {at(run, step)}; cat > {path}"], stdin=data)


def test_ranks_go_on_the_same_from_ranges_as_from_whole_shards(
    rack: Site, testbed: Any, wait_until: Callable[..., None]
) -> None:
    rack.write("jobs/g.yaml", large_job(20))
    nodes = list(testbed.nodes[:4])
    runs = [rack.zerun("submit", "jobs/g.yaml", "--cluster", "rack", "--follow").stdout.strip() for _ in range(2)]
    moved, undisturbed = runs
    first = [sums(testbed, node, moved, 20) for node in nodes[:3]]
    assert first == [sums(testbed, node, undisturbed, 20) for node in nodes[:3]]
    copy_whole(testbed, undisturbed, 20, dict(enumerate(nodes[:3])), nodes)
    whole = sizes(testbed, "node02", moved, 20)["rank-00001.safetensors"]

    said = {}
    for run in runs:
        said[run] = rack.zerun("resume", run, "--nodes", "2", "--follow", "--set", "steps=30").stderr
        assert "resumed from step 20 (saved by 3 ranks)" in said[run]
    there = sizes(testbed, "node01", moved, 20)
    assert sorted(there) == ["rank-00000.safetensors", "rank-00001.ranges"]
    assert 0.4 * whole < there["rank-00001.ranges"] < 0.6 * whole
    assert sorted(sizes(testbed, "node02", moved, 20)) == ["rank-00001.safetensors", "rank-00002.safetensors"]
    line = next(line for line in said[moved].splitlines() if "from node to node" in line)
    assert "ranges of 1 shard (" in line and f"of {whole / 2**20:.1f} MiB) node02 → node01" in line
    assert said[moved].index("from node to node") < said[moved].index("was staged to")
    assert "from node to node" not in said[undisturbed]
    after = [sums(testbed, node, moved, 30) for node in nodes[:2]]
    assert after == [sums(testbed, node, undisturbed, 30) for node in nodes[:2]] and all(len(s) == 1 for s in after)

    # Ranges are no shard: without node02's disk, rank 1's is lost, and said to be.
    listed = {c["step"]: c for c in rack.json("ckpt", "ls", moved)}
    assert listed[20]["whole"] and listed[20]["bytes"] == 3 * whole
    # keep: 2 has let step 10 go, where attempt 2 ran; node03 still has its part.
    assert listed[10]["state"] == "let go" and "that attempt 2 left out" in listed[10]["problem"]
    rack.zerun("ckpt", "prune", moved, "--remote", "--keep", "2", "--yes")
    assert [c["step"] for c in rack.json("ckpt", "ls", moved)] == [20, 30]
    rack.zerun("collect", moved, "--checkpoint", "20")
    assert sorted(p.name for p in (rack.run_folder(moved) / "checkpoints/step-00000020").iterdir()) == [
        "manifest.json", *(f"rank-{rank:05d}.safetensors" for rank in range(3))
    ]  # fmt: skip

    # A move that is killed half way leaves nothing that counts; then on other machines, and more of them.
    testbed.shape("node03", "1mbit")
    resuming = rack.start("resume", moved, "--nodes", "4", "--step", "20", "--set", "steps=24")
    wait_until(lambda: checkpoints(testbed, moved) == [".incoming-00000020"], 60, "nothing comes to node04")
    resuming.send_signal(signal.SIGKILL)
    resuming.communicate()
    for line in testbed.processes("node04", " pull"):
        testbed.exec("node04", ["kill", "-9", line.split()[0]], user=None, check=False)
    testbed.shape("node03", "none")
    assert checkpoints(testbed, moved) == [".incoming-00000020"]
    assert {c["step"]: c["whole"] for c in rack.json("ckpt", "ls", moved)}[20]
    for run in runs:
        told = rack.zerun("resume", run, "--nodes", "4", "--step", "20", "--follow", "--set", "steps=24").stderr
        assert "resumed from step 20 (saved by 3 ranks)" in told
    assert checkpoints(testbed, moved) == ["step-00000020", "step-00000024"]
    assert list(sizes(testbed, "node04", moved, 20)) == ["rank-00002.ranges"]
    assert [sums(testbed, n, moved, 24) for n in nodes] == [sums(testbed, n, undisturbed, 24) for n in nodes]
