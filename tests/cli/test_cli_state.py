"""A run's state as text: what, where, since when; what went wrong; what to do next."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from launcher.app import App
from launcher.backends.protocol import Handle
from launcher.cli import follow, state_text
from launcher.cli.main import run
from launcher.contract.records import Outcome
from launcher.runs import RunState, RunStore
from launcher.runs.diagnosis import Cause

OUTCOME = Outcome(
    "done",
    200,
    checkpoint=200,
    train_loss=1.75,
    heldout_loss=1.9,
    bigram_entropy=2.4,
    tokens_per_s=12345.6,
    trained_s=61.0,
    state_bytes={"parameters": 4 * 2**20, "gradients": 2 * 2**20, "optimizer": 4 * 2**20},
)


def state(word: str, **more: object) -> RunState:
    exits = {"done": 0, "failed": 1, "cancelled": 9, "stopped": 75, "time_limit": 124}
    told: dict[str, object] = {"nodes": ("n1", "n2"), "ranks": 4, "exit_code": exits.get(word), **more}
    return RunState("job-1", "job", "lab", word, 1, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("queued", "zerun cancel job-1"),
        ("running", "zerun logs job-1 -f"),
        ("done", "zerun collect job-1"),
        ("stopped", "zerun resume job-1"),
        ("unknown", "zerun cluster check lab"),
    ],
)
def test_a_state_says_what_to_do_next(word: str, command: str) -> None:
    lines = state_text.state_lines(state(word, checkpoints=(100,)))
    assert lines[0].startswith(f"job-1  {word}")
    assert any(command in line for line in lines)


def test_a_lost_login_is_asked_for_first() -> None:
    why = "login: the key alone does not log x at y in, and nobody is asked here (zerun login lab does): denied"
    lost = state_text.next_steps(state("unknown", why=why))
    assert lost[0] == "zerun login lab" and lost[1].startswith("zerun status job-1")


def test_where_no_rank_started_no_logs_are_named() -> None:
    setup = Cause("setup_failed", "n1", words="setup: line 2 failed")
    (told,) = state_text.next_steps(state("failed", ranks=0, cause=setup))
    assert told.startswith("zerun collect job-1 --checkpoint none") and "attempts/1/logs" in told
    refused = state_text.next_steps(state("failed", ranks=0, why="it was not submitted: n1: setup: line 2 failed"))
    assert refused == [told]
    (told,) = state_text.next_steps(state("cancelled", ranks=0, nodes=()))
    assert told.startswith("zerun submit JOB")
    assert state_text.next_steps(state("cancelled", ranks=0, nodes=(), checkpoints=(4,))) == ["zerun resume job-1"]
    script = state("failed", ranks=0, nodes=(), handle=Handle("slurm", {"job": "7"}))
    assert state_text.next_steps(script)[0].startswith("zerun collect job-1")
    assert state_text.next_steps(state("cancelled")) == ["zerun logs job-1"]


def test_where_and_why_are_told_without_control_characters() -> None:
    lines = state_text.state_lines(state("unknown", why="no answer\x1b[2J"))
    assert any("job on lab: n[1-2], 4 ranks, attempt 1" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_a_failed_run_without_a_checkpoint_offers_no_resume() -> None:
    assert not any("resume" in line for line in state_text.state_lines(state("failed")))
    assert any("zerun resume job-1" in line for line in state_text.state_lines(state("failed", checkpoints=(50,))))


@pytest.mark.parametrize(("heldout", "verdict"), [(1.9, ", below the bigram"), (2.5, ", NOT below the bigram")])
def test_the_summary_holds_the_loss_against_the_bigram_entropy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], heldout: float, verdict: str
) -> None:
    from dataclasses import replace

    app = App(tmp_path, runs=tmp_path / "runs")
    (tmp_path / "runs/job-1/attempts/1/logs").mkdir(parents=True)
    done = state("done", outcome=replace(OUTCOME, heldout_loss=heldout), checkpoints=(100, 200))
    follow.summarise(app, done)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert verdict in captured.err and "2.4000" in captured.err and "1.7500" in captured.err
    assert "10.0 MiB (parameters 4.0 MiB, gradients 2.0 MiB, optimizer 4.0 MiB)" in captured.err
    assert "12,346 tokens/s" in captured.err
    assert str(tmp_path / "runs/job-1/attempts/1/logs") in captured.err
    assert "zerun resume job-1" in captured.err


def test_skipped_steps_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = App(tmp_path, runs=tmp_path / "runs")
    for skipped in (0, 3):
        done = state("done", outcome=dataclasses.replace(OUTCOME, skipped=skipped))
        follow.summarise(app, done)
        assert ("3 of 200 steps: gradients that were not finite" in capsys.readouterr().err) == bool(skipped)
        assert any("3 steps skipped" in line for line in state_text.state_lines(done)) == bool(skipped)


def test_a_run_on_a_cluster_says_how_to_bring_it_home(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow.summarise(App(tmp_path, runs=tmp_path / "runs"), state("done", outcome=OUTCOME, checkpoints=(200,)))
    assert "zerun collect job-1" in capsys.readouterr().err


def test_a_thousand_checkpoints_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = tuple(range(20, 20_020, 20))
    follow.summarise(App(tmp_path, runs=tmp_path / "runs"), state("done", outcome=OUTCOME, checkpoints=many))
    assert "whole ones at step 20, 40, … 20000 (1000 of them)" in capsys.readouterr().err


def test_ls_and_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs that are known to have ended are listed without asking anyone."""
    store = RunStore(tmp_path / "runs")
    for number, (word, code) in enumerate([("done", 0), ("failed", 1)]):
        made = store.create(f"job-2026010{number + 1}-000000-aaaa", {"job_name": "job", "cluster_name": "away"})
        made = store.append(made, "submitting", 1, 1.0, ranks=4)
        store.append(made, "ended", 1, 2.0, state=word, exit_code=code, why="", since=1767225600.0)
    monkeypatch.setenv("ZERUN_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    assert run(["ls", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(s["state"], s["exit_code"], s["ranks"]) for s in listed] == [("done", 0, 4), ("failed", 1, 4)]
    assert run(["ls"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0].split() == ["run", "state", "since", "cluster", "attempt", "ranks"]
    assert len(text) == 3 and "job-20260101-000000-aaaa" in text[1]


def test_lines_are_prefixed_and_json_is_a_line_each(tmp_path: Path) -> None:
    from launcher.cli.lines import LineWriter
    from launcher.logs.merge import LogLine

    line = LogLine(3, "node01", 1.5, "grüße \\xff", 2)
    for as_json in (False, True):
        with (tmp_path / "out").open("wb") as stream:
            LineWriter(stream, coloured=False, at_once=False, as_json=as_json).write(line)
        written = (tmp_path / "out").read_text(encoding="utf-8")
        if as_json:
            assert json.loads(written) == {
                "rank": 3, "node": "node01", "time": 1.5, "text": "grüße \\xff", "attempt": 2
            }  # fmt: skip
        else:
            assert written == "3@node01  grüße \\xff\n"


def test_progress_off_a_terminal_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from launcher.cli import show

    with show.progress("collecting x") as advance:
        for done in range(0, 1001):
            advance(done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[-1] == "collecting x: 100 %, 1000 B of 1000 B"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.cli import show

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" in show.paint("x", "red", sys.stdout)
    monkeypatch.setenv("NO_COLOR", "1")
    assert show.paint("x", "red", sys.stdout) == "x"
