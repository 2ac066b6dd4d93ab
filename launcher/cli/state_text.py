"""The words of a run's state: one line says what, where, since when; the next ones why, and what to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..contract.errors import Exit
from ..contract.moment import moment
from . import show

if TYPE_CHECKING:
    from ..contract.records import Outcome
    from ..runs import RunState


def print_state(state: RunState, as_json: bool) -> None:
    """The designed lines of ``status``: what, where, since when; then what went wrong, and what to do."""
    if as_json:
        show.data_json(state.to_plain())
        return
    for line in state_lines(state):
        show.data(line)


def state_lines(state: RunState, now: float | None = None) -> list[str]:
    """``now``: the clock that ages are told by, seconds since the epoch."""
    from ..specs import nodelist

    lines = [f"{state.run}  {state.state.replace('_', ' ')}{_since(state, time.time() if now is None else now)}"]
    where = f"{state.job} on {state.cluster}" if state.job else state.cluster
    if state.nodes:
        where += f": {nodelist.fold(state.nodes)}"
    if state.ranks:
        where += f", {state.ranks} rank{'' if state.ranks == 1 else 's'}"
    lines.append(f"  where    {where}, attempt {state.attempt}")
    if state.why and state.cause is None:
        lines.append(f"  why      {show.visible(state.why)}")
    if state.progress is not None and state.outcome is None:
        lines.append(f"  {'at' if state.state == 'running' else 'reached':<7}  {_progress(state)}")
    if state.outcome is not None:
        lines.append(f"  reached  step {state.outcome.step}{_losses(state.outcome)}")
    lines += _cause_lines(state)
    if state.checkpoints:
        newest = state.checkpoints[-1]
        lines.append(f"  kept     {show.count(len(state.checkpoints), 'whole checkpoint')}, newest at step {newest}")
    notes = [note for note in state.notes if not (state.why and note.endswith(state.why))]
    lines += [f"  note     {show.visible(note)}" for note in notes]
    lines += [f"  next     {step}" for step in next_steps(state)]
    return lines


def _since(state: RunState, now: float) -> str:
    if state.since is None:
        return ""
    return f" since {moment(state.since)} ({show.duration(now - state.since)})"


def _progress(state: RunState) -> str:
    """How far its first rank is, by the last line of that rank's metrics."""
    at = state.progress
    assert at is not None
    text = f"step {at.step}" + (f" of {at.steps}" if at.steps else "")
    if at.loss is not None:
        text += f", loss {at.loss:.4f}"
    if state.state == "running" and at.tokens_per_s:
        text += f", {at.tokens_per_s:,.0f} tokens/s"
    if state.state == "running" and at.steps and at.step_time_s and at.steps > at.step:
        text += f", about {show.duration((at.steps - at.step) * at.step_time_s)} left"
    return text


def _losses(outcome: Outcome) -> str:
    parts = []
    if outcome.train_loss is not None:
        parts.append(f"train loss {outcome.train_loss:.4f}")
    if outcome.heldout_loss is not None:
        parts.append(f"held-out loss {outcome.heldout_loss:.4f}")
    if outcome.skipped:
        parts.append(f"{outcome.skipped} step{'s' * (outcome.skipped > 1)} skipped")
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
    if state.state == "unknown" and any(f"zerun login {state.cluster}" in why for why in (state.why, *state.notes)):
        return [f"zerun login {state.cluster}", f"zerun status {run}  (then)"]
    if state.state == "unknown":
        return [f"zerun status {run}  (again, when the cluster answers)", f"zerun cluster check {state.cluster}"]
    if state.state == "done":
        if state.nodes != ("localhost",):
            return [f"zerun collect {run}"]
        return [f"zerun ckpt verify {run}" if state.checkpoints else f"zerun logs {run}"]
    steps = _to_read(state)
    cause = state.cause
    if cause is not None and cause.exit_code == Exit.VERIFICATION and any("shard" in line for line in cause.last_lines):
        # A rank refused the bytes of the checkpoint it was to go on from: never the same again.
        other = f"zerun resume {run} --step {state.checkpoints[-1]}" if state.checkpoints else f"zerun ckpt ls {run}"
        return [*steps, other]
    if cause is not None and cause.no_space:
        steps.append(f"zerun cluster check {state.cluster}  (what is left where)")
    return steps + ([f"zerun resume {run}"] if state.checkpoints or state.state == "stopped" else [])


def _to_read(state: RunState) -> list[str]:
    """Where more is told of an end that was none of its own wish. Ranks that never started wrote nothing."""
    run = state.run
    if state.state == "stopped":
        return []
    if state.ranks or (state.cause is not None and state.cause.rank is not None):
        return [f"zerun logs {run}"]
    if state.nodes:
        return [f"zerun collect {run} --checkpoint none  (what setup said: attempts/{state.attempt}/logs)"]
    if state.state != "cancelled" and state.handle is not None:
        return [f"zerun collect {run} --checkpoint none  (what its script said: attempts/{state.attempt})"]
    return [] if state.checkpoints else ["zerun submit JOB  (again: it never ran, there is nothing to read)"]
