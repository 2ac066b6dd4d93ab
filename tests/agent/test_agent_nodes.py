"""Several nodes: agents on loopback that talk over the control channel."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from pathlib import Path

from agent_job import Job, MakeJob, lives, until

from launcher.agent.control import first_cause
from launcher.contract.launch import Node
from launcher.contract.records import Failure

THREE = tuple(Node(f"n{i}", 1, address="127.0.0.1") for i in range(3))


def _run_all(one: Job, limit_s: float = 40.0) -> list[int]:
    for node in one.spec.nodes:
        one.agent(node.name)
    return [one.agents[node.name].wait(limit_s) for node in one.spec.nodes]


def _all_running(one: Job) -> list[int]:
    """The pids of the ranks, once all run."""
    until(lambda: all(one.state(node.name) == "running" for node in one.spec.nodes))
    return [one.record(node.name).ranks[0].pid for node in one.spec.nodes]


def test_all_end_together(job: MakeJob) -> None:
    one = job("sh", "-c", 'sleep 0.$RANK; echo "$RANK/$WORLD_SIZE $NODE_RANK $MASTER_ADDR"', nodes=THREE)
    assert _run_all(one) == [0, 0, 0]
    assert [one.log(r) for r in range(3)] == [b"%d/3 %d 127.0.0.1\n" % (r, r) for r in range(3)]
    assert [one.state(n.name) for n in THREE] == ["ended"] * 3


def test_a_failure_on_any_node_stops_all_and_all_know_it(job: MakeJob, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    begins = f"test $RANK = 2 && {{ until [ -e '{fails}' ]; do sleep 0.05; done; exit 7; }}; exec sleep 60"
    one = job("sh", "-c", begins, nodes=THREE)
    for node in THREE:
        one.agent(node.name)
    _all_running(one)  # else there may be nothing to stop yet on the others
    begun = time.monotonic()
    fails.touch()
    assert [one.agents[node.name].wait(40) for node in THREE] == [7, 7, 7]
    assert time.monotonic() - begun < 10
    for node in THREE:
        failure = one.record(node.name).failure
        assert failure is not None
        assert (failure.kind, failure.node, failure.rank, failure.exit_code) == ("rank_exit", "n2", 2, 7)
    assert [one.record(n).ranks[0].stopped_by_us for n in ("n0", "n1", "n2")] == [True, True, False]


def test_an_agent_that_comes_after_the_failure_hears_of_it_at_once(job: MakeJob) -> None:
    one = job("sh", "-c", "exit 7", nodes=THREE[:2])
    one.agent("n0")
    until(lambda: one.state("n0") == "ended")
    begun = time.monotonic()
    one.agent("n1")
    assert [one.agents[n].wait(40) for n in ("n0", "n1")] == [7, 7]
    assert time.monotonic() - begun < 12, "it would wait 60 s for a first contact"
    failure = one.record("n1").failure
    assert failure is not None and (failure.node, failure.exit_code) == ("n0", 7)


def test_a_cancel_does_not_wait_for_agents_that_never_came(job: MakeJob) -> None:
    one = job("sh", "-c", "exit 7", nodes=THREE[:2])
    first = one.agent("n0")
    until(lambda: one.state("n0") == "ended")
    begun = time.monotonic()
    first.send_signal(signal.SIGTERM)
    assert first.wait(40) == 7 and time.monotonic() - begun < 12, "16 s is what it grants them"


FALLOUT = """
import os, signal, socket, sys, time
rank = int(os.environ["RANK"])
if rank == 1:  # the one that dies; the others notice by their broken connections, and exit at once
    listener = socket.create_server(("127.0.0.1", 0))  # at the job's own port the first agent may still listen
    open("port.part", "w").write(str(listener.getsockname()[1]))
    os.rename("port.part", "port")
    held = [listener.accept() for _ in range(2)]
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists("port"):
    time.sleep(0.02)
connection = socket.create_connection(("127.0.0.1", int(open("port").read())))
connection.recv(1)
sys.exit(1)
"""


def test_the_cause_is_not_the_fallout(job: MakeJob) -> None:
    one = job(sys.executable, "-c", FALLOUT, nodes=THREE)
    # An agent on a busy machine may see its rank's death later than the others see theirs.
    one.with_settings("agent.control._AT_ONCE_S = 5.0", "agent.coordinator._SETTLE_S = 4.0")
    assert _run_all(one) == [137, 137, 137]
    failure = one.record("n0").failure
    assert failure is not None and (failure.rank, failure.signal) == (1, 9)


def test_a_lost_agent_is_a_lost_node(job: MakeJob) -> None:
    one = job("sleep", "60", nodes=THREE)
    for node in THREE:
        one.agent(node.name)
    ranks = _all_running(one)
    one.agents["n1"].kill()
    begun = time.monotonic()
    assert [one.agents[n].wait(40) for n in ("n0", "n2")] == [1, 1]
    assert time.monotonic() - begun < 15
    assert not any(lives(pid) for pid in ranks)
    failure = one.record("n2").failure
    assert failure is not None and (failure.kind, failure.node) == ("node_lost", "n1")


def test_a_lost_first_node_and_a_silent_one(job: MakeJob) -> None:
    one = job("sleep", "60", nodes=THREE)
    for node in THREE:
        one.agent(node.name)
    ranks = _all_running(one)
    one.agents["n0"].send_signal(signal.SIGSTOP)  # silent, its connections open
    begun = time.monotonic()
    assert [one.agents[n].wait(40) for n in ("n1", "n2")] == [1, 1]
    assert 7 < time.monotonic() - begun < 15
    assert not any(lives(pid) for pid in ranks[1:])
    failure = one.record("n1").failure
    assert failure is not None and (failure.kind, failure.node) == ("node_lost", "n0")
    one.agents["n0"].kill()


def test_a_cancel_on_one_node_ends_all(job: MakeJob) -> None:
    one = job("sleep", "60", nodes=THREE)
    for node in THREE:
        one.agent(node.name)
    ranks = _all_running(one)
    one.agents["n2"].send_signal(signal.SIGTERM)
    assert [one.agents[n.name].wait(40) for n in THREE] == [143] * 3
    assert not any(lives(pid) for pid in ranks)
    failure = one.record("n0").failure
    assert failure is not None and (failure.kind, failure.node) == ("cancelled", "n2")


def test_garbage_and_a_wrong_token_change_nothing(job: MakeJob) -> None:
    one = job("sh", "-c", "sleep 2", nodes=THREE[:2])
    one.agent("n0")
    path = one.folder / "rendezvous.json"
    until(path.exists)
    where = json.loads(path.read_bytes())
    hello = {"kind": "hello", "token": "wrong", "node": "n1", "node_rank": 1}
    verdict = {"kind": "failed", "failure": {"kind": "rank_exit", "node": "n1", "message": "no"}, "age_s": 0}
    for garbage in (
        json.dumps(hello).encode() + b"\n" + json.dumps(verdict).encode() + b"\n",
        json.dumps({**hello, "token": 7}).encode() + b"\n",
        b"\0\xff not json\n",
        b"[" * 50_000 + b"\n",
        b"x" * 300_000,
        b"",
    ):
        with socket.create_connection((where["address"], where["control_port"])) as stranger:
            stranger.settimeout(8)
            try:
                stranger.sendall(garbage)
                assert not garbage or stranger.recv(100) == b""
            except ConnectionError:
                pass
    one.agent("n1")
    assert [one.agents[n].wait(40) for n in ("n0", "n1")] == [0, 0]
    assert one.record("n0").failure is None


def test_the_first_of_several_failures() -> None:
    def died(kind: str, rank: int, number: int | None = None) -> Failure:
        return Failure(kind, "n", "", rank=rank, signal=number)

    early, late = died("rank_exit", 1), died("rank_exit", 2)
    killed, aborted = died("rank_signal", 3, 9), died("rank_signal", 4, 6)
    asked = Failure("cancelled", "n", "")
    assert first_cause([(2.0, late), (1.0, early)]) is early
    assert first_cause([(1.0, early), (1.01, killed)]) is killed  # in one instant the hard death is the cause
    assert first_cause([(1.0, early), (1.2, killed)]) is early
    assert first_cause([(1.0, early), (1.01, aborted)]) is early  # gloo aborts survivors
    assert first_cause([(1.0, early), (1.5, asked)]) is asked
    assert first_cause([(1.0, early), (3.0, asked)]) is early
