"""The run store keeps what happened; the fold says what a run is, and says so when it is not known."""

from __future__ import annotations

import dataclasses
import datetime
import resource
from pathlib import Path
from typing import Any, Literal

import pytest

from launcher.backends.protocol import Handle, Poll
from launcher.contract.errors import UsageError
from launcher.contract.plain import to_plain
from launcher.contract.records import Failure, NodeRecord, Outcome, ProcessId, RankRecord
from launcher.runs import Observation, Run, RunStore, fold

AGENT = ProcessId(10, 1, "boot")


def rank(number: int, code: int | None = None, signal: int | None = None, **more: Any) -> RankRecord:
    ended = 20.0 if (code is not None or signal is not None) else None
    return RankRecord(number, number % 2, 100 + number, 10.0, ended_at=ended, exit_code=code, signal=signal, **more)


def node(number: int, state: str, *ranks: RankRecord, failure: Failure | None = None, **more: Any) -> NodeRecord:
    ended = 21.0 if state == "ended" else None
    return NodeRecord(
        f"n{number}", number, AGENT, state, 10.0, 20.0, ranks=ranks, failure=failure, ended_at=ended, **more
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    store = RunStore(tmp_path / "runs")
    made = store.create("job-20260101-000000-aaaa", {"job_name": "job", "cluster_name": "c", "backend": "slurm"})
    made = store.append(made, "submitting", 1, 5.0, name="zerun-x", num_nodes=2)
    return store.append(made, "submitted", 1, 6.0, handle=to_plain(Handle("slurm", {"job": "7"})))


def seen(poll: Poll, *records: NodeRecord, **more: Any) -> Observation:
    alive = frozenset(r.node for r in records if r.state != "ended")
    base = Observation(poll=poll, attempt=1, records=records, alive=alive, num_nodes=2)
    return dataclasses.replace(base, **more)


RUNNING, QUEUED, ABSENT = Poll("running", "RUNNING"), Poll("queued", "PENDING", why="Resources"), Poll("absent")
DOWN = Poll("unknown", why="login did not answer")
ALL_ZERO = (node(0, "ended", rank(0, 0), rank(1, 0)), node(1, "ended", rank(2, 0), rank(3, 0)))
FIRST = Failure("rank_exit", "n1", "rank 3 on n1 exited with 7", rank=3, exit_code=7, at=20.0)
ONE_SEVEN = (
    node(0, "ended", rank(0, signal=15, stopped_by_us=True), rank(1, signal=15, stopped_by_us=True), failure=FIRST),
    node(1, "ended", rank(2, signal=15, stopped_by_us=True), rank(3, 7), failure=FIRST),
)
LIMIT = Failure("time_limit", "n0", "time limit of 60 s", at=30.0)
AT_LIMIT = (
    node(0, "ended", rank(0, signal=15, stopped_by_us=True), failure=LIMIT),
    node(1, "ended", rank(1, signal=15, stopped_by_us=True), failure=LIMIT),
)
STOPPED = Outcome("stopped", 30, checkpoint=30)


@pytest.mark.parametrize(
    ("observation", "state", "exit_code"),
    [
        (seen(QUEUED), "queued", None),
        (seen(RUNNING), "running", None),
        (seen(RUNNING, node(0, "running", rank(0))), "running", None),
        (seen(ABSENT, *ALL_ZERO), "done", 0),
        (seen(DOWN, *ALL_ZERO), "done", 0),  # the agents said how it ended: the scheduler is not needed
        (seen(RUNNING, *ONE_SEVEN), "failed", 1),
        (seen(ABSENT, *AT_LIMIT), "time_limit", 124),
        (seen(ABSENT, *AT_LIMIT, attempt_checkpoints=(30,)), "time_limit", 75),
        (seen(ABSENT, *AT_LIMIT, outcome=STOPPED), "stopped", 75),
        (seen(Poll("ended", "TIMEOUT")), "time_limit", 124),
        (seen(Poll("ended", "CANCELLED")), "cancelled", 9),
        (seen(Poll("ended", "FAILED", why="NonZeroExitCode")), "failed", 1),
        (seen(DOWN), "unknown", None),
        (seen(RUNNING, node(0, "running", rank(0)), alive=frozenset()), "running", None),
        (seen(DOWN, node(0, "running", rank(0)), alive=frozenset()), "unknown", None),
        (seen(ABSENT, node(0, "running", rank(0)), node(1, "running", rank(1)), alive=frozenset()), "failed", 1),
        (seen(ABSENT, node(0, "running", rank(0)), alive=frozenset(), silent={"n1": "no answer"}), "unknown", None),
    ],
)
def test_fold(run: Run, observation: Observation, state: str, exit_code: int | None) -> None:
    told = fold(run, observation)
    assert (told.state, told.exit_code) == (state, exit_code), told


LOST = Failure("node_lost", "n1", "node n1 is lost: no word for 10 s", at=20.0)


@pytest.mark.parametrize("backend", ["direct", "slurm"])
def test_a_machine_without_power_does_not_keep_a_run_open(tmp_path: Path, backend: Literal["direct", "slurm"]) -> None:
    """On a shared disk its record lies as it stood: it is the others' word that counts, where nobody requeues."""
    store = RunStore(tmp_path)
    made = store.create("j-20260101-000000-dddd", {"backend": backend})
    made = store.append(made, "submitting", 1, 5.0, name="n", num_nodes=2)
    made = store.append(made, "submitted", 1, 6.0, handle=to_plain(Handle(backend, {"agents": {}})))
    stood = (node(0, "ended", rank(0, signal=15, stopped_by_us=True), failure=LOST), node(1, "running", rank(1)))
    told = fold(made, seen(DOWN, *stood, alive=frozenset()))
    assert told.state == ("failed" if backend == "direct" else "unknown"), told
    if backend == "direct":
        assert "n1" in told.why
    # It went off after the end, before anybody looked: all was well, or no other's record would say so.
    well = fold(made, seen(DOWN, ALL_ZERO[0], alive=frozenset(), silent={"n1": "no route to host"}))
    assert well.state == ("done" if backend == "direct" else "unknown"), well
    old = fold(made, seen(DOWN, ALL_ZERO[0], stood[1], alive=frozenset()))
    assert old.state == well.state, old
    # While an agent lives, the run does; without any agent's word nothing is known.
    assert fold(made, seen(RUNNING, *stood, alive=frozenset(["n1"]))).state == "running"
    assert fold(made, seen(RUNNING, *stood, alive=frozenset())).state == "running"
    assert fold(made, seen(DOWN, stood[1], alive=frozenset())).state == "unknown"


def test_a_rank_that_exits_75_is_a_failure_without_the_engines_own_record(run: Run) -> None:
    first = Failure("rank_exit", "n0", "rank 0 exited with 75", rank=0, exit_code=75, at=20.0)
    records = (node(0, "ended", rank(0, 75), failure=first), node(1, "ended", rank(1, signal=15, stopped_by_us=True)))
    assert fold(run, seen(ABSENT, *records)).exit_code == 1


def test_a_program_that_exits_75_when_it_was_asked_to_stop_is_stopped(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    made = store.create("j-20260101-000000-cccc", {"job": {"program": {"argv": ["x"]}}})
    store.append(made, "submitting", 1, 5.0, name="n", num_nodes=2)
    program = store.load(made.name)
    asked = (node(0, "ended", rank(0, 75), stop_sent_at=20.0), node(1, "ended", rank(1, 0), stop_sent_at=20.0))
    told = fold(program, seen(ABSENT, *asked))
    assert (told.state, told.exit_code, told.cause) == ("stopped", 75, None)
    by_itself = (node(0, "ended", rank(0, 75)), node(1, "ended", rank(1, 0)))
    assert fold(program, seen(ABSENT, *by_itself)).state == "failed"
    other = (node(0, "ended", rank(0, 3), stop_sent_at=20.0), node(1, "ended", rank(1, 75), stop_sent_at=20.0))
    assert fold(program, seen(ABSENT, *other)).state == "failed"


TOLD = Failure("cancelled", "n0", "the agent on n0 was told to stop", at=20.0)
TO_END = tuple(node(i, "ended", rank(i, signal=15, stopped_by_us=True), failure=TOLD) for i in (0, 1))
CUT_OFF = (TO_END[0], node(1, "ended", rank(1, signal=15, stopped_by_us=True), failure=LOST))
KILLED = (node(0, "running", rank(0)), node(1, "running", rank(1)))
CANCELLED, TIMEOUT = Poll("ended", "CANCELLED"), Poll("ended", "TIMEOUT")


@pytest.mark.parametrize(
    ("observation", "tried", "reached"),
    [
        (seen(ABSENT, *ALL_ZERO), "done", "done"),
        # What had ended by itself before anybody told it to.
        (seen(ABSENT, *ONE_SEVEN), "failed", "failed"),
        (seen(CANCELLED, *ONE_SEVEN), "failed", "failed"),
        (seen(ABSENT, *AT_LIMIT), "time_limit", "time_limit"),
        (seen(ABSENT, *AT_LIMIT, outcome=STOPPED), "stopped", "stopped"),
        (seen(TIMEOUT, *TO_END), "time_limit", "time_limit"),
        # Told to end: agents heard it, also when whoever told them was killed before it wrote that down.
        (seen(ABSENT, *TO_END), "cancelled", "cancelled"),
        (seen(ABSENT, *CUT_OFF), "cancelled", "cancelled"),
        (seen(DOWN, TO_END[0], silent={"n1": "no answer"}), "cancelled", "cancelled"),
        (seen(CANCELLED), "cancelled", "cancelled"),
        (seen(CANCELLED, *KILLED, alive=frozenset()), "cancelled", "cancelled"),
        # Agents without a last word: only a cancel that came through explains them.
        (seen(ABSENT, *KILLED, alive=frozenset()), "failed", "cancelled"),
        # Slurm has forgotten what never began.
        (seen(ABSENT), "cancelled", "cancelled"),
        (seen(Poll("ended", "FAILED")), "failed", "cancelled"),
        # It goes on: it was not reached, or Slurm begins it again.
        (seen(RUNNING, *KILLED), "running", "running"),
        (seen(QUEUED, *TO_END), "queued", "cancelled"),
    ],
)
def test_a_cancel_that_began_says_nothing_of_the_end(
    run: Run, tmp_path: Path, observation: Observation, tried: str, reached: str
) -> None:
    store = RunStore(tmp_path / "runs")
    begun = store.append(run, "cancelling", 1, 7.0)
    assert fold(begun, observation).state == tried
    assert fold(store.append(begun, "cancelled", 1, 8.0), observation).state == reached


def test_a_cancel_that_failed_is_not_when_the_run_ended(run: Run, tmp_path: Path) -> None:
    begun = RunStore(tmp_path / "runs").append(run, "cancelling", 1, 7.0)
    assert fold(begun, seen(Poll("ended", "FAILED"))).since is None
    assert fold(begun, seen(ABSENT)).since == 7.0


def test_the_first_failing_rank_is_named(run: Run) -> None:
    told = fold(run, seen(ABSENT, *ONE_SEVEN, last_lines={3: ["boom"]}))
    assert told.cause is not None and (told.cause.rank, told.cause.node) == (3, "n1")
    assert "rank 3" in told.why and "7" in told.why


def test_a_run_without_a_handle(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    lost = store.append(store.create("j-20260101-000000-bbbb", {}), "submitting", 1, 5.0, name="n", num_nodes=1)
    assert fold(lost, seen(DOWN)).state == "unknown"
    assert fold(lost, seen(ABSENT)).state == "failed"
    refused = store.append(lost, "submit_failed", 1, 6.0, error="invalid partition")
    assert "invalid partition" in fold(refused, seen(ABSENT)).why


def test_the_journal_survives_a_crash_in_the_middle_of_a_line(run: Run, tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    with open(run.folder / "events.jsonl", "ab") as journal:
        journal.write(b'{"at": 7.0, "event": "cancel')
    assert [e.event for e in store.load(run.name).events] == ["submitting", "submitted"]
    store.append(store.load(run.name), "cancelling", 1, 8.0)
    assert [e.event for e in store.load(run.name).events] == ["submitting", "submitted", "cancelling"]


def test_a_line_that_found_room_for_a_part_of_it_is_no_event(run: Run, tmp_path: Path) -> None:
    store, limit = RunStore(tmp_path / "runs"), resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (run.folder / "events.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limit[1]))
    try:
        with pytest.raises(OSError, match=r"No space left.*events\.jsonl"):
            store.append(run, "cancelling", 1, 8.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [e.event for e in store.load(run.name).events] == ["submitting", "submitted"]
    store.append(store.load(run.name), "cancelling", 1, 9.0)
    assert [e.event for e in store.load(run.name).events] == ["submitting", "submitted", "cancelling"]


def test_names_resolve_by_beginning_and_last(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    first = store.new_name("zeta", datetime.datetime(2026, 1, 1))
    second = store.new_name("alpha", datetime.datetime(2026, 1, 2))
    for name in (second, first):
        store.create(name, {})
    assert store.names() == [first, second]
    assert store.resolve("last") == second
    assert store.resolve("zet") == first
    with pytest.raises(UsageError, match="no run 'x'"):
        store.resolve("x")
    store.create(store.new_name("alphabet", datetime.datetime(2026, 1, 3)), {})
    with pytest.raises(UsageError, match="means 2 runs"):
        store.resolve("alpha")
    with pytest.raises(UsageError):
        store.resolve("../etc")
