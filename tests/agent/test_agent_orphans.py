"""Slots whose agent was killed: held for as long as anything lives that it or its ranks had started."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_job import PACKAGE, Job, MakeJob, lives, until

from launcher.agent import leases, processes
from launcher.agent.leases import Wish
from launcher.contract.errors import Busy
from launcher.contract.launch import Node
from launcher.contract.leases import Lease

# As torchrun's elastic agent starts its workers: in sessions of their own, with no descriptor inherited.
STARTS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
open(sys.argv[1] + ".part", "w").write(str(child.pid))
import os; os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""
ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from launcher.agent import leases
print(json.dumps(leases.slots({"node": "n1", "among": [0, 1], "count": 2})), flush=True)
"""


def killed(one: Job, pid_file: Path, sessions: int = 1) -> int:
    """What a rank had started, once the agent has been killed and the kernel has ended the rank."""
    agent = one.agent()
    started = int(until(lambda: pid_file.exists() and pid_file.read_text()))
    until(lambda: one.state() == "running" and one.record().ranks)
    rank = one.record().ranks[0].pid
    # At least: the agent looks for sessions again and again, and may have seen what the rank has started by now.
    until(lambda: len(json.loads(lease_file(0).read_text())["sessions"]) >= sessions)
    agent.send_signal(signal.SIGKILL)
    agent.wait(40)
    until(lambda: not lives(rank))
    assert lives(started)
    return started


def lease_file(slot: int) -> Path:
    return Path(os.environ["ZERUN_LEASES"]) / f"slot-{slot}.{os.geteuid()}.json"


def as_another(tmp_path: Path) -> dict[str, object]:
    """What the verb ``slots`` tells user 65534."""
    for at in [*tmp_path.parents, tmp_path, *Path(os.environ["ZERUN_LEASES"]).parents]:  # some are root's alone
        if not at.stat().st_mode & 0o001:
            os.chmod(at, at.stat().st_mode | 0o011)
    for room in ("contract", "agent"):
        shutil.copytree(PACKAGE / room, tmp_path / "package" / "launcher" / room)
    (tmp_path / "package" / "launcher" / "__init__.py").write_text("")
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-B", "-c", ASK]
    return dict(json.loads(subprocess.check_output([*argv, str(tmp_path / "package")])))


def test_a_killed_agents_processes_keep_its_slots(job: MakeJob, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    nodes = (Node("localhost", 1, among=(0, 1)),)
    first = job(sys.executable, "-c", STARTS, str(pid_file), nodes=nodes, run="first")
    started = killed(first, pid_file, sessions=2)
    agent = first.record().agent.pid
    with open(Path(os.environ["ZERUN_LEASES"]) / "slot-0") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel knows of nobody: what lives had closed it

    nodes = (Node("localhost", 2, among=(0, 1)),)
    second = job("true", nodes=nodes, run="second", run_dir=str(tmp_path / "runs" / "run-2"))
    status, said = second.verb("start", node="localhost")
    assert status == 5 and said["busy"], said
    assert "2 slots asked for, 1 of 2 is free: slot 0 held by run first of " in said["error"]
    assert (
        f"whose agent (pid {agent}) is gone while what it started lives on (zerun cancel first ends it)"
        in (said["error"])
    )
    if not os.geteuid():  # another user, to whom all environments are closed, sees it too
        told = as_another(tmp_path)
        assert told["free"] == [1] and "zerun cancel first, by root, ends it" in str(told["refusal"]), told
    # A smaller one takes what is left; the run's own next attempt ends what is in its way.
    held = leases.take(Wish((0, 1), 1, False), Lease(0, "me", "r", 1, "n", 1.0, processes.process_id(os.getpid())))  # type: ignore[arg-type]
    assert held.slots == (1,)
    held.release()
    assert first.verb("stop", grace_s=1) == (0, {"stopped": 1}) and not lives(started)
    status, said = second.verb("start", node="localhost")
    assert status == 0, said


def test_the_next_attempt_of_the_run_itself_is_not_refused(job: MakeJob, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    first = job(sys.executable, "-c", STARTS, str(pid_file), nodes=(Node("localhost", 1, among=(0,)),))
    started = killed(first, pid_file)
    first.write(attempt=2, token=os.urandom(16).hex())
    argv = [first.python, first.spec.runtime, "agent", "--run-dir", first.spec.run_dir, "--attempt", "2"]
    with subprocess.Popen([*argv, "--node", "localhost"], stdin=subprocess.DEVNULL) as agent:
        until(lambda: first.state() == "running")
        assert first.record().leased == (0,) and not lives(started)
        assert any("whose agent had been killed" in note for note in first.record().notes)
        agent.send_signal(signal.SIGTERM)
        agent.wait(40)


def test_what_a_rank_forks_keeps_the_lock_itself(job: MakeJob, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f'setsid sleep 60 & echo $! > "{pid_file}.part"; mv "{pid_file}.part" "{pid_file}"; wait'
    first = job("sh", "-c", script, nodes=(Node("localhost", 1, among=(0,)),), run="first")
    started = killed(first, pid_file)
    with open(Path(os.environ["ZERUN_LEASES"]) / "slot-0") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert "is gone while" in first.verb("slots", node="n", among=[0], count=1)[1]["refusal"]
        os.kill(started, signal.SIGKILL)
        until(lambda: first.verb("slots", node="n", among=[0], count=1)[1]["free"] == [0])


def test_what_could_not_be_ended_keeps_the_slot() -> None:
    own = processes.process_id(os.getpid())
    assert own is not None
    lease = Lease(0, "me", "run-a", 1, "n1", 1700000000.0, own)
    held = leases.take(Wish((0,), 1, False), lease)
    heir = subprocess.Popen(["sleep", "60"], pass_fds=held.handles)
    try:
        held.release(but_for_heirs=True)
        with pytest.raises(Busy, match="slot 0 held by run run-a"):
            leases.take(Wish((0,), 1, False), lease)
    finally:
        heir.kill()
        heir.wait()
    leases.take(Wish((0,), 1, False), lease).release()
