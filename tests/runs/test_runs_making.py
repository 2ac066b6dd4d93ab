"""While an attempt is made: others see it, none doubles it, and a command that was killed blocks nobody."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import launcher.attempts.make
import launcher.runs.store
from launcher.attempts import Attempts, Made, made_of, take_attempt
from launcher.backends.protocol import Backend, Poll
from launcher.contract.errors import UsageError
from launcher.runs import Observation, Run, RunStore, fold

NAME = "job-20260101-000000-aaaa"
MAKER = """
import sys, time
from pathlib import Path
from launcher.attempts import Made, made_of, take_attempt
from launcher.runs import RunStore
run = RunStore(Path(sys.argv[1])).load(sys.argv[2])
with run.making():
    take_attempt(run, 2)
    print("made", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    store = RunStore(tmp_path / "runs")
    made = store.create(NAME, {"job_name": "job", "cluster_name": "c"})
    return store.append(made, "submitting", 1, 5.0, name="zerun-x", num_nodes=1)


def test_another_command_sees_it_and_stays_out_until_the_maker_is_killed(run: Run, project: Path) -> None:
    argv = [sys.executable, "-c", MAKER, str(run.folder.parent), NAME]
    with subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE) as maker:
        try:
            assert maker.stdout is not None and maker.stdout.readline() == b"made\n"
            assert run.is_being_made
            with pytest.raises(UsageError, match="being made by another command"), run.making():
                pass
        finally:
            maker.send_signal(signal.SIGKILL)
    assert not run.is_being_made
    with run.making():  # what it left behind does not stand in the way
        take_attempt(run, 2)
        assert run.is_being_made
    assert not run.is_being_made


def test_whoever_sees_a_new_run_sees_that_it_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, held = RunStore(tmp_path), []
    write = launcher.runs.store.write_atomically

    def spy(path: Path, *rest: Any, **more: Any) -> None:
        assert store.names() == []
        write(path, *rest, **more)
        held.append(store.load(NAME).is_being_made)

    monkeypatch.setattr(launcher.runs.store, "write_atomically", spy)
    with store.begin(NAME, {"job_name": "job", "cluster_name": "c"}) as run:
        assert held == [True] and run.is_being_made and store.names() == [NAME]
    assert not run.is_being_made


def test_what_was_made_since_its_journal_was_read_is_read_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its maker is done when its lock is looked at, and was not when its journal was."""
    store, asked = RunStore(run.folder.parent), []
    store.append(run, "submitted", 1, 6.0, handle={"backend": "direct", "data": {"agents": {}}})

    def observe(_: Any, runs: Sequence[Run]) -> list[Observation]:
        asked.extend(runs)
        return [Observation(poll=Poll("running"), attempt=1) for _ in runs]

    monkeypatch.setattr(launcher.attempts.make, "observe", observe)
    assert run.handle is None
    attempts = Attempts(store, None, run.folder / "templates")
    (state,) = attempts.look(cast("Backend", None), [run])
    assert state.state == "running" and asked[0].handle is not None


def test_an_attempt_that_was_submitted_is_not_taken_again(run: Run) -> None:
    run = RunStore(run.folder.parent).append(run, "submitting", 2, 6.0, name="zerun-x-2", num_nodes=1)
    with run.making(), pytest.raises(UsageError, match="attempt 2"):
        take_attempt(run, 2)


def test_a_run_that_is_being_made_has_not_failed(run: Run) -> None:
    seen = Observation(poll=Poll("absent"), attempt=1)
    assert fold(run, seen).state == "failed"
    making = Observation(poll=Poll("absent"), attempt=1, being_made=True)
    assert (fold(run, making).state, fold(run, making).ended) == ("submitting", False)


def test_nodes_that_are_gone_for_good_do_not_keep_a_run_open(run: Run) -> None:
    from test_runs import FIRST, node, rank

    ended = node(0, "ended", rank(0, signal=15, stopped_by_us=True), failure=FIRST)
    seen = Observation(
        poll=Poll("unknown", why="n1 is off"), attempt=1, records=(ended,), silent={"n1": "n1 is off"}, num_nodes=2
    )
    state = fold(run, seen)
    assert state.state == "failed" and state.notes == ("n1 did not answer: n1 is off",)


def test_an_attempt_is_made_with_what_the_ones_before_it_were_given(tmp_path: Path) -> None:
    """A requeued attempt is as the one before it; one whose submit failed leaves nothing behind."""
    store = RunStore(tmp_path)
    run = store.create("job-20260101-000000-cccc", {"plan": {"global_batch": 16}})
    assert made_of(run, 1) == Made((), 16, None)
    run = store.append(run, "submitting", 1, 5.0, name="x", num_nodes=2)  # of a launcher that wrote no assignments
    assert made_of(run, 1) == Made((), 16, 2)
    stage = ["zero.stage=3", "batch.global=32"]
    run = store.append(run, "submitting", 2, 6.0, name="x", num_nodes=4, sets=stage, global_batch=32)
    run = store.append(run, "submitting", 3, 7.0, name="x", num_nodes=1, sets=[*stage, "steps=9"], global_batch=64)
    run = store.append(run, "submit_failed", 3, 8.0, error="no")
    assert made_of(run, 1) == Made((), 16, 2)
    assert made_of(run, 2) == made_of(run, 4) == Made(tuple(stage), 32, 4)
    assert made_of(run, 3).sets[-1] == "steps=9"
    damaged = store.append(run, "submitting", 5, 9.0, name="x", sets="steps=9")
    with pytest.raises(UsageError, match="damaged"):
        made_of(damaged, 5)
