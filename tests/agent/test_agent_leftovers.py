"""An agent that was killed: what its ranks had started goes on, until the next attempt's agent comes."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from agent_job import MakeJob, lives, until


def test_two_attempts_never_run_at_once(job: MakeJob, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    first = job("sh", "-c", f'sleep 60 & echo $! > "{pid_file}.part"; mv "{pid_file}.part" "{pid_file}"; wait')
    agent = first.agent()
    until(pid_file.exists)
    trains = int(pid_file.read_text())
    agent.send_signal(signal.SIGKILL)
    agent.wait(40)
    assert lives(trains), "the kernel ends the rank alone"

    second = first.write(attempt=2, token=os.urandom(16).hex())
    argv = [first.python, first.spec.runtime, "agent", "--run-dir", first.spec.run_dir, "--attempt", "2"]
    pid_file.unlink()
    with subprocess.Popen([*argv, "--node", "localhost"], stdin=subprocess.DEVNULL) as agent:
        until(pid_file.exists)
        assert not lives(trains) and lives(int(pid_file.read_text()))
        until(lambda: second.state() == "running")  # the rank may be quicker than the record that its agent writes
        (note,) = [n for n in second.record().notes if "attempt 1" in n]
        assert "whose agent had been killed" in note
        agent.send_signal(signal.SIGTERM)
        agent.wait(40)


def test_an_agent_that_was_taken_for_dead_gives_way(job: MakeJob) -> None:
    """Its machine did not answer, and the run went on elsewhere; then the network is mended."""
    first = job("sleep", "60")
    agent = first.agent()
    until(lambda: first.state() == "running")
    rank = first.record().ranks[0].pid
    second = first.folder.parent / "2"
    second.mkdir()
    (second / "launch.json").write_bytes((first.folder / "launch.json").read_bytes())
    assert agent.wait(40) == 128 + signal.SIGTERM and not lives(rank)
    failure = first.record().failure
    assert failure is not None and "next attempt" in failure.message
