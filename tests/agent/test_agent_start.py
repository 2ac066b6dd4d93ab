"""The verbs `start` and `stop`: an agent that outlives whoever started it, found again, ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from agent_job import MakeJob, lives, until

from launcher.contract.launch import Node


def test_start_detaches_and_a_second_start_adopts(job: MakeJob) -> None:
    one = job("sleep", "60")
    code, first = one.verb("start", node="localhost")
    assert code == 0, first
    again = one.verb("start", node="localhost")
    assert again == (0, first)
    pid = first["pid"]["pid"]
    assert lives(pid) and first["announcement"]["address"] == "127.0.0.1"
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] != str(os.getpid())
    until(lambda: one.state() == "running")
    assert one.verb("stop", grace_s=5)[1] == {"stopped": 2}
    assert not lives(pid)
    code, refused = one.verb("start", node="localhost")
    assert code == 5 and "already ran" in refused["error"]
    assert one.verb("stop", grace_s=5)[1] == {"stopped": 0}


def test_two_starts_at_once_make_one_agent(job: MakeJob) -> None:
    one = job("sleep", "60")
    request = json.dumps({"run_dir": one.spec.run_dir, "attempt": 1, "node": "localhost"}).encode()
    both = [
        subprocess.Popen([sys.executable, one.spec.runtime, "start"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    for start in both:
        assert start.stdin
        start.stdin.write(request)
        start.stdin.close()
    answers = []
    for start in both:
        assert start.stdout
        answers.append(json.loads(start.stdout.read()))
        start.stdout.close()
        assert start.wait(40) == 0
    assert answers[0] == answers[1]
    until(lambda: one.state() == "running")
    assert len(one.record().ranks) == 1


def test_start_tells_why_the_agent_failed(job: MakeJob) -> None:
    one = job("true", setup="no-such-command").with_settings("agent.detach._READY_S = 20.0")
    code, answer = one.verb("start", node="localhost")
    assert code == 1 and "line 1 failed with status 127" in answer["error"]


def test_start_names_a_node_that_is_not_in_the_job(job: MakeJob) -> None:
    code, answer = job("true").verb("start", node="elsewhere")
    assert code == 2 and "elsewhere" in answer["error"]


def test_a_long_setup_is_not_waited_for(job: MakeJob) -> None:
    one = job("true", setup="sleep 30")
    begun = time.monotonic()
    assert one.verb("start", node="localhost")[0] == 0
    assert time.monotonic() - begun < 15
    assert one.state() == "starting"
    one.verb("stop", grace_s=1)
    assert one.state() == "ended"


def test_nodes_without_a_shared_disk_meet_by_the_announcement(job: MakeJob, tmp_path: Path) -> None:
    nodes = (Node("a", 1, address="127.0.0.1"), Node("b", 1, address="127.0.0.1"))
    first = job("sh", "-c", "echo $MASTER_ADDR:$MASTER_PORT", nodes=nodes, shared=False)
    code, answer = first.verb("start", node="a")
    assert code == 0
    # The second node's own disk: another folder with its own copy of launch.json.
    other = tmp_path / "elsewhere" / "run-1"
    second = type(first)(first.spec).write(run_dir=str(other))
    code, lone = second.verb("start", node="b")
    assert code == 2 and "rendezvous" in lone["error"]
    code, joined = second.verb("start", node="b", rendezvous=answer["announcement"])
    assert code == 0 and joined["announcement"] is None
    until(lambda: first.state("a") == "ended" and second.state("b") == "ended")
    assert first.log(0) == second.log(1) == b"127.0.0.1:%d\n" % answer["announcement"]["port"]
    assert first.record("a").failure is None and second.record("b").failure is None


def test_stop_leaves_the_next_attempt_alone(job: MakeJob) -> None:
    one = job("sleep", "60")
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "ZERUN_TOKEN": "of another attempt"})
    assert one.verb("start", node="localhost")[0] == 0
    one.verb("stop", grace_s=5)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_unknown_verbs_and_bad_requests_answer(job: MakeJob) -> None:
    one = job("true")
    code, answer = one.verb("dance")
    assert code == 2 and "dance" in answer["error"] and "start" in answer["hint"]
    bad = subprocess.run([sys.executable, one.spec.runtime, "start"], input=b"[1]", capture_output=True)
    assert bad.returncode == 2 and "JSON object" in json.loads(bad.stdout)["error"]


def test_stop_does_not_wait_longer_than_its_own_grace(job: MakeJob) -> None:
    one = job("sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done", grace_s=60)
    assert one.verb("start", node="localhost")[0] == 0
    until(lambda: one.log(0) == b"up\n")
    begun = time.monotonic()
    one.verb("stop", grace_s=0.5)
    assert time.monotonic() - begun < 12, "13 s is the longest grace"
    record = one.record()
    assert record.state == "ended" and record.failure is not None and record.failure.kind == "cancelled"
    assert record.ranks[0].signal == 9 and record.ranks[0].stopped_by_us
