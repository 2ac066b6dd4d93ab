"""Files at home that were damaged or changed from outside: told of by name, and never worse than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.app import App
from launcher.backends.protocol import Handle, Poll
from launcher.contract.errors import UsageError
from launcher.contract.plain import to_plain
from launcher.runs import Observation, Run, RunStore, fold

NAME = "job-20260101-000000-aaaa"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    store = RunStore(tmp_path / "runs")
    made = store.create(NAME, {"job_name": "job", "cluster_name": "c", "backend": "direct"})
    made = store.append(made, "submitting", 1, 5.0, name="zerun-x", num_nodes=1, runtime="a.zip")
    made = store.append(made, "submitted", 1, 6.0, handle=to_plain(Handle("direct", {"agents": {}})))
    return store.append(made, "ended", 1, 7.0, state="done", exit_code=0, why="", since=7.0)


@pytest.mark.parametrize(
    "content",
    [b"", b'{"job_name": "jo', b"[1]", b"null", b'"text"', b"[" * 200_000, b"\xff\xfe", b'{"cluster": "x"}',
     b'{"job": 1}', b'{"time_s": "long"}'],
)  # fmt: skip
def test_a_damaged_run_json_is_named_and_hides_no_other_run(run: Run, content: bytes) -> None:
    store = RunStore(run.folder.parent)
    (run.folder / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        store.load(NAME)
    other = store.create("job-20260101-000001-bbbb", {"job_name": "job", "cluster_name": "c"})
    other = store.append(other, "submitting", 1, 5.0, name="zerun-y", num_nodes=1, runtime="a.zip")
    store.append(other, "ended", 1, 7.0, state="done", exit_code=0, why="", since=7.0)
    states = {s.run: s for s in App(run.folder.parent.parent).list_runs()}
    assert (states[NAME].state, states[other.name].state) == ("unknown", "done")
    assert "run.json" in states[NAME].why


def test_a_key_that_is_gone_from_run_json_is_named(run: Run) -> None:
    with pytest.raises(UsageError, match=r"run\.json is damaged: 'cluster' is missing"):
        App(run.folder.parent.parent).status(NAME)


@pytest.mark.parametrize(
    "line",
    ["garbage", "[1]", "{}", "5", "null", "[" * 200_000, '{"at":1}', '{"at":"x","event":5,"attempt":"q","data":3}',
     '{"at":1,"event":"ended","attempt":1,"data":{"state":"nonsense"}}',
     '{"at":1,"event":"ended","attempt":1,"data":{}}', '{"at":1,"event":"ended","attempt":1,"data":[]}'],
)  # fmt: skip
def test_a_line_of_the_journal_that_says_nothing_is_passed_over(run: Run, line: str) -> None:
    with (run.folder / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    loaded = RunStore(run.folder.parent).load(NAME)
    assert [e.event for e in loaded.events] == ["submitting", "submitted", "ended"]
    assert [s.state for s in App(run.folder.parent.parent).list_runs()] == ["done"]


@pytest.mark.parametrize("handle", [None, 5, {"backend": "direct"}, {"backend": "direct", "data": {"agents": 5}}])
def test_a_handle_that_is_none_lets_the_job_be_found_by_its_name(run: Run, handle: Any) -> None:
    record = {"at": 9.0, "event": "submitted", "attempt": 1, "data": {"handle": handle}}
    with (run.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    assert RunStore(run.folder.parent).load(NAME).handle is None


def test_a_journal_that_lacks_a_word_says_so(run: Run) -> None:
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"at":9.0,"event":"submitting","attempt":2,"data":{}}\n')
    with pytest.raises(UsageError, match=r"events\.jsonl, 'submitting' is damaged: 'runtime' is missing"):
        App(run.folder.parent.parent).status(NAME)


def test_why_a_submit_failed_outlives_what_its_undoing_left(run: Run) -> None:
    store = RunStore(run.folder.parent)
    run = store.append(run, "submitting", 2, 8.0, name="zerun-x-2", num_nodes=2, runtime="a.zip")
    run = store.append(run, "submit_failed", 2, 9.0, error="n1: setup: line 1 failed")
    state = fold(run, Observation(poll=Poll("absent"), attempt=2, num_nodes=2))
    assert (state.state, state.why) == ("failed", "it was not submitted: n1: setup: line 1 failed")


def test_a_run_that_was_done_stays_done_when_its_nodes_forget(run: Run) -> None:
    """Scratch disks are wiped, nodes are switched off, a record gets damaged: what was seen to end has ended so."""
    wiped = Observation(poll=Poll("ended"), attempt=1, num_nodes=2)
    off = Observation(poll=Poll("unknown", why="n1 is off"), attempt=1, silent={"n1": "n1 is off"}, num_nodes=2)
    for seen in (wiped, off):
        state = fold(run, seen)
        assert (state.state, state.exit_code) == ("done", 0)
    never_seen = RunStore(run.folder.parent).append(run, "submitting", 2, 9.0, name="zerun-x-2", num_nodes=2)
    never_seen = RunStore(run.folder.parent).append(
        never_seen, "submitted", 2, 9.0, handle=to_plain(Handle("direct", {"agents": {}}))
    )
    assert fold(never_seen, Observation(poll=Poll("ended"), attempt=2, num_nodes=2)).state == "failed"
