"""``zerun exec``: a command beside the ranks of a run that runs, on one node or on all of them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .backends.calls import side_by_side
from .contract.errors import PartialAnswer, UsageError, ZerunError
from .contract.folder import RunFolder
from .observe import ask

if TYPE_CHECKING:
    from .backends.protocol import Backend
    from .runs import Run, RunState
    from .transports.protocol import Stream

Sink = Callable[[int, bytes], None]
"""Takes output as it comes: 1 or 2 (stdout, stderr), and bytes; whole lines when several nodes speak."""
_AT_ONCE = 8


def execute(
    backend: Backend, run: Run, state: RunState, argv: Sequence[str], where: tuple[str | None, int | None], sink: Sink
) -> int:
    """Runs ``argv`` in the environment of a rank: of each node's first one, or where ``where`` (node, rank) says.

    Returns its exit status: of several nodes, the largest. Raises UsageError when the run does not run, or
    not there; PartialAnswer when some nodes gave no answer.
    """
    if state.handle is None or state.ended or not state.nodes:
        raise UsageError(
            f"{run.name} is {state.state}: there is no rank to stand beside", hint=f"zerun status {run.name}"
        )
    ranks = _ranks(backend, run, state.attempt)
    chosen = _chosen(run.name, ranks, *where)
    handle, runs, lock = state.handle, backend.places()[0].runs, threading.Lock()
    run_dir = str(RunFolder.at(runs, run.name).root)

    def one(node: str) -> int:
        request = {"run_dir": run_dir, "attempt": state.attempt, "node": node, "rank": where[1], "argv": list(argv)}
        with backend.execute(handle, node, request) as stream:
            return _follow(node, stream, _Lines(f"{node}: " if len(chosen) > 1 else "", sink, lock))

    done = side_by_side(one, chosen, _AT_ONCE)
    statuses = [status for _, status, _ in done if status is not None]
    failed = [(node, problem) for node, _, problem in done if problem is not None]
    if not failed:
        return max(statuses)
    if not statuses:
        raise failed[0][1]
    told = "; ".join(f"{node}: {problem.message}" for node, problem in failed)
    raise PartialAnswer(f"{len(failed)} of {len(chosen)} nodes gave no answer: {told}")


def _ranks(backend: Backend, run: Run, attempt: int) -> dict[str, list[int]]:
    """The ranks that live, by node, in the order of the nodes."""
    answers, _ = ask(backend, [run])
    found: dict[str, tuple[int, list[int]]] = {}
    for place, answer in answers:
        of_run = answer["runs"].get(str(RunFolder.at(place.runs, run.name).root), {})
        for record in of_run.get("attempts", {}).get(str(attempt), {}).get("records", ()):
            living = [r["rank"] for r in record["ranks"] if r.get("ended_at") is None]
            found[record["node"]] = (record["node_rank"], living)
    return {node: living for node, (_, living) in sorted(found.items(), key=lambda item: item[1][0])}


def _chosen(run: str, ranks: Mapping[str, Sequence[int]], node: str | None, rank: int | None) -> list[str]:
    if node is not None and node not in ranks:
        raise UsageError(f"{run} has no node {node!r}; it is on {', '.join(ranks) or 'none that is known'}")
    if rank is not None:
        homes = [n for n, living in ranks.items() if rank in living and node in (None, n)]
        if not homes:
            raise UsageError(f"rank {rank} of {run} does not run{f' on {node}' if node else ''}")
        return homes
    living = [n for n, those in ranks.items() if those and node in (None, n)]
    if not living:
        raise UsageError(f"no rank of {run} runs{f' on {node}' if node else ' yet'}", hint=f"zerun status {run}")
    return living


def _follow(node: str, stream: Stream, lines: _Lines) -> int:
    for event in _events(stream):
        if "error" in event:
            raise UsageError(str(event["error"]), hint=event.get("hint"))
        if "status" in event:
            lines.end()
            return int(event["status"])
        lines.write(int(event["out"]), base64.b64decode(event["data"]))
    lines.end()
    raise ZerunError(f"{node}: the command ended without saying how")


def _events(stream: Stream) -> Iterator[dict[str, Any]]:
    rest = b""
    for chunk in stream:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if line.strip():
                yield json.loads(line)


class _Lines:
    """Bytes as they come where one node speaks; where several do, whole lines with the node's name before."""

    def __init__(self, prefix: str, sink: Sink, lock: threading.Lock) -> None:
        self._prefix, self._sink, self._lock = prefix.encode(), sink, lock
        self._rest = {1: b"", 2: b""}

    def write(self, out: int, data: bytes) -> None:
        if self._prefix:
            *whole, self._rest[out] = (self._rest[out] + data).split(b"\n")
            data = b"".join(self._prefix + line + b"\n" for line in whole)
        if data:
            with self._lock:
                self._sink(out, data)

    def end(self) -> None:
        for out, rest in self._rest.items():
            if rest:
                with self._lock:
                    self._sink(out, self._prefix + rest + b"\n")
