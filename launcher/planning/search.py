"""Every way to train a job on a cluster at the same global batch that fits, quickest bound first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..specs.models import Cluster, GptModel, Job
from .make import draft_plan
from .plan import Plan
from .reasons import CannotPlan, Reason
from .verdict import stage_sets, with_micro, with_recompute, with_stage, with_tensor


@dataclass(frozen=True)
class Found:
    """``step_s`` is the largest lower bound that is known (None: none is); ``sets`` is what ``--set`` takes."""

    zero_stage: int
    tensor: int
    micro_batch: int
    accumulation: int
    recompute: str
    needs_bytes: int
    step_s: float | None
    bounded_by: str | None
    sent_bytes_per_step: int
    not_built: tuple[str, ...]
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Searched:
    """``found`` in the order of their bounds; what does not fit or cannot be said is counted only."""

    global_batch: int
    found: tuple[Found, ...]
    planned: int
    unsure: int


def search(job: Job, cluster: Cluster) -> Searched:
    """Plans (stage, tensor degree, micro-batch, recomputation) at the job's nodes and global batch.

    Tensor degrees are those that cut the model evenly inside a node (across nodes each block's sums would cross the
    slow links), and the job's own. Raises CannotPlan for a model that is not the reference GPT, and for a cluster
    without device memory: nothing could be said to fit.
    """
    own = draft_plan(job, cluster)
    if own.train is None:
        raise _no(own, Reason("model", "it runs a program of its own: there is nothing of it to plan", key="program"))
    if not own.step or own.global_batch is None:
        named = f"factory {own.train.factory.factory}" if own.train.factory else "this model"
        said = (
            f"a search plans thousands of settings from shapes; how many parameters {named} has, and what a step of it "
            "keeps, is known only when it runs"
        )
        hint = "--simulate with --set runs one setting on nothing; --parameters N --ranks N plans state alone"
        raise _no(own, Reason("model", said, hint))
    if own.state.device_bytes is None:
        said = f"cluster {cluster.name} has no device memory"
        raise _no(own, Reason("memory", said, "write device: {memory: …} into it"))
    found, planned, unsure = [], 0, 0
    for changed in _candidates(job, own):
        try:
            plan = draft_plan(changed, cluster)
        except CannotPlan:
            continue
        planned += 1
        unsure += plan.judgement.verdict == "cannot be said"
        if plan.judgement.verdict == "fits":
            found.append(_found(plan, changed, job))
    found.sort(key=_order)
    return Searched(own.global_batch, tuple(found), planned, unsure)


def _no(own: Plan, reason: Reason) -> CannotPlan:
    return CannotPlan(own.job_name, own.cluster_name, [reason])


def _candidates(job: Job, own: Plan) -> Iterator[Job]:
    assert own.global_batch is not None
    for tensor in _degrees(job, own):
        data_parallel, rest = divmod(own.topology.world_size, tensor)
        if rest or own.global_batch % data_parallel:
            continue
        share = own.global_batch // data_parallel
        wishes = ["none", "block"] if job.recompute in ("none", "block") else ["none", job.recompute, "block"]
        for recompute in wishes:
            for micro in (m for m in range(share, 0, -1) if share % m == 0):
                with_batch = with_micro(job, micro, own.global_batch, share // micro)
                cut = with_tensor(with_recompute(with_batch, recompute), tensor)
                for stage in range(4):
                    yield with_stage(cut, stage)


def _degrees(job: Job, own: Plan) -> list[int]:
    """Tensor degrees that cut the model evenly and keep every tensor group inside a node, and the job's own."""
    inside = math.gcd(*own.topology.slots)
    heads = job.model.heads if isinstance(job.model, GptModel) else 1
    even = [d for d in range(1, inside + 1) if inside % d == 0 and heads % d == 0]
    return sorted({*even, own.topology.tensor})


def _found(plan: Plan, changed: Job, job: Job) -> Found:
    assert plan.train is not None and plan.bounds is not None and plan.judgement.needs_bytes is not None
    batch = plan.train.batch
    sets = [*stage_sets(job, plan.train.zero.stage), f"batch.micro={batch.micro}"]
    if job.batch is not None and job.batch.accumulation is not None:
        sets.append(f"batch.accumulation={batch.accumulation}")
    if plan.topology.tensor != job.parallel.tensor:
        sets.append(f"parallel.tensor={plan.topology.tensor}")
    recompute = _recompute_text(changed.recompute)
    if changed.recompute != job.recompute:
        sets.append(f"recompute={recompute}")
    if changed.activations != job.activations:
        sets.append(f"activations={changed.activations}")
    return Found(
        zero_stage=plan.train.zero.stage,
        tensor=plan.topology.tensor,
        micro_batch=batch.micro,
        accumulation=batch.accumulation,
        recompute=recompute,
        needs_bytes=plan.judgement.needs_bytes,
        step_s=plan.bounds.step_s,
        bounded_by=plan.bounds.bounded_by,
        sent_bytes_per_step=plan.sent_bytes_per_step or 0,
        not_built=plan.not_built,
        sets=tuple(sets),
    )


def _recompute_text(recompute: str | tuple[int, ...]) -> str:
    return recompute if isinstance(recompute, str) else f"[{','.join(map(str, recompute))}]"


def _order(one: Found) -> tuple[float, int, int, int]:
    bound = float("inf") if one.step_s is None else one.step_s
    return bound, one.sent_bytes_per_step, one.needs_bytes, one.zero_stage
