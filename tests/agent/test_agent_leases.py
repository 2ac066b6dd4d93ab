"""Slots on a node without a scheduler: locked by real agents, of two users, with what an enemy would put in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_job import PACKAGE, Job, MakeJob, until

from launcher.agent import leases, processes
from launcher.agent.leases import Wish
from launcher.contract.errors import Busy, Refused
from launcher.contract.launch import Node
from launcher.contract.leases import Lease
from launcher.contract.plain import dumps
from launcher.contract.records import ProcessId

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")
TAKE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from launcher.agent import leases, processes
from launcher.contract.leases import Lease
import os
lease = Lease(0, "?", "run-b", 1, "n1", time.time(), processes.process_id(os.getpid()))
leases.take(leases.Wish((0, 1), 1, False), lease)
print("taken", flush=True)
time.sleep(60)
"""
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) printf '0, GPU-aa\\n1, GPU-bb\\n3, GPU-cc\\n' ;;
  --query-compute-apps=*) printf 'GPU-bb, %s, /opt/other/python\\nGPU-cc, %s, nvidia-cuda-mps-server\\n' PID PID ;;
esac
"""


def node(slots: int, *among: int) -> tuple[Node, ...]:
    return (Node("localhost", slots, among=among),)


@pytest.fixture
def folder() -> Path:
    return Path(os.environ["ZERUN_LEASES"])


@pytest.fixture
def mine() -> Lease:
    own = processes.process_id(os.getpid())
    assert own is not None
    return Lease(0, "me", "run-a", 1, "n1", 1700000000.0, own)


@pytest.fixture
def enemy() -> Iterator[list[str]]:
    """What another user's command begins with."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    yield ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def test_a_second_run_is_refused_and_told_who_holds_what(job: MakeJob, tmp_path: Path) -> None:
    first = job(*SLEEP, nodes=node(2, 0, 1, 3), run="first")
    first.agent()
    until(lambda: first.state() == "running")
    assert first.record().leased == (0, 1)
    other = job(*SLEEP, nodes=node(2, 0, 1, 3), run="second", run_dir=str(tmp_path / "runs" / "run-2"))
    status, said = other.verb("start", node="localhost")
    assert status == 5 and said["busy"]
    for word in ("node localhost: 2 slots asked for, 1 of 3 is free: slot 0, 1 held by run first of ", " since 20"):
        assert word in said["error"], said
    assert said["error"].endswith(f"(pid {first.record().agent.pid})")
    assert not list((other.folder / "nodes").glob(".*.agent")) and not other.log(0)
    # There is room for a smaller one, on the slot that is left.
    small = job(*SLEEP, nodes=node(1, 0, 1, 3), run="small", run_dir=str(tmp_path / "runs" / "run-3"))
    status, said = small.verb("start", node="localhost")
    assert status == 0, said
    until(lambda: small.state() == "running")
    assert small.record().leased == (3,)
    small.verb("stop", grace_s=1)
    # However the holder ended, its slots are free.
    first.agents["localhost"].send_signal(signal.SIGKILL)
    first.agents["localhost"].wait()
    status, said = other.verb("start", node="localhost")
    assert status == 0, said
    other.verb("stop", grace_s=1)
    status, said = other.verb("slots", node="localhost", among=[0, 1, 3], count=3)
    assert said["free"] == [0, 1, 3] and said["refusal"] is None


def test_no_rank_starts_before_every_node_holds_its_slots(job: MakeJob, mine: Lease) -> None:
    """Another run took the second node's slot in the very moment between the question and the start."""
    nodes = tuple(Node(f"n{i}", 1, "127.0.0.1", among=(i,)) for i in range(2))
    one = job("sh", "-c", "echo begun", nodes=nodes)
    other = leases.take(Wish((1,), 1, False), mine)
    code, first = one.verb("start", node="n0")
    assert code == 0 and first["announcement"], first
    code, said = one.verb("start", node="n1", rendezvous=first["announcement"])
    assert code == 5 and said["busy"] and "node n1: 1 slot asked for, 0 of 1 are free" in said["error"]
    time.sleep(1.0)  # long enough for a rank to begin
    assert one.state("n0") == "starting" and not one.log(0) and not one.record("n0").ranks
    assert one.verb("stop", grace_s=1)[1] == {"stopped": 1}
    # The same attempt may come again on the node that began nothing; the lease of the first is free as well.
    other.release()
    again = job("sh", "-c", "echo begun", nodes=nodes, attempt=1, run="again", run_dir=f"{one.spec.run_dir}-again")
    for node in nodes:
        again.agent(node.name)
    assert [again.agents[n.name].wait(40) for n in nodes] == [0, 0] and again.log(1) == b"begun\n"


def test_the_devices_that_were_leased_are_what_ranks_see(job: MakeJob, tmp_path: Path) -> None:
    names = "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "CUDA_DEVICE_ORDER"
    show = f"import os; print(*map(os.environ.get, {names}))"
    holder = subprocess.Popen([sys.executable, "-c", TAKE, str(PACKAGE.parent)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"taken\n"  # slot 0
    try:
        made = job(sys.executable, "-c", show, nodes=node(2, 0, 1, 3), device_kind="gpu")
        assert made.run() == 0
        assert [made.log(rank) for rank in (0, 1)] == [b"1,3 0 PCI_BUS_ID\n", b"1,3 1 PCI_BUS_ID\n"]
    finally:
        holder.kill()
        holder.communicate()


def test_a_process_on_a_gpu_without_a_lease(job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = subprocess.Popen(["sleep", "60"])
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI.replace("PID", str(stranger.pid)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    try:
        made = job(*SLEEP, nodes=node(3, 0, 1, 3), device_kind="gpu")
        status, said = made.verb("slots", node="n7", among=[0, 1, 3], count=3, gpu=True)
        user = leases.user_name(os.geteuid())
        assert said["free"] == [0, 3] and status == 0  # the shared server computes nothing itself
        assert said["refusal"] == (
            f"node n7: 3 GPUs asked for, 2 of 3 are free: GPU 1 in use by pid {stranger.pid} of {user} (python), "
            "which has no lease"
        )
    finally:
        stranger.kill()
        stranger.wait()


def test_two_users(folder: Path, mine: Lease, enemy: list[str]) -> None:
    held = leases.take(Wish((0, 1), 1, False), mine)
    assert held.slots == (0,) and stat.S_IMODE(folder.stat().st_mode) == 0o1777
    for at in [folder, *folder.parents]:  # pytest's folders are root's alone
        if not at.stat().st_mode & 0o001:
            os.chmod(at, at.stat().st_mode | 0o011)
    package = folder / "package"
    for room in ("contract", "agent"):
        shutil.copytree(PACKAGE / room, package / "launcher" / room)
    (package / "launcher" / "__init__.py").write_text("")
    other = subprocess.Popen(
        [*enemy, "/usr/bin/python3", "-B", "-c", TAKE, str(package)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert other.stdout is not None and other.stdout.readline() == b"taken\n", other.communicate()
    try:
        with pytest.raises(Busy, match=r"slot 0 held by run run-a of root.*slot 1 held by run run-b of nobody") as busy:
            leases.take(Wish((0, 1), 1, False), mine)
        assert busy.value.exit_code == 5
    finally:
        other.kill()
        other.communicate()
    leases.take(Wish((0, 1), 1, False), mine).release()  # the file that nobody made, locked by root
    held.release()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_lies_in_the_way_is_not_followed(folder: Path, mine: Lease, tmp_path: Path, kind: str) -> None:
    leases.take(Wish((0,), 1, False), mine).release()
    (folder / "slot-0").unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    if kind == "link":
        (folder / "slot-0").symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(folder / "slot-0")
    else:
        (folder / "slot-0").mkdir()
    with pytest.raises(Refused, match="slot-0"):
        leases.take(Wish((0,), 1, False), mine)
    assert target.read_text() == "precious"


def test_a_name_that_another_took_costs_the_name_alone(folder: Path, mine: Lease, tmp_path: Path) -> None:
    leases.take(Wish((0,), 1, False), mine).release()
    target = tmp_path / "precious"
    target.write_text("precious")
    info = folder / f"slot-0.{os.geteuid()}.json"
    info.symlink_to(target)
    held = leases.take(Wish((0,), 1, False), mine)
    assert target.read_text() == "precious" and json.loads(info.read_text())["run"] == "run-a"
    info.unlink()
    info.write_text("no JSON")
    with pytest.raises(Busy, match="slot 0 held by a process that did not say who it is"):
        leases.take(Wish((0,), 1, False), mine)
    held.release()


@pytest.mark.parametrize("since", ["1e300", "-1e300", "1e400", "NaN"])
def test_no_time_that_another_wrote_stops_anybody(folder: Path, mine: Lease, since: str) -> None:
    held = leases.take(Wish((0,), 1, False), mine)
    info = folder / f"slot-0.{os.geteuid()}.json"
    info.write_text(info.read_text().replace("1700000000.0", since))
    with pytest.raises(Busy, match=r"slot 0 held by (run run-a .* an unknown time|a process that did not)"):
        leases.take(Wish((0,), 1, False), mine)
    held.release()


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**63, 10**30])
def test_no_number_that_another_wrote_stops_anybody(folder: Path, mine: Lease, pid: int, enemy: list[str]) -> None:
    leases.take(Wish((0,), 1, False), mine).release()
    theirs = dataclasses.replace(mine, process=ProcessId(pid, pid, ""), attempt=pid, sessions=(ProcessId(pid, 1, ""),))
    info = folder / "slot-0.65534.json"
    info.write_bytes(dumps(theirs))
    os.chown(info, 65534, 65534)
    held = leases.take(Wish((0,), 1, False), mine)
    with pytest.raises(Busy, match=rf"slot 0 held by run run-a .*\(pid {os.getpid()}\)"):
        leases.take(Wish((0,), 1, False), mine)
    held.release()
    assert leases.slots({"node": "n1", "among": [0], "count": 1})["free"] == [0]


def test_a_job_of_many_sessions_is_still_named(folder: Path, mine: Lease) -> None:
    many = tuple(ProcessId(100_000 + n, 123_456_789, mine.process.boot) for n in range(3000))
    held = leases.take(Wish((0,), 1, False), dataclasses.replace(mine, sessions=many))
    with pytest.raises(Busy, match="slot 0 held by run run-a"):
        leases.take(Wish((0,), 1, False), mine)
    held.release()


def test_a_folder_that_is_no_folder_for_all(folder: Path, mine: Lease, tmp_path: Path, enemy: list[str]) -> None:
    folder.symlink_to(tmp_path)
    with pytest.raises(Refused, match="is no folder for all users"):
        leases.take(Wish((0,), 1, False), mine)
    folder.unlink()
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(Refused, match="mode 1777") as refused:
        leases.take(Wish((0,), 1, False), mine)
    assert "nobody" in str(refused.value.hint)


def test_files_swept_away_are_made_anew(folder: Path, mine: Lease) -> None:
    held = leases.take(Wish((0,), 1, False), mine)
    os.utime(folder / "slot-0", (1, 1))
    held.beat()
    assert (folder / "slot-0").stat().st_mtime > 1e9
    held.release()


def test_unused(job: MakeJob) -> None:
    """A node of a scheduler's: no lease is asked for."""
    made: Job = job("true")
    assert made.run() == 0 and made.record().leased is None
    assert not Path(os.environ["ZERUN_LEASES"]).exists()
