"""Whether a whole step fits, and the smallest change of one setting that would make it: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..specs.models import Cluster, Job
from .memory import NO_DEVICE, readable
from .plan import Judgement, Plan, StatePlan, StepLine, Tried
from .reasons import CannotPlan
from .step import together

Draft = Callable[[Job, int], Plan]
"""(job, nodes) → its plan without a search for changes. Raises CannotPlan."""

_MOST_NODES_TRIED = 24


def judge(state: StatePlan, lines: tuple[StepLine, ...]) -> Judgement:
    """``fits`` when everything does, assumptions included; ``does not fit`` when arithmetic alone is above the
    device; between the two it cannot be said, because assumptions would decide."""
    if not lines:
        return Judgement(state.verdict, state.because)
    sure, all_of_it = together(lines, assumed=False), together(lines, assumed=True)
    device = state.device_bytes
    if device is None:
        return Judgement("cannot be said", NO_DEVICE, sure)  # what the state lacked, a simulation may have brought
    if state.verdict == "does not fit":
        return Judgement("does not fit", _state_alone(state), sure)
    simulated = any(line.source == "simulated" for line in lines)
    subject, how = ("a simulated step", "as simulated") if simulated else ("arithmetic", "by arithmetic")
    further = "a run" if simulated else "a simulation or a run"
    largest = max((line for line in lines if line.source != "assumed"), key=lambda line: line.bytes)
    if sure > device:
        over = readable(sure - device)
        because = (
            f"a rank holds at least {readable(sure)} at one moment of a step, {over} above the {readable(device)} of a "
            f"device; the largest line is {largest.what} ({readable(largest.bytes)})"
        )
        return Judgement("does not fit", because, sure)
    if all_of_it > device:
        because = (
            f"{subject} comes to {readable(sure)} of {readable(device)}, with what is assumed "
            f"{readable(all_of_it)}: the assumed lines decide, {further} would tell"
        )
        return Judgement("cannot be said", because, sure)
    because = (
        f"the most at one moment is {readable(sure)} {how}, {readable(all_of_it)} with what is "
        f"assumed, of {readable(device)}; the largest line is {largest.what} ({readable(largest.bytes)})"
    )
    return Judgement("fits", because, sure)


def _state_alone(state: StatePlan) -> str:
    """The state is decided before any step is looked at."""
    return f"{state.because}; state alone decides, no benchmark is needed"


def with_changes(plan: Plan, job: Job, cluster: Cluster, draft: Draft) -> Judgement:
    """The plan's judgement with every single change that was tried, in the order of what they cost.

    Of the changes that fit, those that the engine can train come first.
    """
    found = plan.judgement
    if found.verdict != "does not fit" or not plan.step:
        return found
    tried: list[Tried] = []
    for kind in (_stages, _micro_batches, _recomputation, _more_nodes):
        for sets, changed, nodes in kind(plan, job, cluster):
            try:
                other = draft(changed, nodes)
            except CannotPlan:
                continue
            told = other.judgement
            tried.append(Tried(sets, told.verdict, told.needs_bytes, other.not_built))
            if told.verdict == "fits":
                break
    fitting = [t for t in tried if t.verdict == "fits"]
    fitting.sort(key=lambda t: len(t.not_built))  # stable: the order of costs stays
    return replace(found, best=fitting[0].sets if fitting else (), tried=tuple(tried))


Change = tuple[tuple[str, ...], Job, int]


def _stages(plan: Plan, job: Job, cluster: Cluster) -> Iterator[Change]:
    zero = job.zero
    if zero is not None:
        for stage in range(zero.stage + 1, 4):
            yield stage_sets(job, stage), with_stage(job, stage), len(plan.nodes)


def _micro_batches(plan: Plan, job: Job, cluster: Cluster) -> Iterator[Change]:
    """Smaller ones that keep the global batch, the largest first."""
    if plan.train is None or plan.global_batch is None:
        return
    micro = plan.train.batch.micro
    share = plan.global_batch // plan.topology.data_parallel
    for smaller in range(micro - 1, 0, -1):
        if share % smaller == 0:
            sets = [f"batch.micro={smaller}"]
            if job.batch is not None and job.batch.accumulation is not None:
                sets.append(f"batch.accumulation={share // smaller}")
            yield tuple(sets), with_micro(job, smaller, plan.global_batch, share // smaller), len(plan.nodes)


def _recomputation(plan: Plan, job: Job, cluster: Cluster) -> Iterator[Change]:
    if job.recompute != "block":
        yield ("recompute=block",), with_recompute(job, "block"), len(plan.nodes)


def _more_nodes(plan: Plan, job: Job, cluster: Cluster) -> Iterator[Change]:
    """More nodes on which the global batch can be kept, as many as the cluster is known to have."""
    batch, has = job.batch, len(cluster.node_list)
    if batch is None or plan.train is None or plan.global_batch is None:
        return
    each = plan.topology.world_size // len(plan.nodes)
    tried = 0
    for nodes in range(len(plan.nodes) + 1, (has or 64 * len(plan.nodes)) + 1):
        at_once, rest = divmod(nodes * each, plan.topology.tensor)
        if rest or plan.global_batch % (batch.micro * at_once):
            continue
        sets = [f"nodes={nodes}"]
        accumulation = plan.global_batch // (batch.micro * at_once)
        if batch.accumulation is not None and accumulation != batch.accumulation:
            sets.append(f"batch.accumulation={accumulation}")
        yield tuple(sets), with_micro(job, batch.micro, plan.global_batch, accumulation), nodes
        tried += 1
        if tried == _MOST_NODES_TRIED:
            return


# --- one setting changed ----------------------------------------------------------------------------


def with_stage(job: Job, stage: int) -> Job:
    assert job.zero is not None
    changed = {"stage": stage, "reduce_with": "ordered" if stage else job.zero.reduce_with}
    return job.model_copy(update={"zero": job.zero.model_copy(update=changed)})


def stage_sets(job: Job, stage: int) -> tuple[str, ...]:
    """What ``--set`` takes for :func:`with_stage`: the library's sum goes with stage 0 alone."""
    native = job.zero is not None and job.zero.reduce_with == "native" and stage > 0
    return (f"zero.stage={stage}", *(("zero.reduce_with=ordered",) if native else ()))


def with_micro(job: Job, micro: int, global_batch: int, accumulation: int) -> Job:
    """The same global batch in other micro-batches, said the way the job says it."""
    assert job.batch is not None
    said = {"micro": micro}
    said |= {"accumulation": accumulation} if job.batch.accumulation is not None else {"global_": global_batch}
    return job.model_copy(update={"batch": job.batch.model_copy(update=said)})


def with_tensor(job: Job, degree: int) -> Job:
    update: dict[str, object] = {"parallel": job.parallel.model_copy(update={"tensor": degree})}
    if degree == 1 and job.activations == "partitioned":
        update["activations"] = "whole"
    return job.model_copy(update=update)


def with_recompute(job: Job, recompute: str | tuple[int, ...]) -> Job:
    update: dict[str, object] = {"recompute": recompute}
    if recompute == "none":
        update["activations"] = "whole"
    return job.model_copy(update=update)
