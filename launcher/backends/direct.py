"""No scheduler: agents are started over each node's own transport, and outlive the connection."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..contract.errors import Busy, NoSpace, PartialAnswer, Refused, Unreachable, UsageError, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import Node
from ..transports.open import Connector
from ..transports.protocol import Stream, Transport
from . import free
from .calls import Caller, attempt_files, first_error, side_by_side
from .protocol import Finding, Handle, Place, Poll, Submission

if TYPE_CHECKING:
    from ..bundles import Shipment
    from ..specs.models import Cluster

_GRACE_S = 10.0
_Agents = Mapping[str, Mapping[str, Any]]  # ProcessId as a mapping, by node
_Identity = tuple[int, int, str]


class DirectBackend:
    """A transport a node. ``home_runs`` is where runs lie when the cluster is this very machine."""

    name: Literal["slurm", "direct"] = "direct"

    def __init__(self, cluster: Cluster, runtime: tuple[str, bytes], home_runs: Path) -> None:
        self._cluster = cluster
        self._connector = Connector(cluster)
        there = cluster.paths.runs
        self._caller = Caller(there or str(home_runs.resolve()), cluster.agent_python, runtime, literal=not there)
        self._nodes = [entry.name for entry in cluster.node_list]
        self._places: tuple[Place, ...] | None = None

    # --- places -----------------------------------------------------------------------------------

    def expect(self, code: Shipment) -> None:
        self._caller.expected = code

    def sent(self) -> Mapping[str, frozenset[str]]:
        return dict(self._caller.sent)

    def places(self) -> Sequence[Place]:
        """One a node, or a single one where the filesystem is shared. A node that does not answer still has its
        place, so that whoever asks there hears of it; only when none answers is that an error here."""
        if self._places is None:
            self._places = self._shared_place() if self._cluster.paths.shared else self._place_a_node()
        return self._places

    def _place_a_node(self) -> tuple[Place, ...]:
        looked = side_by_side(lambda n: self._caller.ready(self._at(n)), self._nodes, self._cluster.ssh.connections)
        known = [runs for _, runs, _ in looked if runs is not None]
        if not known:
            raise first_error(looked) or UsageError(f"cluster {self._cluster.name} has no nodes")
        return tuple(
            Place(self._at(node), runs if runs is not None else known[0], node, self._caller.ahead_s(self._at(node)))
            for node, runs, _ in looked
        )

    def _shared_place(self) -> tuple[Place, ...]:
        first: ZerunError | None = None
        for node in self._nodes:
            try:
                return (Place(self._at(node), self._caller.ready(self._at(node))),)
            except Unreachable as problem:
                first = first or problem
        raise first or UsageError(f"cluster {self._cluster.name} has no nodes")

    def call(
        self, place: Place, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> Mapping[str, Any]:
        return self._caller.call(place.transport, verb, request, timeout_s=timeout_s)

    def tail(self, place: Place, request: Mapping[str, Any]) -> Stream:
        return self._caller.tail(place.transport, request)

    def serve(self, place: Place, request: Mapping[str, Any]) -> Stream:
        return self._caller.tail(place.transport, request, "serve")

    def _at(self, node: str) -> Transport:
        return self._connector.transport(node)

    # --- start ------------------------------------------------------------------------------------

    def busy(self, nodes: Sequence[Node], device_kind: str) -> Busy | None:
        return free.busy(lambda n: self._caller.call(self._at(n.name), "slots", free.request(n, device_kind)), nodes)

    def would_start(self, script: bytes) -> str | None:
        return None  # nobody queues: at once

    def submit(self, submission: Submission) -> Handle:
        names = [node.name for node in submission.launch.nodes]
        unknown = sorted(set(names) - set(self._nodes))
        if unknown:
            raise UsageError(f"cluster {self._cluster.name} has no node {unknown[0]!r}")
        run_dir = submission.launch.run_dir
        request = {"run_dir": run_dir, "attempt": submission.attempt}
        begun: list[str] = []
        try:
            self._install(submission, names)
            first = self._start(names[0], {**request, "node": names[0]}, begun)
            meeting = first["announcement"]
            rest = side_by_side(
                lambda node: self._start(node, {**request, "node": node, "rendezvous": meeting}, begun),
                names[1:],
                self._cluster.ssh.connections,
            )
            problem = first_error(rest)
            if problem is not None:
                raise problem
        except ZerunError as problem:
            # Refused by the first node: the attempt had run before, and what is there is not ours to end.
            ran = isinstance(problem, Refused) and not isinstance(problem, Busy)
            if not (ran and len(begun) == 1):
                # Secrets went to every node that keeps its own files, begun or not: stop deletes them.
                apart = bool(submission.secrets) and not self._cluster.paths.shared
                self._undo(request, names if apart else begun, begun, problem)
            raise
        agents = {names[0]: first["pid"], **{node: answer["pid"] for node, answer, _ in rest if answer is not None}}
        return Handle("direct", {"agents": agents, "name": submission.name, "run_dir": run_dir})

    def _install(self, submission: Submission, names: Sequence[str]) -> None:
        """Files before anything starts, on every node that keeps its own, or once."""
        shared = self._cluster.paths.shared

        def one(node: str) -> None:
            at = self._at(node)
            self._caller.put_blobs(at, submission.blobs)
            if submission.code is not None:
                self._caller.put_code(at, submission.code)
            runs = self._caller.ready(at)
            if str(RunFolder.at(runs, submission.run).root) != submission.launch.run_dir:
                raise UsageError(f"{node}: paths.runs is {runs} there, and another path elsewhere")
            self._caller.call(at, "install", attempt_files(submission, runs))

        problem = first_error(side_by_side(one, names[:1] if shared else names, self._cluster.ssh.connections))
        if problem is not None:
            raise problem

    def _start(self, node: str, request: Mapping[str, Any], begun: list[str]) -> dict[str, Any]:
        begun.append(node)  # also when the answer gets lost: an agent may be there
        return self._caller.call(self._at(node), "start", request, timeout_s=90.0)

    def _undo(
        self, request: Mapping[str, Any], nodes: Sequence[str], begun: Sequence[str], problem: ZerunError
    ) -> None:
        stopped = side_by_side(lambda n: self._stop(n, request), list(nodes), self._cluster.ssh.connections)
        left = [n for n, _, trouble in stopped if n in begun and isinstance(trouble, (Unreachable, NoSpace))]
        if left:
            problem.hint = f"{problem.hint + '; ' if problem.hint else ''}agents may be left on {', '.join(left)}"

    def _stop(self, node: str, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._caller.call(self._at(node), "stop", {**request, "grace_s": _GRACE_S}, timeout_s=90.0)

    def find(self, name: str, run: str, attempt: int) -> Handle | None:
        """The agents that wrote a record of this attempt."""
        run_dir = ""
        agents: dict[str, Any] = {}
        problems: list[ZerunError] = []

        def ask(place: Place) -> Mapping[str, Any]:
            folder = str(RunFolder.at(place.runs, run).root)
            return self.call(place, "state", {"run_dirs": [folder], "attempt": attempt})

        for place, answer, problem in side_by_side(ask, self.places(), self._cluster.ssh.connections):
            if answer is None:
                problems += [problem] if problem is not None else []
                continue
            run_dir = str(RunFolder.at(place.runs, run).root)
            found = answer["runs"].get(run_dir, {}).get("attempts", {}).get(str(attempt), {})
            agents.update({record["node"]: record["agent"] for record in found.get("records", ())})
        if not agents and problems:
            raise problems[0]
        return Handle("direct", {"agents": agents, "name": name, "run_dir": run_dir}) if agents else None

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        """Asks each node once which of the agents live: this very process, not a later one of its number."""
        wanted: dict[str, list[Mapping[str, Any]]] = {}
        for handle in handles:
            for node, process in self._agents(handle).items():
                wanted.setdefault(node, []).append(process)

        def living(node: str) -> frozenset[_Identity]:
            if node not in self._nodes:
                raise Unreachable(f"{node}: it is no longer in the cluster's description")
            return _living(self._at(node), wanted[node])

        asked = side_by_side(living, list(wanted), self._cluster.ssh.connections)
        answers = {node: found for node, found, _ in asked}
        silent = {node: problem.message for node, _, problem in asked if problem is not None}
        return [_fold(self._agents(handle), answers, silent) for handle in handles]

    @staticmethod
    def _agents(handle: Handle) -> _Agents:
        agents: _Agents = handle.data.get("agents", {})
        return agents

    # --- end --------------------------------------------------------------------------------------

    def cancel(self, handle: Handle, run: str, attempt: int) -> None:
        """Raises PartialAnswer naming the nodes that did not answer, Unreachable when none did."""
        nodes = list(self._agents(handle)) or self._nodes
        run_dir = handle.data.get("run_dir") or str(RunFolder.at(self.places()[0].runs, run).root)
        request = {"run_dir": run_dir, "attempt": attempt}
        done = side_by_side(lambda n: self._stop(n, request), nodes, self._cluster.ssh.connections)
        failed = {node: problem for node, _, problem in done if problem is not None}
        if not failed:
            return
        told = "; ".join(problem.message for problem in failed.values())
        if len(failed) == len(nodes):
            worst = first_error(done)
            assert worst is not None
            raise worst
        raise PartialAnswer(
            f"stopped, but not on {', '.join(failed)}: {told}",
            hint=f"zerun cancel {run} again, once they can be reached",
        )

    def execute(self, handle: Handle, node: str, request: Mapping[str, Any]) -> Stream:
        at = self._at(node)
        return at.stream(self._caller.argv(at, "exec"), stdin=json.dumps(request).encode())

    def pairs(self, run: str, num_nodes: int) -> list[dict[str, Any]]:
        """Whether the first ``num_nodes`` reach each other (backends.reach)."""
        from .reach import pairs

        return pairs(self._cluster, run, self._cluster.node_list[:num_nodes], self._at, self._caller)

    def check(self) -> Sequence[Finding]:
        from .check import check_direct

        return check_direct(self._cluster, self._connector, self._caller)

    def close(self) -> None:
        self._connector.close()


def _living(at: Transport, processes: Sequence[Mapping[str, Any]]) -> frozenset[_Identity]:
    """Those of ``processes`` that live; zombies do not."""
    files = ["/proc/sys/kernel/random/boot_id", *sorted({f"/proc/{int(p['pid'])}/stat" for p in processes})]
    done = at.run(["cat", *files])  # a process that is gone only makes cat complain
    boot, _, rest = done.stdout.decode("utf-8", "replace").partition("\n")
    now: dict[int, tuple[str, int]] = {}
    for line in rest.splitlines():
        # The command stands in brackets and may hold anything but a newline: count from its end.
        fields = line.rpartition(")")[2].split()
        if len(fields) >= 20 and line.split(" ", 1)[0].isdigit():
            now[int(line.split(" ", 1)[0])] = (fields[0], int(fields[19]))
    return frozenset(
        _identity(p)
        for p in processes
        if p["boot"] in ("", boot.strip())
        and now.get(int(p["pid"]), ("X", -1))[0] not in "ZXx"
        and now.get(int(p["pid"]), ("X", -1))[1] == int(p["started_ticks"])
    )


def _identity(process: Mapping[str, Any]) -> _Identity:
    return int(process["pid"]), int(process["started_ticks"]), str(process["boot"])


def _fold(agents: _Agents, answers: Mapping[str, frozenset[_Identity] | None], silent: Mapping[str, str]) -> Poll:
    if not agents:
        return Poll("absent")
    alive = [n for n, p in agents.items() if _identity(p) in (answers.get(n) or ())]
    missing = [silent[n] for n in agents if n in silent]
    why = "; ".join(missing)
    if alive:
        return Poll("running", why=why, nodes=tuple(agents))
    if missing:
        return Poll("unknown", why=why, nodes=tuple(agents))
    return Poll("ended", nodes=tuple(agents))
