"""Attempts that are begun: submit, resume."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..attempts import Source, keep_code, made_of, one_folder, take_attempt
from ..attempts.beforehand import Again, ask_first
from ..bundles import Bundle, Shipment, is_listing, runtime_bundle
from ..contract.errors import Unreachable, UsageError
from ..runs import Run, RunState
from ..runs.choice import tag_names
from .plans import refuse_what_cannot_fit
from .project import Notice, Project

if TYPE_CHECKING:
    from ..attempts.starting import Waiting
    from ..backends.protocol import Backend, Handle
    from ..checkpoints import Candidate
    from ..specs.models import Job


_BY_ITSELF = "the program begins again, or goes on from what it kept itself ($ZERUN_ATTEMPT is above 1)"


@dataclass(frozen=True)
class Submitted:
    """``notes`` is what a person should read before walking away, a line each."""

    run: str
    attempt: int
    handle: Handle
    notes: tuple[str, ...]


class Starts(Project):
    """The use cases that begin an attempt."""

    def submit(
        self,
        job: Path,
        cluster: str | None = None,
        sets: Sequence[str] = (),
        *,
        force: bool = False,
        waiting: Waiting | None = None,
        tags: Sequence[str] = (),
        here: bool = False,
    ) -> Submitted:
        """Ships, submits, and returns once the cluster has the job.

        Raises DoesNotFit before anything is sent, unless ``force``; without a scheduler Busy when others hold the
        slots, unless ``waiting`` says how long to wait for them. ``here``: inside this shell's Slurm allocation.
        """
        from .. import datasets
        from ..attempts.begin_with import check_weights
        from ..attempts.starting import Waiting, start_first
        from ..backends.inside import job_here

        loaded_job, loaded_cluster, plan = self.planned(job, cluster, sets, built=True)
        refuse_what_cannot_fit(plan, force=force)
        secret_values = read_secrets(loaded_job.secrets)
        code = self.code(job, loaded_job, sets, secret_values)
        backend = self.attempts.open(loaded_cluster, runtime_bundle())
        try:
            if not loaded_cluster.local:  # there it is kept in the same folder, and looked at when it was
                backend.expect(Shipment(code.name, code.data, self.store.root))
            backend.places()  # connects: nothing is written for a cluster that does not answer, or is taken
            data = datasets.check(backend, loaded_job, loaded_cluster, plan, Path(code.root))
            begins = check_weights(backend, plan, code)
            device_kind = loaded_cluster.device_of(plan.nodes[0].name).kind
            waiting = (waiting or Waiting()).for_slots(backend, plan.nodes, device_kind)
            within = job_here(loaded_cluster, len(plan.nodes), os.environ) if here else None
            source = Source(loaded_job, loaded_cluster, plan, code, data=data, here=within)
            name = self.store.new_name(plan.job_name, datetime.datetime.now())
            told = ask_first(self.attempts, backend, source, name, force=force)
            kept = {"name": code.name, "root": code.root, "commit": code.commit, "changed": code.changed}
            found_by = sorted({*loaded_job.tags, *tag_names(tags)})
            about = {**source.about(name), "job_file": str(job.resolve()), "tags": found_by, "code": kept}
            with self.store.begin(name, about) as run:
                keep_code(run, code)
                run, handle, attempt = start_first(self.attempts, backend, run, source, secret_values, waiting)
                sent = None if loaded_cluster.local else backend.sent()
        finally:
            backend.close()
        return Submitted(run.name, attempt, handle, (code.sentence(sent), *code.notes, *begins, *plan.remarks, *told))

    def resume(
        self,
        run: str,
        *,
        nodes: int | None = None,
        step: int | None = None,
        sets: Sequence[str] = (),
        notice: Notice | None = None,
        waiting: Waiting | None = None,
    ) -> Submitted:
        """The next attempt of the run, from the newest whole checkpoint, on the same or another number of nodes.

        ``sets`` are assignments over the job as its last attempt had it (``steps=600`` goes further);
        a checkpoint that does not fit what they make of the model is refused by the engine.
        """
        from .. import datasets, specs
        from ..attempts.former import answering, end_former, standing_still
        from ..attempts.starting import Waiting
        from ..checkpoints import candidates, choose
        from ..planning import check_engine, make_plan

        if of_cluster := specs.split_sets(sets)[1]:
            raise UsageError(
                f"--set {of_cluster[0]}: a resume keeps the cluster that the run was submitted to",
                hint="--nodes M takes another number of its nodes; keys of the job may be set",
            )
        loaded = self.store.load(self.resolve(run))
        before = made_of(loaded, loaded.attempt)
        assigned = (*before.sets, *sets)
        job = specs.job_from_plain(loaded.about["job"], assigned)
        cluster = specs.moved(specs.cluster_from_plain(loaded.about["cluster"]), job.pool)
        secret_values = read_secrets(job.secrets)
        backend = self.attempts.open(cluster, runtime_bundle())
        code_name = str(loaded.about["code"]["name"])
        self._expect(backend, code_name)
        try:
            state = self.attempts.look(backend, [loaded])[0]
            loaded = self.store.load(loaded.name)
            state, over = standing_still(backend, loaded, state, notice or (lambda _: None))
            refuse_to_resume(state, again=step is not None or bool(sets))
            found = candidates(self._about(backend, loaded), loaded.folder, sends_back=True)
            # A program that keeps its checkpoints elsewhere, or in files of its own, finds them itself.
            chosen = choose(found, step) if found or step is not None or job.program is None else None
            refuse_what_trains_nothing(state, job, chosen, told=any(s.startswith("steps=") for s in sets))
            kept = None if any(s.startswith("batch.") for s in sets) else before.global_batch
            everyone = cluster
            cluster, without = answering(backend, cluster, job.nodes if nodes is None else nodes)
            plan = make_plan(job, cluster, nodes=nodes, global_batch=kept)
            check_engine(plan)
            refuse_what_cannot_fit(plan)
            notes = [*over, *_explained(found, chosen), *without]
            notes += end_former(self.attempts, backend, everyone, loaded, state.attempt)
            device_kind = cluster.device_of(plan.nodes[0].name).kind
            (waiting or Waiting()).for_slots(backend, plan.nodes, device_kind)
            attempt = max(state.attempt, loaded.attempt) + 1
            data = datasets.check_again(backend, job, cluster, plan, loaded.about.get("data", ()))
            code = Bundle(code_name, self.attempts.blob(code_name))
            source = Source(job, cluster, plan, code, assigned, data, goes_on=chosen)
            again = Again(attempt, sum(candidate.whole for candidate in found))
            notes += [*plan.remarks, *ask_first(self.attempts, backend, source, loaded.name, again=again)]
            with loaded.making():
                loaded = self.store.load(loaded.name)
                handle, moved = self._go_on(backend, loaded, source, attempt, secret_values, notice)
        finally:
            backend.close()
        return Submitted(loaded.name, attempt, handle, (*notes, *moved))

    def _go_on(
        self,
        backend: Backend,
        run: Run,
        source: Source,
        attempt: int,
        secret_values: Mapping[str, str],
        notice: Notice | None,
    ) -> tuple[Handle, list[str]]:
        """Sends ``attempt`` of ``run``, and before it its checkpoint where nodes lack it. And what moved."""
        take_attempt(run, attempt)
        launch = self.attempts.launch(source, run.name, attempt, one_folder(backend.places()))
        moved = None
        if source.goes_on is not None:
            bring = _bringer(source.goes_on, source.job, shared=launch.shared)
            moved = bring(backend, run.name, run.folder, source.goes_on, launch, notice or (lambda _: None))
        _, handle = self.attempts.send(backend, run, source, launch, secret_values)
        return handle, [moved] if moved else []

    def _expect(self, backend: Backend, code_name: str) -> None:
        """Tells which code will be sent; bytes that are gone at home are told of when they are needed."""
        if is_listing(code_name):
            with contextlib.suppress(UsageError):
                backend.expect(self.attempts.shipment(code_name))


def _bringer(chosen: Candidate, job: Job, *, shared: bool) -> Callable[..., str | None]:
    """What makes the checkpoint ``chosen`` whole on the shared disk, or on every node where each keeps its own."""
    from ..checkpoints import hand_back, send_back, stage

    if shared:
        return send_back
    if not chosen.name:
        return stage
    if job.checkpoint.hand_back == "everywhere":
        return hand_back
    return lambda *_: f"{chosen.name} stays on the nodes that wrote it, a piece each"


def _explained(found: Sequence[Candidate], chosen: Candidate | None) -> list[str]:
    from ..checkpoints import explain

    return list(explain(found, chosen)) if chosen else ["the run has no checkpoint that zerun knows; " + _BY_ITSELF]


def read_secrets(names: Sequence[str]) -> dict[str, str]:
    """The values of ``secrets`` from this environment. Raises UsageError naming those that are not set."""
    missing = [n for n in names if n not in os.environ]
    if missing:
        raise UsageError(f"the job wants secrets that are not set here: {', '.join(missing)}", hint="export them first")
    return {n: os.environ[n] for n in names}


def refuse_to_resume(state: RunState, *, again: bool) -> None:
    """A run that goes on, or of which it is not known, must not be doubled; one that is done only ``again``."""
    if state.state == "unknown":
        raise Unreachable(f"{state.run}: whether it still runs is not known ({state.why})")
    if not state.ended:
        raise UsageError(f"{state.run} is {state.state}", hint=f"zerun cancel {state.run} first, or wait for its end")
    if state.state == "done" and not again:
        raise UsageError(
            f"{state.run} is done: nothing is left to resume",
            hint="--step S goes again from a checkpoint, --set steps=N goes further",
        )


def refuse_what_trains_nothing(state: RunState, job: Job, chosen: Candidate | None, *, told: bool) -> None:
    """A checkpoint at the job's last step, or past it, leaves nothing to train. Only a run that was cut after its last
    step goes on from there, to end as it should; not where ``told`` says that ``steps`` was just set."""
    if chosen is None or chosen.name or job.steps is None or chosen.step < job.steps:
        return
    if chosen.step == job.steps and state.state != "done" and not told:
        return
    where = "the job's last step" if chosen.step == job.steps else f"past the job's {job.steps} steps"
    raise UsageError(
        f"{state.run}: the checkpoint is of step {chosen.step}, {where}: nothing is left to train",
        hint=f"--set steps=N with N above {chosen.step} goes further, --step S goes again from an earlier checkpoint",
    )
