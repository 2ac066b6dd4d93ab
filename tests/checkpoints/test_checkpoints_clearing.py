"""Removing what lies on machines of which one is off."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_places import LocalBackend, Log, attempt_at, local_backend

from launcher.app import App
from launcher.attempts import not_known
from launcher.clearing import Clearing, clear, look
from launcher.cli import clear as verb
from launcher.contract.errors import PartialAnswer
from launcher.runs import Run, RunState, RunStore

NAME = "job-20260101-000000-aaaa"
OVER = RunState(NAME, "job", "rack", "done", 1, exit_code=0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return RunStore(tmp_path / "runs").create(NAME, {"job_name": "job"})


@pytest.fixture
def two(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "there", ["n1", "n2"])
    for place in backend.places():
        Log(attempt_at(place, NAME), 0).write(b"line\n")
    return backend


def asked(backend: LocalBackend, run: Run) -> Clearing:
    return look(backend, run, OVER, remote=True, local=False)  # type: ignore[arg-type]


def test_what_answers_is_cleared_and_home_stays_to_find_the_rest(
    run: Run, two: LocalBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    n1, n2 = (Path(place.runs) / NAME for place in two.places())
    two.down.add("n2")
    clearing = asked(two, run)
    assert [heap.where for heap in clearing.heaps] == ["n1"]
    assert "  not answering: n2; what lies there and at home stays" in verb.clearing_lines(clearing)
    clear(two, clearing)  # type: ignore[arg-type]
    assert not n1.exists() and n2.is_dir() and run.folder.is_dir()
    with pytest.raises(PartialAnswer, match="nothing lies where somebody answers, and n2: no route") as told:
        asked(two, run)
    assert f"zerun rm {NAME} --remote once more" in str(told.value.hint)
    two.down.clear()
    clear(two, asked(two, run))  # type: ignore[arg-type]
    assert not n2.exists() and not run.folder.exists()

    monkeypatch.chdir(run.folder.parent.parent)
    monkeypatch.setattr(App, "resolve", lambda _, name: name)
    monkeypatch.setattr(App, "remove", lambda _, name, **more: clearing)
    with pytest.raises(PartialAnswer, match=rf"{NAME}: what lies on n2 and at home stays\nn2: no route") as left:
        verb.rm_verb([NAME], remote=True, yes=True)
    assert f"{NAME}  removed on n1, " in capsys.readouterr().out and "rm" in str(left.value.hint)


def test_whether_it_runs_has_to_be_known(run: Run, two: LocalBackend) -> None:
    with pytest.raises(Exception, match="whether it still runs is not known") as told:
        look(two, run, not_known(NAME, "n2 is off"), remote=True, local=False)  # type: ignore[arg-type]
    assert f"zerun status {NAME}" in str(told.value.hint)  # type: ignore[attr-defined]
