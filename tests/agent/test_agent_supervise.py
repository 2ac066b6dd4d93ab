"""One node: how ranks end, and what is written of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agent_job import MakeJob, lives, until

from launcher.contract.launch import Node

TWO = (Node("localhost", 2),)


def test_ranks_that_end_well(job: MakeJob) -> None:
    one = job("sh", "-c", "echo hello from $RANK", nodes=(Node("localhost", 4),))
    assert one.run() == 0
    record = one.record()
    assert (record.state, record.failure) == ("ended", None)
    assert [r.exit_code for r in record.ranks] == [0] * 4
    assert [one.log(r) for r in range(4)] == [b"hello from %d\n" % r for r in range(4)]


def test_the_first_rank_that_exits_badly_stops_the_others(job: MakeJob) -> None:
    one = job("sh", "-c", "test $RANK = 1 && exit 7; exec sleep 60", nodes=(Node("localhost", 3),))
    begun = time.monotonic()
    assert one.run() == 7
    assert time.monotonic() - begun < 10
    record = one.record()
    assert record.failure is not None
    assert (record.failure.kind, record.failure.rank, record.failure.exit_code) == ("rank_exit", 1, 7)
    assert [(r.exit_code, r.signal, r.stopped_by_us) for r in record.ranks] == [
        (None, signal.SIGTERM, True),
        (7, None, False),
        (None, signal.SIGTERM, True),
    ]


def test_a_killed_rank_counts_as_its_signal(job: MakeJob) -> None:
    one = job("sh", "-c", "test $RANK = 0 && kill -9 $$; exec sleep 60", nodes=TWO)
    assert one.run() == 128 + 9
    first = one.record().ranks[0]
    assert (first.exit_code, first.signal, first.status, first.stopped_by_us) == (None, 9, 137, False)


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(job: MakeJob) -> None:
    waits = "test $RANK = 1 && { until [ -e deaf ]; do sleep 0.05; done; exit 3; }"
    one = job("sh", "-c", f"{waits}; trap '' TERM; touch deaf; while :; do sleep 0.1; done", nodes=TWO, grace_s=1)
    assert one.run() == 3
    assert one.record().ranks[0].signal == signal.SIGKILL


def test_resumable_stop_is_75(job: MakeJob) -> None:
    one = job("sh", "-c", "exit $((RANK * 75))", nodes=TWO)
    assert one.run() == 75
    assert one.record().failure is None


def test_a_program_that_is_not_there(job: MakeJob) -> None:
    one = job("no-such-program")
    assert one.run() == 1
    failure = one.record().failure
    assert failure is not None and failure.kind == "start_failed" and "no-such-program" in failure.message


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    between = os.getpid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        while os.getppid() == between:
            time.sleep(0.01)
        open(sys.argv[1] + ".part", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(300)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
"""


def _pid_in(path: Path) -> int:
    return int(until(lambda: path.exists() and path.read_text()))


def test_cancel_ends_daemons_of_ranks_and_nobody_else(job: MakeJob, tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    one = job(sys.executable, "-c", DAEMON, str(tmp_path / "pid"), "300")
    agent = one.agent()
    daemon = _pid_in(tmp_path / "pid")
    code, answer = one.verb("stop", grace_s=5)
    assert (code, answer) == (0, {"stopped": 3})
    assert agent.wait(40) == 143
    assert not lives(daemon)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    record = one.record()
    assert record.failure is not None and record.failure.kind == "cancelled"
    assert record.ranks[0].stopped_by_us


def test_what_a_good_rank_left_running_ends_with_the_job(job: MakeJob, tmp_path: Path) -> None:
    one = job(sys.executable, "-c", DAEMON, str(tmp_path / "pid"), "0.5")
    assert one.run() == 0
    assert not lives(_pid_in(tmp_path / "pid"))


def test_a_killed_agent_takes_its_ranks_along_and_stop_finds_the_rest(job: MakeJob, tmp_path: Path) -> None:
    one = job(sys.executable, "-c", DAEMON, str(tmp_path / "pid"), "300")
    agent = one.agent()
    daemon = _pid_in(tmp_path / "pid")
    until(lambda: one.state() == "running")
    rank = one.record().ranks[0].pid
    agent.kill()
    agent.wait()
    until(lambda: not lives(rank))
    assert lives(daemon)
    assert one.verb("stop", grace_s=1)[1] == {"stopped": 1}
    assert not lives(daemon)


WARNED = """
import os, signal, sys, time
def stop(*_):
    print("saving", os.path.exists(os.environ["ZERUN_STOP_FILE"]), flush=True)
    sys.exit(75)
if "deaf" not in sys.argv:
    signal.signal(signal.SIGUSR2, stop)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


def test_the_warning_before_the_time_limit(job: MakeJob) -> None:
    one = job(sys.executable, "-c", WARNED, nodes=TWO, time_s=8, warn_s=4)
    assert one.run() == 75
    assert one.log(1) == b"up\nsaving True\n"
    assert one.record().failure is None


def test_the_time_limit(job: MakeJob) -> None:
    one = job(sys.executable, "-c", WARNED, "deaf", time_s=4, warn_s=120)
    begun = time.monotonic()
    assert one.run() == 124
    assert 3.9 < time.monotonic() - begun < 15
    record = one.record()
    assert record.failure is not None and record.failure.kind == "time_limit"
    assert (one.folder / "stop").exists()  # it was warned at half the time, and did not die of it
    assert record.ranks[0].signal == signal.SIGTERM and record.ranks[0].stopped_by_us


def test_the_warning_finds_a_program_behind_a_shell_but_not_its_helpers(job: MakeJob) -> None:
    helper = WARNED.replace('print("up", flush=True)', 'print("up", flush=True); os.fork()')
    one = job("sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, helper)
    agent = one.agent()
    until(lambda: one.log(0) == b"up\n")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(40) == 75
    assert one.log(0) == b"up\nsaving True\n"


def test_a_shell_may_trap_another_stop_signal(job: MakeJob) -> None:
    one = job("sh", "-c", "trap 'exit 75' USR1; echo up; while :; do sleep 0.1; done", stop_signal="USR1")
    agent = one.agent()
    until(lambda: one.log(0) == b"up\n")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(40) == 75


def test_usr2_to_the_agent_warns(job: MakeJob) -> None:
    one = job(sys.executable, "-c", WARNED)
    agent = one.agent()
    until(lambda: one.log(0) == b"up\n")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(40) == 75


def test_a_cancel_that_reaches_ranks_first_is_still_a_cancel(job: MakeJob) -> None:
    """Slurm signals every process of a step, and a rank may be quicker to die than we to read."""
    one = job("sleep", "60", nodes=TWO).with_settings("agent.supervise._ORDER_ON_ITS_WAY_S = 10.0")
    agent = one.agent()
    until(lambda: one.state() == "running")
    for rank in one.record().ranks:
        os.kill(rank.pid, signal.SIGTERM)
    log = one.folder / "logs" / "agent-localhost.log"
    until(lambda: log.read_text().count("killed by SIGTERM") == 2)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(40) == 143
    record = one.record()
    assert record.failure is not None and record.failure.kind == "cancelled"
    assert all(rank.stopped_by_us for rank in record.ranks)


def test_sixteen_ranks_that_write_much(job: MakeJob) -> None:
    one = job("sh", "-c", "head -c 3000000 /dev/zero", nodes=(Node("localhost", 16),))
    assert one.run(60) == 0
    assert [len(one.log(rank)) for rank in range(16)] == [3_000_000] * 16
