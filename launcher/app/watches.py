"""Runs that are looked at: their states, lines, and what runs beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..attempts import made_of, not_known, remembered
from ..bundles import runtime_bundle
from ..contract.errors import (
    Exit,
    ZerunError,
)
from ..runs import Run, RunState
from .project import Notice, Project

if TYPE_CHECKING:
    from ..elsewhere import OnCluster
    from ..execute import Sink
    from ..logs.merge import LogLine
    from ..logs.select import Selection
    from ..measured import Beside


class Watches(Project):
    """The use cases that change nothing."""

    def status(self, run: str) -> RunState:
        """What the run is now. An unreachable cluster gives the state ``unknown`` with the reason, no error."""
        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            return self.attempts.look(backend, [loaded])[0]
        finally:
            backend.close()

    def beside_plan(self, run: str, attempt: int) -> list[Beside]:
        """What the plan of the run said, beside what its ranks measured (as far as that lies at home)."""
        from .. import specs
        from ..measured import beside
        from ..planning import make_plan

        loaded = self.store.load(self.resolve(run))
        made = made_of(loaded, attempt)
        job = specs.job_from_plain(loaded.about["job"], made.sets)
        cluster = specs.moved(specs.cluster_from_plain(loaded.about["cluster"]), job.pool)
        plan = make_plan(job, cluster, nodes=made.num_nodes, global_batch=made.global_batch)
        return beside(loaded, attempt, plan)

    def list_runs(self, may_be: Callable[[Run], bool] = lambda _: True) -> list[RunState]:
        """Every run at home that may be meant, oldest first; those not known to have ended are asked after."""
        names = self.store.names()
        states: dict[str, RunState] = {}
        asked: dict[str, list[Run]] = {}
        for name in names:
            try:
                run = self.store.load(name)
                if not may_be(run):
                    continue
                states[name] = remembered(run) or not_known(name, "nobody was asked", run)
            except ZerunError as problem:  # one damaged folder must not hide the other runs
                states[name] = not_known(name, problem.message)
                continue
            if not states[name].ended:
                asked.setdefault(states[name].cluster, []).append(run)
        for runs in asked.values():
            try:
                states.update({state.run: state for state in self._look_once(runs)})
            except ZerunError as problem:
                states.update({run.name: not_known(run.name, problem.message, run) for run in runs})
        return [states[name] for name in names if name in states]

    def runs_on(self, name: str | None = None, *, all_users: bool = False) -> OnCluster:
        """The runs that lie on a cluster, oldest first. One's own that another laptop submitted are taken up here."""
        from ..elsewhere import find_runs, on_cluster

        cluster = self.cluster(name)
        backend = self.attempts.open(cluster, runtime_bundle())
        try:
            return on_cluster(backend, self.attempts, find_runs(backend, cluster, self.store, all_users=all_users))
        finally:
            backend.close()

    def _look_once(self, runs: Sequence[Run]) -> list[RunState]:
        backend = self.attempts.open_for(runs[-1])
        try:
            return self.attempts.look(backend, runs)
        finally:
            backend.close()

    def wait(self, run: str, timeout_s: float | None = None, notice: Notice | None = None) -> RunState:
        """Returns when the run has ended, or with a living state when ``timeout_s`` has passed."""
        loaded = self.store.load(self.resolve(run))
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause, told = 0.5, ""
        backend = self.attempts.open_for(loaded)
        try:
            while True:
                state = self.attempts.look(backend, [self.store.load(loaded.name)])[0]
                line = f"{state.state}{': ' + state.why if state.why else ''}"
                if notice is not None and line != told:
                    notice(line)
                    told = line
                left = None if end is None else end - time.monotonic()
                if state.ended or (left is not None and left <= 0):
                    return state
                time.sleep(pause if left is None else min(pause, left))
                pause = min(pause * 1.5, 10.0)
        finally:
            backend.close()

    def logs(
        self, run: str, selection: Selection, *, follow: bool = False, notice: Notice | None = None
    ) -> Iterator[LogLine]:
        """All ranks' lines merged by time; with ``follow`` until the attempt ends.

        Raises PartialAnswer after the lines of all who answered, naming who did not.
        """
        from ..logs.follow import Known
        from ..logs.follow import follow as stream

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)

        def ended() -> bool:
            try:
                return self.attempts.look(backend, [self.store.load(loaded.name)])[0].ended
            except ZerunError:  # it cannot be told now: the node is asked on
                return False

        known, told = Known(_nodes_of(loaded), ended), notice or (lambda _: None)
        try:
            yield from stream(backend, loaded.name, loaded.attempt, selection, follow=follow, notice=told, known=known)
        finally:
            backend.close()

    def execute(self, run: str, argv: Sequence[str], *, node: str | None, rank: int | None, sink: Sink) -> int:
        """Runs a command beside the ranks of a run that runs; its output goes to ``sink``, its status is returned."""
        from ..execute import execute

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            state = self.attempts.look(backend, [loaded])[0]
            return execute(backend, self.store.load(loaded.name), state, argv, (node, rank), sink)
        finally:
            backend.close()


def _nodes_of(run: Run) -> frozenset[str] | None:
    """Where a run without a scheduler was started: machines that an earlier attempt left need not answer any more."""
    agents = run.handle.data.get("agents") if run.handle is not None and run.handle.backend == "direct" else None
    return frozenset(agents) if agents else None


def exit_code_of(state: RunState) -> int:
    """What ``wait`` and ``submit --follow`` return: the job's, or 10 while it goes on, 4 when it is not known."""
    if state.exit_code is not None:
        return state.exit_code
    return int(Exit.UNREACHABLE if state.state == "unknown" else Exit.STILL_RUNNING)
