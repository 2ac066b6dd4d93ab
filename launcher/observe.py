"""One look at runs on their cluster: the backend's poll and the agents' records, read together."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

from .backends.protocol import Backend, Place, Poll
from .contract.errors import Refused, Unreachable
from .contract.folder import RunFolder
from .contract.plain import from_plain
from .contract.records import NodeRecord, Outcome
from .runs import Observation, Progress, Run

Replies = Mapping[str, Mapping[str, Any]]
"""By place name: the answer of the agent's ``state`` verb for every run folder that was asked about."""

_POOL = 32


def ask(backend: Backend, runs: Sequence[Run]) -> tuple[list[tuple[Place, Mapping[str, Any]]], dict[str, str]]:
    """Every place's answer about the runs, and the places that gave none with the reason."""
    places = backend.places()
    answers: list[tuple[Place, Mapping[str, Any]]] = []
    silent: dict[str, str] = {}

    def one(place: Place) -> Mapping[str, Any]:
        folders = [str(RunFolder.at(place.runs, run.name).root) for run in runs]
        return backend.call(place, "state", {"run_dirs": folders, "attempt": None})

    with concurrent.futures.ThreadPoolExecutor(min(_POOL, len(places))) as pool:
        futures = [(place, pool.submit(one, place)) for place in places]
        for place, future in futures:
            try:
                answers.append((place, future.result()))
            except (Unreachable, Refused) as problem:
                silent[place.transport.name] = problem.message
    return answers, silent


def observe(backend: Backend, runs: Sequence[Run]) -> list[Observation]:
    """What is to be seen of each run's newest attempt. A place that does not answer is noted, not guessed."""
    handles = [run.handle for run in runs]
    known = [h for h in handles if h is not None]
    try:
        polls = iter(backend.poll(known) if known else [])
        by_run = [next(polls) if h is not None else Poll("absent") for h in handles]
    except (Unreachable, Refused) as problem:
        by_run = [Poll("unknown", why=problem.message) for _ in runs]
    try:
        answers, silent = ask(backend, runs)
    except (Unreachable, Refused) as problem:
        answers, silent = [], {"the cluster": problem.message}
    return [combine(run, poll, answers, silent) for run, poll in zip(runs, by_run, strict=True)]


def combine(
    run: Run, poll: Poll, answers: Sequence[tuple[Place, Mapping[str, Any]]], silent: Mapping[str, str]
) -> Observation:
    """One run's observation out of all places' answers. The cluster may know a newer attempt (a requeue)."""
    from .checkpoints import candidates

    attempts: dict[int, list[Mapping[str, Any]]] = {}
    about: list[Mapping[str, Any]] = []
    for place, answer in answers:
        of_run = answer["runs"].get(str(RunFolder.at(place.runs, run.name).root), {})
        about.append(of_run)
        for number, attempt in of_run.get("attempts", {}).items():
            attempts.setdefault(int(number), []).append(attempt)
    newest = max([run.attempt, *(k for k, parts in attempts.items() if any(p.get("records") for p in parts))])
    records: dict[str, NodeRecord] = {}
    alive: set[str] = set()
    outcome: Outcome | None = None
    progress: Progress | None = None
    last_lines: dict[int, Sequence[str]] = {}
    for part in attempts.get(newest, []):
        for raw in part.get("records", []):
            value = dict(raw)
            if value.pop("alive", False):
                alive.add(value["node"])
            records[value["node"]] = from_plain(NodeRecord, value)
        if part.get("outcome"):
            outcome = from_plain(Outcome, part["outcome"])
        if part.get("progress"):
            progress = from_plain(Progress, part["progress"])
        last_lines.update({int(rank): lines for rank, lines in part.get("last_lines", {}).items()})
    whole = [c for c in candidates(about) if c.whole]
    kept = [c for c in whole if not c.left] or whole
    ordered = sorted(records.values(), key=lambda r: r.node_rank)
    return Observation(
        poll=poll,
        attempt=newest,
        records=tuple(ordered),
        alive=frozenset(alive),
        outcome=outcome,
        last_lines=last_lines,
        checkpoints=tuple(sorted(c.step for c in kept)),
        attempt_checkpoints=tuple(sorted(c.step for c in whole if c.attempt == newest)),
        silent=dict(silent),
        num_nodes=nodes_of(run, newest),
        progress=progress,
    )


def nodes_of(run: Run, attempt: int) -> int:
    """How many nodes the attempt was submitted to."""
    event = run.last("submitting", attempt=attempt) or run.last("submitting")
    return int(event.data["num_nodes"]) if event else 1
