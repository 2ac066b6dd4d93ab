"""Which nodes reach which, each tried from each on a real port."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

from backend_kit import cluster_of, home, runtime
from testbed.cluster import Testbed
from testbed.network import cut_between, knows_itself_as_loopback

from launcher.agent import reach
from launcher.backends.direct import DirectBackend
from launcher.contract.launch import LaunchSpec, Node


def test_the_pair_that_is_cut_is_named_and_nobody_stands_on_loopback(testbed: Testbed, tmp_path: Path) -> None:
    cluster = cluster_of(
        testbed, "direct", network={"ports": "21000-21009"}, paths={"runs": "/scratch/runs", "shared": False}
    )
    backend = DirectBackend(cluster, runtime(), home(tmp_path))
    try:
        with cut_between(testbed, "node03", "node02"), knows_itself_as_loopback(testbed, "node01"):
            found = {about["node"]: about for about in backend.pairs("try-reach", 4)}
    finally:
        backend.close()
    failed = {(name, target["node"]) for name, about in found.items() for target in about["failed"]}
    assert failed == {("node03", "node02"), ("node02", "node03")}
    (answer,) = found["node02"]["failed"]
    assert answer["why"] == "timed out" and 21000 <= answer["port"] <= 21009
    assert [about["address"] for about in found.values()] == [testbed.address(node) for node in testbed.nodes]
    assert not any(about["problem"] for about in found.values())


def test_nodes_of_a_job_agree_by_a_board(tmp_path: Path) -> None:
    nodes = tuple(Node("", 1, "127.0.0.1") for _ in range(3))
    spec = LaunchSpec("r", 1, str(tmp_path / "r"), "z", nodes, True, "token", "python", "python")
    well: dict[int, bool] = {}

    def one(rank: int) -> None:
        well[rank] = reach.among(spec, rank, f"n{rank}")

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert well == {0: True, 1: True, 2: True}
    assert [about["node"] for about in reach.findings(spec.run_dir, 1)] == ["n0", "n1", "n2"]

    # A node without the interface that the cluster names says so, and no rank starts anywhere.
    lost = replace(spec, attempt=2, interface="ib7", nodes=(nodes[0], nodes[1], Node("", 1)))
    threads = [
        threading.Thread(target=lambda rank=rank: well.update({rank: reach.among(lost, rank, f"n{rank}")}))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert well == {0: False, 1: False, 2: False}
    problem = reach.findings(spec.run_dir, 2)[2]["problem"]
    assert "network.interface is ib7" in problem


def test_who_answers_at_a_port_has_to_be_the_node(tmp_path: Path) -> None:
    spec = LaunchSpec("r", 1, "/r", "z", (Node("", 1, "127.0.0.1"), Node("", 1)), True, "token", "python", "python")
    door = reach.open_door(spec, "n0", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()[1]
    try:
        assert reach.try_all([door.about()], "token") == []
        targets = [{**door.about(), "node": "n9"}, {"node": "n1", "address": "127.0.0.1", "port": gone}]
        assert [t["why"] for t in reach.try_all(targets, "token")] == [
            "something else answers there",
            "connection refused",
        ]
        assert reach.try_all([door.about()], "other")[0]["why"] == "something else answers there"
    finally:
        door.listener.close()
