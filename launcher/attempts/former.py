"""Before the next attempt, on a cluster without a scheduler: who answers, and what earlier attempts left running.

A killed agent's ranks go with it, but not what those had started: it would write into the run's folder beside the
next attempt, which may run on other nodes. A node that does not answer holds up nothing: one that lost its power is
the very reason to go on elsewhere. It is passed over and named, and kept in the journal (``left``) for the next
resume or cancel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..backends.calls import side_by_side
from ..backends.protocol import Handle
from ..contract.errors import Exit, PartialAnswer, Unreachable, UsageError, ZerunError
from ..contract.folder import RunFolder
from ..contract.holdings import read_json
from ..observe import ask
from ..runs import Run, RunState
from .make import Attempts

if TYPE_CHECKING:
    from ..backends.protocol import Backend
    from ..specs.models import Cluster

_AT_ONCE = 32
_STILL_S = 70.0  # so old may be what one client of a shared disk sees of another's files


def standing_still(
    backend: Backend, run: Run, state: RunState, notice: Callable[[str], None]
) -> tuple[RunState, list[str]]:
    """The state of a run of which no machine answers, when what it left on a shared disk tells that it is over.

    An agent writes a beat there every 2 s. One that writes none is dead, or does not reach the disk, and then neither
    do its ranks; should it come back, it ends when it sees the next attempt.
    """
    shared = backend.name == "direct" and all(place.node is None for place in backend.places())
    before = _beats(backend, run, state.attempt) if shared and state.state == "unknown" else {}
    if not before:
        return state, []
    notice(
        f"{_named_nodes(before)} not answering: for {_STILL_S:g} s it is seen whether anything is still written there"
    )
    time.sleep(_STILL_S)
    if _beats(backend, run, state.attempt) != before:
        return state, []
    why = f"{_named_nodes(before)} not answering, and no agent there has written its beat for {_STILL_S:g} s"
    over = replace(state, state="failed", exit_code=int(Exit.JOB_FAILED), why=why)
    return over, [f"attempt {state.attempt} is taken for over: {why}"]


def _beats(backend: Backend, run: Run, attempt: int) -> dict[str, float]:
    answers, silent = ask(backend, [run])
    found: dict[str, float] = {}
    for place, answer in answers:
        of_run = answer["runs"].get(str(RunFolder.at(place.runs, run.name).root), {})
        for record in of_run.get("attempts", {}).get(str(attempt), {}).get("records", ()):
            found[str(record["node"])] = float(record["beat_at"])
    return {} if silent else found


def _named_nodes(nodes: Mapping[str, float]) -> str:
    return f"{', '.join(sorted(nodes))} {'is' if len(nodes) == 1 else 'are'}"


def answering(backend: Backend, cluster: Cluster, wanted: int) -> tuple[Cluster, list[str]]:
    """``cluster`` without the nodes that do not answer, and a line about them; as it is where the first ``wanted`` do.

    Raises Unreachable when fewer than ``wanted`` answer.
    """
    if backend.name != "direct" or cluster.local:
        return cluster, []
    entries = cluster.node_list
    silent = _silent(backend, [entry.name for entry in entries[:wanted]])
    if not silent:
        return cluster, []
    silent.update(_silent(backend, [entry.name for entry in entries[wanted:]]))
    there = tuple(entry for entry in entries if entry.name not in silent)
    if len(there) < wanted:
        asked = f"{wanted} node{'' if wanted == 1 else 's'} to go on"
        raise Unreachable(
            f"{asked}, {len(there)} of {len(entries)} answer: {_list(silent)}",
            hint=f"--nodes {len(there)} goes on with those that do" if there else None,
        )
    nodes = there if isinstance(cluster.nodes, tuple) else cluster.nodes.model_copy(update={"entries": there})
    return cluster.model_copy(update={"nodes": nodes}), [f"goes on without {_list(silent)}"]


def _silent(backend: Backend, nodes: Sequence[str]) -> dict[str, str]:
    """Those of ``nodes`` that do not answer, with the reason."""
    nobody = {"pid": 1, "started_ticks": -1, "boot": "?"}
    polls = backend.poll([Handle("direct", {"agents": {node: nobody}}) for node in nodes])
    return {node: poll.why for node, poll in zip(nodes, polls, strict=True) if poll.state == "unknown"}


def end_former(attempts: Attempts, backend: Backend, cluster: Cluster, run: Run, newest: int) -> list[str]:
    """Ends what is left of the run's attempts up to ``newest``; a line for each that some node was not asked about."""
    if backend.name != "direct":
        return []  # Slurm ends what it started
    told = []
    for number in range(1, newest + 1):
        nodes = _named(run, number)
        if nodes is None and number == newest:
            nodes = _nodes_of(run, number)
        silent = _end(attempts, backend, cluster, run, (number, nodes or ()))
        if silent:
            told.append(
                f"attempt {number} may still run on {_list(silent)}: the next one goes on without knowing; "
                f"zerun cancel {run.name} ends what is left there, once it answers"
            )
    return told


def end_remembered(attempts: Attempts, backend: Backend, cluster: Cluster, run: Run) -> None:
    """Ends what attempts left on nodes that did not answer a resume. Raises PartialAnswer where they still do not."""
    silent: dict[str, str] = {}
    for number in range(1, run.attempt + 1):
        silent.update(_end(attempts, backend, cluster, run, (number, _named(run, number) or ())))
    if silent:
        raise PartialAnswer(
            f"an earlier attempt may still run on {_list(silent)}", hint=f"zerun cancel {run.name} again, later"
        )


def _end(
    attempts: Attempts, backend: Backend, cluster: Cluster, run: Run, what: tuple[int, Sequence[str]]
) -> dict[str, str]:
    """The nodes that could not be asked, with the reason; also noted in the journal."""
    number, nodes = what
    known = {entry.name for entry in cluster.node_list}
    data = _handle_of(run, number)

    def one(node: str) -> None:
        if node not in known:
            raise ZerunError("it is no longer in the cluster's description")
        try:
            backend.cancel(Handle("direct", {**data, "agents": {node: {}}}), run.name, number)
        except UsageError as problem:
            if "launch.json" not in problem.message:  # else nothing of the attempt ever came there
                raise

    asked = side_by_side(one, nodes, _AT_ONCE)
    silent = {node: problem.message for node, _, problem in asked if problem is not None}
    if silent or (nodes and run.last("left", attempt=number) is not None):
        attempts.store.append(run, "left", number, time.time(), nodes=sorted(silent))
    return silent


def _list(silent: Mapping[str, str]) -> str:
    return ", ".join(f"{node} ({why})" for node, why in silent.items())


def _named(run: Run, attempt: int) -> list[str] | None:
    event = run.last("left", attempt=attempt)
    return [str(node) for node in event.data.get("nodes", ())] if event is not None else None


def _handle_of(run: Run, attempt: int) -> Mapping[str, Any]:
    event = run.last("submitted", attempt=attempt)
    handle = event.data.get("handle") if event is not None else None
    data = handle.get("data") if isinstance(handle, dict) else None
    return data if isinstance(data, dict) else {}


def _nodes_of(run: Run, attempt: int) -> list[str]:
    """The nodes that an attempt was sent to: its own description tells, or what answered its submit."""
    launch = read_json(str(run.paths.attempt(attempt).launch))
    nodes = launch.get("nodes") if isinstance(launch, dict) else None
    if isinstance(nodes, list):
        return [str(node["name"]) for node in nodes if isinstance(node, dict) and "name" in node]
    agents = _handle_of(run, attempt).get("agents")
    return list(agents) if isinstance(agents, dict) else []
