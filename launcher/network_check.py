"""``zerun cluster check --job``: a real job that does nothing but find out whether its nodes can work together.

All pairs of nodes try each other on a port where a rendezvous would be; where that is well, ranks meet as any
job's would and sum a tensor whose sum is known. Nothing of it stays, here or on the cluster.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attempts import Attempts, Source, one_folder
from .backends.direct import DirectBackend
from .backends.protocol import Finding, Place
from .bundles import runtime_bundle
from .contract.errors import Busy, ZerunError
from .contract.folder import RunFolder, blob
from .runs import Run, RunState, RunStore

if TYPE_CHECKING:
    from .backends.protocol import Backend
    from .specs.models import Cluster

Notice = Callable[[str], None]
_FEW = 2  # nodes of a Slurm cluster, when nobody said how many
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Templates:
    """Where templates are looked for, as ``Attempts`` takes them."""

    given: Path | None
    users: Path


def check_network(cluster: Cluster, num_nodes: int | None, templates: Templates, notice: Notice) -> list[Finding]:
    """Two findings: the pairs, and the all-reduce (left out where a pair already failed).

    Blocks while the job queues; an interrupt cancels it. Raises as a submit does.
    """
    with tempfile.TemporaryDirectory(prefix="zerun-check-") as folder:
        attempts = Attempts(RunStore(Path(folder) / "runs"), templates.given, templates.users)
        backend = attempts.open(cluster, runtime_bundle())
        try:
            return _Check(cluster, attempts, backend, Path(folder), notice).run(_how_many(cluster, num_nodes))
        finally:
            backend.close()


def _how_many(cluster: Cluster, wanted: int | None) -> int:
    named = len(cluster.node_list)
    if wanted is not None:
        return wanted
    return named if cluster.backend == "direct" else min(_FEW, named or _FEW)


class _Check:
    def __init__(self, cluster: Cluster, attempts: Attempts, backend: Backend, folder: Path, notice: Notice) -> None:
        self._cluster, self._attempts, self._backend = cluster, attempts, backend
        self._folder, self._notice = folder, notice
        self._name = attempts.store.new_name("network-check", datetime.datetime.now())

    def run(self, num_nodes: int) -> list[Finding]:
        found: list[Finding] = []
        if isinstance(self._backend, DirectBackend):
            self._notice(f"{num_nodes} nodes try each other")
            found = [self._pairs(self._backend.pairs(self._name, num_nodes))]
            if not found[0].ok:
                return found
        try:
            return found + self._job(num_nodes)
        except Busy as problem:
            return [*found, Finding("all-reduce", ok=False, problems=(f"not tried: {problem.message}",))]

    def _pairs(self, seen: Sequence[Mapping[str, Any]]) -> Finding:
        problems = []
        for about in seen:
            problems += [about["problem"]] if about["problem"] else []
            for target in about["failed"]:
                where = "" if target["address"] == target["node"] else f" ({target['address']})"
                problems.append(
                    f"{about['node']} cannot reach {target['node']}:{target['port']}{where}: {target['why']}"
                )
            problems += [f"{about['node']} waited in vain for the node of rank {rank}" for rank in about["absent"]]
        num = len(seen)
        low, high = self._cluster.network.ports or (None, None)
        facts = {
            "reached": True,
            "nodes": num,
            "pairs": num * (num - 1),
            "ports": None if low is None else f"{low}-{high}",
            "interface": self._cluster.network.interface,
        }
        return Finding("network", ok=not problems, facts=facts, problems=tuple(dict.fromkeys(problems)))

    # --- the job ----------------------------------------------------------------------------------

    def _job(self, num_nodes: int) -> list[Finding]:
        from . import specs
        from .planning import make_plan

        cluster, slurm = self._cluster, self._cluster.backend == "slurm"
        places = self._backend.places()
        runs = one_folder(places)
        runtime = runtime_bundle()
        argv = [cluster.python, str(blob(runs, runtime.digest, ".zip")), "allreduce"]
        job = specs.job_from_plain(
            {
                "name": "network-check",
                "nodes": num_nodes,
                "slots_per_node": "all" if cluster.device.kind == "gpu" else 1,
                "time": "2:00",
                "program": {"argv": argv, "stop_signal": "USR1", "stop_grace": 1},
            }
        )
        plan = make_plan(job, cluster)
        code = self._folder / "code"
        code.mkdir()
        source = Source(job, cluster, plan, self._attempts.code(code, job))
        run = self._attempts.store.create(self._name, source.about(self._name))
        launch = replace(self._attempts.launch(source, self._name, 1, runs), reach=slurm)
        try:
            with run.making():
                run, handle = self._attempts.send(self._backend, run, source, launch, {})
            with _cancelled_when_interrupted(lambda: self._backend.cancel(handle, self._name, 1)):
                state = self._wait(run)
            found: list[Finding] = []
            if slurm:
                request = {"run_dir": launch.run_dir, "attempt": state.attempt}
                seen = self._backend.call(places[0], "reached", request)["found"]
                found = [self._board(seen, num_nodes, state, places[0])]
                if not found[0].ok:
                    return found
            return [*found, self._reduced(state, places, plan.nodes[0].name)]
        finally:
            self._clean(places)

    def _wait(self, run: Run) -> RunState:
        told = ""
        while True:
            state = self._attempts.look(self._backend, [self._attempts.store.load(run.name)])[0]
            line = f"{state.state}{': ' + state.why if state.why else ''}"
            if line != told and not state.ended:
                self._notice(f"the check's own job is {line}")
            told = line
            if state.ended:
                return state
            time.sleep(_PAUSE_S)

    def _board(self, seen: Sequence[Mapping[str, Any]], num_nodes: int, state: RunState, place: Place) -> Finding:
        found = self._pairs(seen)
        if len(seen) == num_nodes:
            return found
        # Slurm's own step needs the network too: what srun said is all that is known then.
        logs = RunFolder.at(place.runs, self._name).attempt(state.attempt).logs
        said = place.transport.run(["/bin/sh", "-c", 'tail -q -n 6 "$1"/slurm-*.out', "tail", str(logs)]).stdout
        lacking = f"{num_nodes - len(seen)} of {num_nodes} nodes did not say what they reach ({state.why})"
        lines = [f"Slurm said: {line}" for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        return replace(found, ok=False, problems=(*found.problems, lacking, *lines))

    def _reduced(self, state: RunState, places: Sequence[Place], first: str) -> Finding:
        place = next((p for p in places if p.node == first), places[0])
        log = RunFolder.at(place.runs, self._name).attempt(state.attempt).log(0)
        lines = place.transport.run(["cat", str(log)]).stdout.decode("utf-8", "replace").strip().splitlines()
        said: dict[str, Any] = {}
        for line in lines:
            with contextlib.suppress(ValueError):
                parsed = json.loads(line)
                said = parsed if isinstance(parsed, dict) else said
        if "skipped" in said:
            return Finding("all-reduce", ok=True, facts={"skipped": said["skipped"]})
        facts = {key: said.get(key) for key in ("ranks", "backend", "torch", "address", "met_s", "seconds", "bytes")}
        if state.state == "done" and said.get("wrong") == 0:
            return Finding("all-reduce", ok=True, facts=facts)
        problem = f"{said['wrong']} sums are wrong" if said.get("wrong") else f"{state.state}: {state.why}"
        return Finding("all-reduce", ok=False, facts=facts, problems=(problem, *lines[-3:]))

    def _clean(self, places: Sequence[Place]) -> None:
        for place in places:
            with contextlib.suppress(ZerunError):
                place.transport.run(["rm", "-rf", "--", str(RunFolder.at(place.runs, self._name).root)])


@contextlib.contextmanager
def _cancelled_when_interrupted(cancel: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(ZerunError):
            cancel()
        raise
