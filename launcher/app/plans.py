"""What is known before anything is sent: the plan, the script, what a step would hold."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..attempts import Source
from ..attempts.beforehand import room
from ..bundles import Bundle, runtime_bundle
from ..contract.errors import (
    DoesNotFit,
    UsageError,
)
from .project import Project

if TYPE_CHECKING:
    from ..planning.plan import Plan


@dataclass(frozen=True)
class Prepared:
    """Everything about an attempt that is known before anything is sent."""

    plan: Plan
    script: bytes
    notes: tuple[str, ...]


class Plans(Project):
    """The use cases before the queue."""

    def plan(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> Plan:
        return self.planned(job, cluster, sets)[2]

    def room(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> tuple[str, ...]:
        """What the job's checkpoints take beside what is left on the cluster, which is asked. Raises NoSpace."""
        loaded_job, loaded_cluster, plan = self.planned(job, cluster, sets)
        backend = self.attempts.open(loaded_cluster, runtime_bundle())
        try:
            return room(backend, Source(loaded_job, loaded_cluster, plan, Bundle("", b"")))
        finally:
            backend.close()

    def simulate(self, job: Path, cluster: str | None = None, sets: Sequence[str] = (), *, rank: int = 0) -> Plan:
        """The plan with a step of ``rank`` run by the real engine on nothing, in a process that needs torch."""
        from ..bundles import code_root
        from ..planning import with_simulation
        from ..simulation import request_of, run_simulation, with_its_line

        loaded_job, loaded_cluster, plan = self.planned(job, cluster, sets)
        code = code_root(job.resolve().parent, loaded_job.code.root)
        request = request_of(plan, rank, code, loaded_cluster.device_of(plan.nodes[0].name).kind)
        try:
            return with_simulation(plan, run_simulation(request, loaded_job.env))
        except UsageError as problem:
            raise with_its_line(problem, job) from problem

    def prepare(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> Prepared:
        """What ``submit`` would send, and the plan: needs no cluster, no Slurm and no torch.

        Paths that the cluster expands (``~``, ``$NAME``) stand in the script as they were written.
        """
        loaded_job, loaded_cluster, plan = self.planned(job, cluster, sets)
        known = {name: os.environ[name] for name in loaded_job.secrets if name in os.environ}
        code = self.code(job, loaded_job, sets, known)
        run = self.store.new_name(plan.job_name, datetime.datetime(2000, 1, 1)).rsplit("-", 3)[0] + "-RUN"
        runs = loaded_cluster.paths.runs or str(self.store.root)
        source = Source(loaded_job, loaded_cluster, plan, code)
        launch = self.attempts.launch(source, run, 1, runs, token="TOKEN")
        return Prepared(plan, self.attempts.render(source, launch), (code.sentence(), *code.notes))

    def render(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> bytes:
        """The script that would be submitted, byte for byte but for the run's name and token."""
        return self.prepare(job, cluster, sets).script


def refuse_what_cannot_fit(plan: Plan, *, force: bool = False) -> None:
    """Raises DoesNotFit, before anything is sent, for a state or a whole step above the device."""
    if force:
        return
    if plan.state.verdict == "does not fit":
        raise DoesNotFit(plan.state.because, hint="zerun plan shows every stage's state memory")
    if plan.judgement.verdict == "does not fit":
        best = " ".join(f"--set {assignment}" for assignment in plan.judgement.best)
        raise DoesNotFit(
            plan.judgement.because, hint=f"{best} would fit" if best else "zerun plan shows every line; --force submits"
        )
