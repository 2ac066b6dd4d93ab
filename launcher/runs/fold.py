"""A run's state, folded from three sources read together: the journal (what we did), the backend's poll (where it
queues) and what the agents wrote (how it went). When they do not answer, the state is unknown, and said so.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.errors import Exit
from .cramped import cramped
from .diagnosis import first_cause
from .state import EXITS, Observation, RunState, State
from .store import Run


def fold(run: Run, seen: Observation) -> RunState:
    """The state of the run's newest attempt, from the journal and one look at it."""
    state, why = _judge(run, seen)
    before = run.last("ended", "submitted", attempt=seen.attempt)
    if before is not None and before.event == "ended" and state in ("failed", "unknown") and _has_gaps(seen):
        # It was seen to end when all could be read. A scratch disk that was wiped since, or a node that is off, does
        # not make a run that is done a failed one.
        state, why = before.data["state"], str(before.data.get("why", ""))
    cause = None
    if state in ("failed", "time_limit", "cancelled"):
        cause = first_cause(seen.records, seen.outcome, seen.last_lines)
        if state == "failed" and cause is not None:
            why = cause.sentence()
    refused = run.last("submit_failed", attempt=seen.attempt)
    if refused is not None and state in ("failed", "cancelled"):
        # What began was ended by the submit itself; the reason is why it could not go on.
        state, why, cause = "failed", f"it was not submitted: {refused.data.get('error', '')}", None
    exit_code = EXITS[state]
    if state == "time_limit" and seen.attempt_checkpoints:
        exit_code = Exit.STOPPED  # resumable: this attempt left a whole checkpoint
    if state == "failed" and cause is not None and cause.no_space:
        exit_code = Exit.NO_SPACE
    return RunState(
        run=run.name,
        job=str(run.about.get("job_name", "")),
        cluster=str(run.about.get("cluster_name", "")),
        state=state,
        attempt=seen.attempt,
        since=_since(run, seen, state),
        exit_code=None if exit_code is None else int(exit_code),
        why=why,
        nodes=tuple(r.node for r in seen.records) or seen.poll.nodes,
        ranks=sum(len(r.ranks) for r in seen.records),
        cause=cause,
        outcome=seen.outcome,
        checkpoints=seen.checkpoints,
        handle=run.handle,
        notes=(*(f"{place} did not answer: {reason}" for place, reason in seen.silent.items()), *cramped(seen.records)),
        tags=run.tags,
        progress=seen.progress,
    )


def _has_gaps(seen: Observation) -> bool:
    return len(seen.records) < seen.num_nodes and not seen.alive


def _judge(run: Run, seen: Observation) -> tuple[State, str]:
    records = seen.records
    if run.handle is None and not records and seen.poll.state in ("absent", "unknown"):
        return _without_handle(run, seen)
    if len(records) >= seen.num_nodes and all(r.state == "ended" for r in records):
        return _begins_again(run, seen) or _ended(run, seen)
    over = seen.poll.state in ("ended", "absent")
    living = [r for r in records if r.node in seen.alive]
    if records and not living and over and not seen.silent:
        return _ended(run, seen)  # the agents went without a last word: power cut, or killed
    if living:
        return "running", ""
    if _decided(run, seen):
        return _ended(run, seen)
    if seen.poll.state == "queued":
        return "queued", seen.poll.why or seen.poll.word
    if seen.poll.state == "running":
        return "running", "" if records else "starting"
    if seen.poll.state == "unknown" or seen.silent:
        reasons = [seen.poll.why, *seen.silent.values()]
        return "unknown", next((r for r in reasons if r), "no answer")
    return _ended(run, seen)


def _decided(run: Run, seen: Observation) -> bool:
    """Whether those who answer say how it ended. A node that is gone for good must not keep the run open for ever: what
    may still run there ends by itself, since an agent that hears from no other ends its ranks.

    Without a scheduler one agent's word is all agents': the record of a machine that lost its power, which lies on a
    shared disk as it stood, or of an agent that was killed says nothing more.
    """
    said = [r.state == "ended" and r.failure is not None for r in seen.records]
    if seen.silent and said and all(said):
        return True
    direct = run.handle is not None and run.handle.backend == "direct"
    return direct and (any(said) or _ended_well(run, seen)) and seen.poll.state not in ("running", "queued")


def _ended_well(run: Run, seen: Observation) -> bool:
    """Whether an agent without a scheduler says that all went well: it does so once every node's agent has told node
    rank 0's so, and what a machine that went off later would say changes nothing."""
    direct = run.handle is not None and run.handle.backend == "direct"
    return direct and any(r.state == "ended" and r.failure is None and r.ranks for r in seen.records)


def _without_handle(run: Run, seen: Observation) -> tuple[State, str]:
    if run.last("submit_failed", attempt=run.attempt) is not None:
        return "failed", ""
    if run.last("cancelled", attempt=run.attempt) is not None:
        return "cancelled", ""
    if seen.being_made:
        return "submitting", "a command is submitting it right now"
    if seen.poll.state == "unknown":
        return "unknown", f"its submit lost the answer, and {seen.poll.why or 'the cluster does not answer'}"
    return "failed", "its submit was cut before anything reached the cluster"


def _begins_again(run: Run, seen: Observation) -> tuple[State, str] | None:
    """A job that Slurm took its nodes from (preempted, requeued) waits for the next attempt: it is over when Slurm
    says so, not when its agents have ended. None for what is over."""
    if run.handle is None or run.handle.backend != "slurm" or run.last("cancelled", attempt=run.attempt):
        return None
    if seen.poll.state == "queued":
        return "queued", f"attempt {seen.attempt} was ended by Slurm, the next one waits: {seen.poll.why}"
    if seen.poll.state == "running" and {r.failure.kind for r in seen.records if r.failure} == {"cancelled"}:
        return "running", "Slurm told it to stop: it ends, or begins again"
    return None


def _ended(run: Run, seen: Observation) -> tuple[State, str]:
    failures = [r.failure for r in seen.records if r.failure is not None]
    kinds = {f.kind for f in failures}
    well = _ended_well(run, seen)  # then a record that lies as it stood is only old
    statuses = [rank.status for r in seen.records if r.state == "ended" or not well for rank in r.ranks]
    complete = (len(seen.records) >= seen.num_nodes and bool(statuses)) or well
    if complete and not failures and all(s == 0 for s in statuses):
        return "done", ""
    if _was_cancelled(run, seen, kinds):
        return "cancelled", ""
    if seen.outcome is not None and seen.outcome.outcome == "stopped":
        return "stopped", seen.outcome.reason
    if complete and not failures and _saved_when_asked(run, seen, statuses):
        return "stopped", f"asked to end, the program exited with {int(Exit.STOPPED)}: saved, it says"
    if "time_limit" in kinds or seen.poll.word == "TIMEOUT" or _ran_to_its_limit(run, seen, kinds):
        return "time_limit", "the time limit ended it"
    if seen.poll.word in _FROM_OUTSIDE:
        return "failed", _FROM_OUTSIDE[seen.poll.word]
    if "cancelled" in kinds and kinds <= {"cancelled", "node_lost"}:  # who was told to end is lost to the others
        whose = "another laptop's cancel, a machine going down, or the end of its allocation"
        if run.last("cancelling", attempt=run.attempt):
            return "cancelled", f"asked to end: by the cancel that began here, {whose}"
        return "cancelled", f"asked to end, and not from here: {whose}"
    if failures:
        first = min(failures, key=lambda f: f.at or 0.0)
        return "failed", first.message
    if not seen.records:
        if seen.poll.word == "COMPLETED":
            return "failed", "the batch script ended, but no agent wrote a record"
        word = seen.poll.word or "it is gone from the queue"
        return "failed", f"{word}{': ' + seen.poll.why if seen.poll.why else ''}; no agent ever started"
    gone = [r.node for r in seen.records if r.state != "ended"]
    if gone:
        return "failed", f"the agent on {', '.join(gone)} went without a last word (power cut, or killed)"
    lost = seen.num_nodes - len(seen.records)
    return "failed", seen.poll.word or f"{lost} of {seen.num_nodes} nodes left no record that can be read"


def _was_cancelled(run: Run, seen: Observation, kinds: set[str]) -> bool:
    """Whether a cancel ended it. ``cancelling`` is written before the cluster is reached and says only that somebody
    tried; ``cancelled`` and Slurm say that it was told to end, and the agents what they ended for: what had ended
    before the cancel came was not ended by it."""
    told = len(seen.records) >= seen.num_nodes and all(r.state == "ended" for r in seen.records)
    stopped = seen.outcome is not None and seen.outcome.outcome == "stopped"
    if told and (kinds or stopped) and "cancelled" not in kinds:
        return False
    if seen.poll.word == "CANCELLED":
        return True
    if run.last("cancelled", attempt=run.attempt):
        return seen.poll.word != "TIMEOUT"
    # Slurm has forgotten it and it never began: what is known is that somebody was about to take it from the queue.
    return not seen.records and not seen.poll.word and run.last("cancelling", attempt=run.attempt) is not None


def _saved_when_asked(run: Run, seen: Observation, statuses: Sequence[int | None]) -> bool:
    """A program has no engine's record of what it saved. Its 75 counts only as the answer to our stop signal."""
    asked = any(r.stop_sent_at is not None for r in seen.records)
    return asked and bool(run.about.get("job", {}).get("program")) and set(statuses) <= {0, int(Exit.STOPPED)}


_FROM_OUTSIDE = {
    "NODE_FAIL": "Slurm lost a node of it (NODE_FAIL)",
    "PREEMPTED": "Slurm preempted it for another job",
    "BOOT_FAIL": "a node did not boot (BOOT_FAIL)",
    "DEADLINE": "its deadline passed in Slurm",
    "OUT_OF_MEMORY": "Slurm ended it: out of memory",
}


def _ran_to_its_limit(run: Run, seen: Observation, kinds: set[str]) -> bool:
    """Without accounting Slurm's TIMEOUT is not to be had: a SIGTERM from outside after the whole time says it."""
    limit = run.about.get("time_s")
    if limit is None or "cancelled" not in kinds or run.about.get("backend") != "slurm":
        return False
    return any(r.ended_at is not None and r.ended_at - r.started_at >= limit - 2 for r in seen.records)


def _since(run: Run, seen: Observation, state: State) -> float | None:
    if EXITS[state] is not None:
        ends = [r.ended_at for r in seen.records if r.ended_at is not None]
        if ends:
            return max(ends)
        tried = ("cancelling",) if state == "cancelled" else ()
        last = run.last("ended", "cancelled", "submit_failed", *tried, attempt=run.attempt)
        return last.at if last else None
    if state == "running" and seen.records:
        return min(r.started_at for r in seen.records)
    submitted = run.last("submitted", "submitting", attempt=run.attempt)
    return submitted.at if submitted else None
