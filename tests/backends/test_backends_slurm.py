"""The Slurm backend over SSH on a real Slurm: submitted once, asked after in one batch, cancelled whole."""

from __future__ import annotations

import base64
import concurrent.futures
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_kit import PYTHON, RUNTIME, cluster_of, runtime, submission
from testbed.cluster import USERS, Testbed

from launcher import backends
from launcher.backends.protocol import Backend, Handle, Poll
from launcher.contract.errors import Refused, UsageError

Wait = Callable[..., None]


@pytest.fixture
def slurm(testbed: Testbed, tmp_path: Path) -> Iterator[Backend]:
    backend = backends.open(cluster_of(testbed, "slurm"), runtime(), tmp_path)
    yield backend
    backend.close()


@pytest.fixture
def bare(testbed_bare: Testbed, tmp_path: Path) -> Iterator[Backend]:
    backend = backends.open(cluster_of(testbed_bare, "slurm"), runtime(), tmp_path)
    yield backend
    backend.close()


def jobs_named(testbed: Testbed, name: str) -> list[str]:
    return testbed.exec("login", ["squeue", "-h", "-t", "all", "-o", "%A", "--name", name]).stdout.decode().split()


def until(backend: Backend, handle: Handle, states: set[str], wait_until: Wait, timeout_s: float = 90.0) -> Poll:
    seen: list[Poll] = []

    def reached() -> bool:
        seen.append(backend.poll([handle])[0])
        return seen[-1].state in states

    wait_until(reached, timeout_s, f"{handle} did not become {states}")
    return seen[-1]


LAB = ("--account=lab", "--partition=train")


@pytest.mark.parametrize("user", USERS)
def test_runs_lie_where_the_description_says_for_every_login_shell(testbed: Testbed, tmp_path: Path, user: str) -> None:
    backend = backends.open(cluster_of(testbed, "slurm", user), runtime(), tmp_path)
    (place,) = backend.places()
    assert place.runs == f"/home/{user}/zerun runs/{user}"
    assert (testbed.home(user) / "zerun runs" / user / ".blobs" / RUNTIME.name).read_bytes() == RUNTIME.data
    said = backend.call(place, "expand", {"paths": ["~/x", "/a b/$USER/${HOME}", "/plain/é"]})
    assert said["paths"] == [f"/home/{user}/x", f"/a b/{user}/home/{user}", "/plain/é"]
    with pytest.raises(Exception, match=r"\$NOT_SET_ANYWHERE is not set"):
        backend.call(place, "expand", {"paths": ["/x/$NOT_SET_ANYWHERE"]})
    backend.close()


def test_submitted_twice_is_one_job_also_when_its_id_was_lost(slurm: Backend, testbed: Testbed) -> None:
    runs = slurm.places()[0].runs
    made = submission(runs, "sleep 60", options=LAB)
    first = slurm.submit(made)
    assert slurm.submit(made) == first
    job_file = testbed.home() / "zerun runs/trainer" / made.run / "attempts/1/job"
    assert job_file.read_text().strip() == first.data["job"]
    job_file.unlink()  # as if the connection and the login node had died right after sbatch
    assert slurm.find(made.name, made.run, 1) == first
    assert slurm.submit(made) == first
    assert jobs_named(testbed, made.name) == [first.data["job"]]
    assert slurm.find("zerun-never-was", "never-was", 1) is None
    slurm.cancel(first, made.run, 1)


def test_a_job_that_left_the_queue_is_still_adopted_by_name(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    made = submission(slurm.places()[0].runs, "true", options=LAB)
    first = slurm.submit(made)
    until(slurm, first, {"ended"}, wait_until)
    (testbed.home() / "zerun runs/trainer" / made.run / "attempts/1/job").unlink()
    assert slurm.submit(made) == first


def test_many_submits_at_once_are_one_job(testbed: Testbed, slurm: Backend) -> None:
    runs = slurm.places()[0].runs
    made = submission(runs, "sleep 60", options=LAB)
    request = {
        "run_dir": f"{runs}/{made.run}", "attempt": 1, "name": made.name,
        "files": {"attempts/1/script": base64.b64encode(made.script).decode()},
        "sbatch": ["sbatch", "--parsable", f"{runs}/{made.run}/attempts/1/script"],
    }  # fmt: skip
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        said = list(pool.map(lambda _: slurm.call(slurm.places()[0], "submit", request, timeout_s=100), range(6)))
    assert len({answer["job"] for answer in said}) == 1
    assert sorted(answer["adopted"] for answer in said) == [False] + [True] * 5
    assert len(jobs_named(testbed, made.name)) == 1
    slurm.cancel(Handle("slurm", {"job": said[0]["job"]}), made.run, 1)


def test_a_lock_that_a_killed_submit_left_is_taken_over(slurm: Backend, testbed: Testbed) -> None:
    made = submission(slurm.places()[0].runs, "sleep 60", options=LAB)
    lock = f"{slurm.places()[0].runs}/{made.run}/attempts/1/submitting"
    owner = {"host": "login", "process": {"pid": 1, "started_ticks": 1, "boot": "another"}}
    testbed.exec("login", ["sh", "-c", 'mkdir -p "$1"; cat > "$1/owner"', "x", lock], stdin=json.dumps(owner).encode())
    handle = slurm.submit(made)
    assert len(jobs_named(testbed, made.name)) == 1
    slurm.cancel(handle, made.run, 1)


def test_states_from_pending_to_gone_in_one_batch(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    runs = slurm.places()[0].runs
    stuck = submission(runs, "true", options=["--account=lab", "--partition=tiny", "--nodes=4"], nodes=4)
    long = submission(runs, "sleep 300", options=[*LAB, "--nodes=2"], nodes=2)
    well = submission(runs, "exit 0", options=LAB)
    bad = submission(runs, "exit 7", options=LAB)
    killed = submission(runs, "kill -9 $$", options=LAB)
    handles = [slurm.submit(s) for s in (stuck, long, well, bad, killed)]
    for handle in handles[2:]:
        until(slurm, handle, {"ended"}, wait_until)
    until(slurm, handles[1], {"running"}, wait_until)
    until(slurm, handles[0], {"queued"}, wait_until)
    wait_until(
        lambda: all(p.exit_code is not None or p.signal is not None for p in slurm.poll(handles[2:])),
        60, "accounting never told how they ended",
    )  # fmt: skip
    nobody = Handle("slurm", {"job": "999999"})
    polls = slurm.poll([*handles, nobody])
    assert [p.state for p in polls] == ["queued", "running", "ended", "ended", "ended", "absent"]
    assert "more nodes than its partition allows" in polls[0].why and "PartitionNodeLimit" in polls[0].why
    assert polls[1].nodes and len(polls[1].nodes) == 2
    assert (polls[2].word, polls[2].exit_code) == ("COMPLETED", 0)
    assert (polls[3].word, polls[3].exit_code, polls[3].signal) == ("FAILED", 7, None)
    assert (polls[4].exit_code, polls[4].signal) == (None, 9)
    for handle, made in zip(handles[:2], (stuck, long), strict=True):
        slurm.cancel(handle, made.run, 1)
        slurm.cancel(handle, made.run, 1)  # twice is no fault
    assert [(p.state, p.word) for p in slurm.poll(handles[:2])] == [("ended", "CANCELLED")] * 2


def test_cancel_leaves_no_process(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    mark = "31415926"
    body = f"trap '' TERM; (trap '' TERM; setsid sleep {mark}) & srun --overlap sleep {mark} & sleep {mark}"
    made = submission(slurm.places()[0].runs, body, options=[*LAB, "--nodes=2", "--ntasks=2"], nodes=2)
    handle = slurm.submit(made)

    def running() -> list[str]:
        return [line for node in testbed.nodes for line in testbed.processes(node, f"sleep {mark}")]

    wait_until(lambda: len(running()) >= 4, 90, "the job did not start")
    slurm.cancel(handle, made.run, 1)
    wait_until(lambda: not running(), 60, "processes were left")


def test_what_slurm_granted(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    runs = slurm.places()[0].runs
    options = [*LAB, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--mem=1500M"]
    made = submission(
        runs,
        'scontrol show job "$SLURM_JOB_ID" > granted; srun sh -c "hostname; nproc" > tasks',
        options=[*options, f'--chdir="{runs}"'],
    )
    handle = slurm.submit(made)
    until(slurm, handle, {"ended"}, wait_until)
    granted = (testbed.home() / "zerun runs/trainer/granted").read_text()
    assert "NumNodes=2" in granted and "cpu=12,mem=3000M" in granted
    assert (testbed.home() / "zerun runs/trainer/tasks").read_text().count("node") == 2


def test_the_submit_verb_is_deaf_to_an_outer_job(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    place = slurm.places()[0]
    made = submission(place.runs, "sleep 60", options=LAB)
    request: dict[str, Any] = {
        "run_dir": f"{place.runs}/{made.run}", "attempt": 1, "name": made.name, "files": {},
        "sbatch": ["sbatch", "--parsable", f"{place.runs}/{made.run}/attempts/1/script"],
    }  # fmt: skip
    request["files"] = {"attempts/1/script": base64.b64encode(made.script).decode()}
    spoiled = ["env", "SBATCH_PARTITION=closed", "SLURM_NTASKS_PER_NODE=9", "SBATCH_TIMELIMIT=1", "SQUEUE_FORMAT=%j"]
    argv = [*spoiled, PYTHON, f"{place.runs}/.blobs/{RUNTIME.name}", "submit"]
    done = testbed.exec("login", argv, stdin=json.dumps(request).encode())
    job = json.loads(done.stdout)["job"]
    shown = testbed.exec("login", ["scontrol", "show", "job", job]).stdout.decode()
    assert "Partition=train" in shown and "TimeLimit=01:00:00" in shown
    slurm.cancel(Handle("slurm", {"job": job}), made.run, 1)


def test_a_job_that_slurm_refuses_leaves_no_secret_and_says_why(slurm: Backend, testbed: Testbed) -> None:
    runs = slurm.places()[0].runs
    made = submission(runs, "true", options=["--account=nobody"], secret={"KEY": "planted-5813"})
    with pytest.raises(UsageError, match="Invalid account") as refused:
        slurm.submit(made)
    assert "sbatch: error" not in refused.value.message
    assert not (testbed.home() / f"zerun runs/trainer/.secrets/{made.run}.json").exists()


def test_secrets_lie_in_one_file_of_the_user_alone(slurm: Backend, testbed: Testbed) -> None:
    runs = slurm.places()[0].runs
    made = submission(runs, "sleep 60", options=[*LAB, "--hold"], secret={"KEY": "planted-2718"})
    handle = slurm.submit(made)
    file = testbed.home() / f"zerun runs/trainer/.secrets/{made.run}.json"
    assert json.loads(file.read_bytes()) == {"KEY": "planted-2718"}
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    found = testbed.exec("login", ["grep", "-rl", "planted-2718", "/home/trainer"], check=False).stdout.decode()
    assert found.strip().split("\n") == [str(file).replace(str(testbed.state), "")]
    assert "held by its owner" in slurm.poll([handle])[0].why
    slurm.cancel(handle, made.run, 1)
    assert not file.exists()


def test_without_accounting(bare: Backend, testbed_bare: Testbed, wait_until: Wait) -> None:
    runs = bare.places()[0].runs
    long = submission(runs, "sleep 300")
    short = submission(runs, "exit 3")
    handles = [bare.submit(long), bare.submit(short)]
    until(bare, handles[0], {"running"}, wait_until)
    until(bare, handles[1], {"absent"}, wait_until)  # forgotten 2 s after its end; nobody else knows
    assert [p.state for p in bare.poll(handles)] == ["running", "absent"]
    (testbed_bare.home() / "zerun runs/trainer" / long.run / "attempts/1/job").unlink()
    assert bare.find(long.name, long.run, 1) == handles[0]
    bare.cancel(handles[0], long.run, 1)
    assert bare.poll(handles)[0].state in ("ended", "absent")


def test_a_deaf_controller_is_unknown_and_never_absent(bare: Backend, testbed_bare: Testbed, wait_until: Wait) -> None:
    made = submission(bare.places()[0].runs, "sleep 300")
    handle = bare.submit(made)
    pid = testbed_bare.exec("login", ["pgrep", "-x", "slurmctld"], user=None).stdout.decode().strip()
    testbed_bare.exec("login", ["kill", pid], user=None)  # it saves its state and ends
    wait_until(lambda: not testbed_bare.processes("login", "slurmctld"), 60, "slurmctld did not end")
    try:
        (poll,) = bare.poll([handle])
        assert poll.state == "unknown" and "squeue" in poll.why
    finally:
        testbed_bare.exec("login", ["slurmctld"], user=None)
    until(bare, handle, {"running"}, wait_until)
    bare.cancel(handle, made.run, 1)


def test_claim_is_taken_once_and_a_requeue_gets_the_next(slurm: Backend, testbed: Testbed, wait_until: Wait) -> None:
    runs = slurm.places()[0].runs
    argv = f'"{PYTHON}" "{runs}/.blobs/{RUNTIME.name}" claim --run-dir "$PWD" --attempt 1'
    body = f"{argv} >> claims; [ -e again ] || {{ touch again; scontrol requeue $SLURM_JOB_ID; sleep 60; }}; sleep 60"
    made = submission(runs, body, options=[*LAB, "--requeue"])
    run_dir = f"{runs}/{made.run}"
    script = made.script.replace(b"#SBATCH --output", f'#SBATCH --chdir="{run_dir}"\n#SBATCH --output'.encode())
    made = dataclasses.replace(made, script=script, files={**made.files, "attempts/1/script": script})
    handle = slurm.submit(made)
    here = testbed.home() / "zerun runs/trainer" / made.run
    wait_until(lambda: (here / "again").exists(), 90, "the job did not start")
    job = handle.data["job"]
    waits = ["squeue", "-h", "-j", job, "-o", "%T"]
    wait_until(lambda: testbed.exec("login", waits).stdout == b"PENDING\n", 60, "it was not queued again")
    time.sleep(2.0)  # a node takes no job back within the second in which it killed it

    def release() -> bool:  # a requeued job would wait two minutes by itself
        testbed.exec("login", ["scontrol", "update", f"JobId={job}", "StartTime=now"], check=False)
        return (here / "claims").read_text().split() == ["1", "2"]

    wait_until(release, 60, "the requeued script did not claim attempt 2", every_s=1.0)
    second = json.loads((here / "attempts/2/launch.json").read_bytes())
    first = json.loads((here / "attempts/1/launch.json").read_bytes())
    assert (first["job_id"], first["restart_count"]) == (job, 0)
    assert (second["attempt"], second["job_id"], second["restart_count"]) == (2, job, 1)
    assert second["token"] != first["token"]
    assert (here / "attempts/2/script").read_bytes() == script
    # The same script handed in by somebody else is another job: it may not begin what is not its own.
    other = [
        "env",
        "SLURM_JOB_ID=424242",
        PYTHON,
        f"{runs}/.blobs/{RUNTIME.name}",
        "claim",
        "--run-dir",
        run_dir,
        "--attempt",
        "1",
    ]
    refused = testbed.exec("login", other, check=False)
    assert refused.returncode == Refused.exit_code and b"belongs to job" in refused.stderr
    slurm.cancel(handle, made.run, 1)


def test_check_says_what_a_job_would_meet(slurm: Backend, testbed: Testbed, node_python: str, tmp_path: Path) -> None:
    login, partition, trial = slurm.check()
    assert not login.ok and "-m pip install torch" in "\n".join(login.problems)
    assert partition.ok and partition.facts["time_max"] == "01:00:00"
    mistyped = cluster_of(testbed, "slurm", python=node_python, slurm={"partition": "trian"})
    assert "knows no partition 'trian'" in backends.open(mistyped, runtime(), tmp_path).check()[1].problems[0]
    assert trial.ok and "to start at" in trial.facts["says"]
    good = cluster_of(testbed, "slurm", python=node_python, slurm={"partition": "closed", "account": "none"})
    backend = backends.open(good, runtime(), tmp_path)
    began = time.monotonic()
    login, partition, trial = backend.check()
    took_s = time.monotonic() - began
    backend.close()
    assert login.ok and login.facts["torch"] and abs(login.facts["clock_offset_s"]) < max(1.0, took_s / 2)
    assert not partition.ok and "DOWN" in partition.problems[0]
    assert not trial.ok and "Invalid account" in trial.problems[0]


ON_THE_LOGIN_NODE = """
import sys
from pathlib import Path
from backend_kit import RUNTIME, runtime, submission
from launcher import backends
from launcher.specs import cluster_from_plain

keys = {"name": "here", "backend": "slurm", "nodes": {"slots": 1}, "agent_python": "/usr/bin/python3"}
backend = backends.open(cluster_from_plain({**keys, "paths": {"runs": "/home/root runs"}}), runtime(), Path("/x"))
made = submission(backend.places()[0].runs, "sleep 60")
handle = backend.submit(made)
assert backend.submit(made) == handle
print(backend.places()[0].transport.name, backend.poll([handle])[0].state)
backend.cancel(handle, made.run, 1)
print(backend.poll([handle])[0].word)
"""


def test_on_the_login_node_itself(testbed: Testbed, project: Path) -> None:
    path = f"PYTHONPATH={project}:{project}/tests:{project}/tests/backends"
    argv = ["env", path, "SLURM_JOB_ID=77", "SBATCH_PARTITION=closed", sys.executable, "-c", ON_THE_LOGIN_NODE]
    said = testbed.exec("login", argv, user=None, timeout_s=180).stdout.decode().splitlines()
    assert said[0].startswith("this machine ") and said[1] == "CANCELLED"
