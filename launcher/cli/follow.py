"""Following a run to its end: its lines to stderr, one summary, its exit code; Ctrl-C detaches."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from ..contract.errors import Exit
from . import show
from .lines import LineWriter

if TYPE_CHECKING:
    from ..app import App
    from ..contract.records import Outcome
    from ..runs import RunState


def follow(app: App, run: str) -> int:
    """Shows every rank's lines until the run has ended, then the summary. Returns the job's exit code."""
    from ..app import exit_code_of
    from ..logs.select import Selection

    writer = LineWriter(sys.stderr.buffer, coloured=show.coloured(sys.stderr), at_once=True)
    try:
        state = _until_it_starts(app, run)
        if state.nodes or not state.ended:  # what ended before it ever started wrote nothing
            for line in app.logs(run, Selection(), follow=not state.ended, notice=show.note):
                writer.write(line)
        state = app.wait(run)
    except KeyboardInterrupt:
        detached(run)
        return int(Exit.INTERRUPTED)
    summarise(app, state)
    return exit_code_of(state)


def _until_it_starts(app: App, run: str) -> RunState:
    """Says why a run is not there yet, whenever that changes; returns once it runs or has ended."""
    told, pause = "", 0.2
    while True:
        state = app.status(run)
        if state.state not in ("submitting", "queued", "unknown"):
            return state
        line = f"{state.state}{': ' + show.visible(state.why) if state.why else ''}"
        if line != told:
            show.note(line)
            told = line
        time.sleep(pause)
        pause = min(1.5 * pause, 5.0)


def detached(run: str) -> None:
    show.note()
    show.note(f"detached: {run} goes on without this shell")
    show.note(f"  look again   zerun logs {run} -f    (or: zerun status {run})")
    show.note(f"  end it       zerun cancel {run}")


def print_state(state: RunState, as_json: bool) -> None:
    """The designed lines of ``status``: what, where, since when; then what went wrong, and what to do."""
    if as_json:
        show.data_json(state.to_plain())
        return
    for line in state_lines(state):
        show.data(line)


def state_lines(state: RunState) -> list[str]:
    lines = [f"{state.run}  {state.state.replace('_', ' ')}{_since(state)}"]
    where = f"{state.job} on {state.cluster}" if state.job else state.cluster
    if state.nodes:
        where += f": {' '.join(state.nodes)}"
    if state.ranks:
        where += f", {state.ranks} rank{'' if state.ranks == 1 else 's'}"
    lines.append(f"  where    {where}, attempt {state.attempt}")
    if state.why and state.cause is None:
        lines.append(f"  why      {show.visible(state.why)}")
    if state.outcome is not None:
        lines.append(f"  reached  step {state.outcome.step}{_losses(state.outcome)}")
    lines += _cause_lines(state)
    if state.checkpoints:
        newest = state.checkpoints[-1]
        lines.append(f"  kept     {show.count(len(state.checkpoints), 'whole checkpoint')}, newest at step {newest}")
    lines += [f"  note     {show.visible(note)}" for note in state.notes]
    lines += [f"  next     {step}" for step in next_steps(state)]
    return lines


def _since(state: RunState) -> str:
    if state.since is None:
        return ""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.since))
    return f" since {stamp} ({show.duration(time.time() - state.since)})"


def _losses(outcome: Outcome) -> str:
    parts = []
    if outcome.train_loss is not None:
        parts.append(f"train loss {outcome.train_loss:.4f}")
    if outcome.heldout_loss is not None:
        parts.append(f"held-out loss {outcome.heldout_loss:.4f}")
    return f", {', '.join(parts)}" if parts else ""


def _cause_lines(state: RunState) -> list[str]:
    cause = state.cause
    if cause is None:
        return []
    lines = [f"  cause    {show.visible(cause.sentence())}"]
    lines += [f"           | {show.visible(line)}" for line in cause.last_lines]
    if cause.others:
        lines.append(f"  others   {show.visible(cause.others)}")
    return lines


def next_steps(state: RunState) -> list[str]:
    """What to do now, as commands."""
    run = state.run
    if state.state in ("submitting", "queued", "running"):
        return [f"zerun logs {run} -f", f"zerun cancel {run}"]
    if state.state == "unknown":
        return [f"zerun status {run}  (again, when the cluster answers)", f"zerun cluster check {state.cluster}"]
    if state.state == "done":
        if state.nodes != ("localhost",):
            return [f"zerun collect {run}"]
        return [f"zerun ckpt verify {run}" if state.checkpoints else f"zerun logs {run}"]
    steps = [f"zerun logs {run}"] if state.state != "stopped" else []
    if state.cause is not None and state.cause.exit_code == Exit.VERIFICATION:
        # A rank refused the bytes of the checkpoint it was to go on from: never the same again.
        other = f"zerun resume {run} --step {state.checkpoints[-1]}" if state.checkpoints else f"zerun ckpt ls {run}"
        return [*steps, other]
    return steps + ([f"zerun resume {run}"] if state.checkpoints or state.state == "stopped" else [])


def summarise(app: App, state: RunState) -> None:
    """The one summary after following, on stderr."""
    show.note()
    if state.state != "done" or state.outcome is None:
        for line in state_lines(state):
            show.note(line)
        return
    outcome = state.outcome
    show.note(show.paint(f"{state.run}  done: {outcome.step} steps on {state.ranks} ranks", "bold", sys.stderr))
    for line in _quality(outcome):
        show.note(line)
    if outcome.state_bytes:
        parts = ", ".join(f"{name} {show.num_bytes(n)}" for name, n in outcome.state_bytes.items())
        show.note(f"  state a rank   {show.num_bytes(sum(outcome.state_bytes.values()))} ({parts})")
    if outcome.tokens_per_s is not None:
        took = f" over {show.duration(outcome.trained_s)}" if outcome.trained_s is not None else ""
        show.note(f"  speed          {outcome.tokens_per_s:,.0f} tokens/s{took}")
    for line in _where(app, state):
        show.note(line)


def _where(app: App, state: RunState) -> list[str]:
    """Where logs and checkpoints lie: here already on a laptop, else on the cluster until they are collected."""
    run, folder = state.run, app.store.root / state.run
    lines = []
    here = (folder / "attempts" / str(state.attempt) / "logs").is_dir()
    if here:
        lines.append(f"  logs           {folder}/attempts/{state.attempt}/logs/    (zerun logs {run})")
    else:
        lines.append(f"  logs           on the cluster: zerun logs {run}")
        lines.append(f"  bring home     zerun collect {run}    (to {folder}/)")
    if state.checkpoints:
        steps = ", ".join(str(s) for s in state.checkpoints)
        # Of a run on a cluster, what lies here was collected before this end: not all of it, or not this attempt's.
        where = f"{folder}/checkpoints/" if here else f"on {state.cluster}"
        lines.append(f"  checkpoints    {where}    whole {'one' if ',' not in steps else 'ones'} at step {steps}")
        lines.append(f"  resume         zerun resume {run} --step {state.checkpoints[0]}    (from that step again)")
    return lines


def _quality(outcome: Outcome) -> list[str]:
    lines = []
    if outcome.train_loss is not None:
        lines.append(f"  train loss     {outcome.train_loss:.4f} nats a token")
    if outcome.heldout_loss is not None:
        text = f"  held-out loss  {outcome.heldout_loss:.4f} nats a token"
        if outcome.bigram_entropy is not None and not math.isnan(outcome.bigram_entropy):
            below = outcome.heldout_loss < outcome.bigram_entropy
            verdict = show.paint("below" if below else "NOT below", "green" if below else "red", sys.stderr)
            text += f", {verdict} the bigram entropy of the same text ({outcome.bigram_entropy:.4f})"
        lines.append(text)
    return lines
