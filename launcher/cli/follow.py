"""Following a run to its end: its lines to stderr, one summary, its exit code; Ctrl-C detaches."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from ..contract.errors import Exit, PartialAnswer, Unreachable
from . import show
from .lines import LineWriter
from .state_text import state_lines

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
        state = until_it_starts(app, run)
        if state.nodes or not state.ended:  # what ended before it ever started wrote nothing
            try:
                for line in app.logs(run, Selection(), follow=not state.ended, notice=show.note):
                    writer.write(line)
            except (PartialAnswer, Unreachable) as problem:  # how the run ended is said all the same
                show.note(show.visible(problem.message))
        state = app.wait(run)
    except KeyboardInterrupt:
        detached(run)
        return int(Exit.INTERRUPTED)
    summarise(app, state)
    return exit_code_of(state)


def until_it_starts(app: App, run: str) -> RunState:
    """Says why a run is not there yet, whenever that changes; returns once it has ranks, or has ended. A job whose
    script runs while no agent ever starts has neither logs nor an end that agents could tell."""
    told, pause = "", 0.2
    while True:
        state = app.status(run)
        if state.ended or state.ranks:
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
        # Of a run on a cluster, what lies here was collected before this end: not all of it, or not this attempt's.
        where = f"{folder}/checkpoints/" if here else f"on {state.cluster}"
        whole = f"whole {'one' if len(state.checkpoints) == 1 else 'ones'} at step {show.steps(state.checkpoints)}"
        lines.append(f"  checkpoints    {where}    {whole}")
        lines.append(f"  resume         zerun resume {run} --set steps=N    (further; --step S: again from there)")
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
    if outcome.skipped:
        lines.append(f"  skipped        {outcome.skipped} of {outcome.step} steps: gradients that were not finite")
    return lines
