"""``zerun cluster check --job``: which nodes cannot speak with each other, before a real job finds out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e_site import Site
from testbed.network import cut_between, knows_itself_as_loopback


def _of(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(f for f in found if f["name"] == name)


@pytest.mark.full
def test_a_rack_whose_nodes_cannot_all_speak(rack: Site, testbed: Any) -> None:
    path = rack.folder / "clusters/rack.yaml"
    path.write_text(path.read_text() + "network: {interface: eth0, ports: 21000-21009}\n")
    with cut_between(testbed, "node03", "node02"):
        done = rack.zerun("cluster", "check", "rack", "--job", code=8)
    # The answer of node03 does not come back to node02 either, so the pair is told from both sides.
    assert "node03 cannot reach node02:210" in done.stdout, done.stdout
    assert "node02 cannot reach node03:210" in done.stdout and ": timed out" in done.stdout
    assert "node01 cannot" not in done.stdout and "all-reduce" not in done.stdout
    with knows_itself_as_loopback(testbed, "node01"):
        found = rack.json("cluster", "check", "rack", "--job")
    assert _of(found, "network")["facts"] | {"pairs": 12, "ports": "21000-21009"} == _of(found, "network")["facts"]
    reduced = _of(found, "all-reduce")["facts"]
    assert (reduced["ranks"], reduced["backend"], reduced["address"]) == (4, "gloo", testbed.address("node01"))
    for node in testbed.nodes:
        assert b"network-check" not in testbed.exec(node, ["ls", "/scratch/trainer/zerun"]).stdout
        assert not testbed.processes(node, "network-check")
    assert not list((rack.folder / "runs").glob("network-check*"))


@pytest.mark.full
def test_slurm_nodes_that_cannot_all_speak(slurm: Site, testbed: Any, tmp_path: Path) -> None:
    path = slurm.folder / "clusters/uni.yaml"
    path.write_text(path.read_text() + "network: {ports: 21000-21009}\n")
    with cut_between(testbed, "node04", "node02"):
        done = slurm.zerun("cluster", "check", "uni", "--job", "--nodes", "4", code=8)
    assert "node04 cannot reach node02:210" in done.stdout and "all-reduce" not in done.stdout, done.stdout
    with knows_itself_as_loopback(testbed, "node01"):
        found = slurm.json("cluster", "check", "uni", "--job", "--nodes", "4")
    assert _of(found, "network")["ok"] and _of(found, "network")["facts"]["pairs"] == 12
    reduced = _of(found, "all-reduce")["facts"]
    assert (reduced["ranks"], reduced["address"]) == (4, testbed.address("node01"))
    assert b"network-check" not in testbed.exec("login", ["sh", "-c", "ls ~/zerun"]).stdout
    # Where Slurm's own step cannot cross either, srun's word names the node.
    with cut_between(testbed, "node02", "node01"):
        done = slurm.zerun("cluster", "check", "uni", "--job", code=8)
    assert "2 of 2 nodes did not say" in done.stdout and "Slurm said:" in done.stdout, done.stdout
