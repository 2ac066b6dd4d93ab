"""A job on a cluster → a Plan. Pure: everything that can be decided without the cluster is decided here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from ..contract import train
from ..contract.errors import UsageError
from ..contract.launch import Program
from ..contract.partition import Layout
from ..contract.topology import Topology
from ..specs import idle
from ..specs.models import Checkpoint, Cluster, Data, FactoryModel, GptModel, Job, Optimizer, Zero
from . import batch as batches
from . import options, shapes, unlike, verdict
from .communication import bounds, step_traffic
from .data_files import wanted_files
from .devices import check_precision, device_bytes, not_built
from .disk import disk_of
from .lost_disk import copies_of, disk_remarks
from .memory import MOMENTS, PRECISION_BYTES, ElementBytes, Elements, element_bytes, plan_state, state_table
from .partitioned import check_zero, layout_of, zero_of
from .place import SlotsWish, choose_nodes, pool_remarks
from .plan import Disk, Plan, StatePlan, TableRow
from .reasons import CannotPlan, Reason
from .saving import copy_lines
from .step import Step, step_lines

T = TypeVar("T")


def make_plan(
    job: Job,
    cluster: Cluster,
    *,
    nodes: int | None = None,
    slots: SlotsWish | None = None,
    global_batch: int | None = None,
) -> Plan:
    """What ``job`` on ``cluster`` comes to.

    ``nodes`` and ``slots`` override the job's (a resume on another number of nodes); ``global_batch`` is
    one that has to be kept, by changing accumulation. Raises CannotPlan with every reason at once. A step that
    is above the device is no error here: it is told by ``plan.judgement``, with the change that would fit.
    """
    plan = draft_plan(job, cluster, nodes=nodes, slots=slots, global_batch=global_batch)

    def other(changed: Job, on: int) -> Plan:
        return draft_plan(changed, cluster, nodes=on, slots=slots)

    return replace(plan, judgement=verdict.with_changes(plan, job, cluster, other))


def draft_plan(
    job: Job,
    cluster: Cluster,
    *,
    nodes: int | None = None,
    slots: SlotsWish | None = None,
    global_batch: int | None = None,
) -> Plan:
    """:func:`make_plan` without looking for changes that would fit."""
    wanted = job.nodes if nodes is None else nodes
    chosen, reasons = choose_nodes(cluster, wanted, job.slots_per_node if slots is None else slots)
    told = (*idle.words(job), *pool_remarks(job, cluster), *unlike.remarks(cluster, chosen))
    told += disk_remarks(job, cluster, chosen)
    cluster, unfit = unlike.on_nodes(cluster, chosen)
    reasons += unfit
    reasons += check_precision(job, cluster)
    reasons += _check_time(job, cluster)
    tensor = job.parallel.tensor if job.model is not None else 1
    world_size = sum(node.slots for node in chosen)
    reasons += shapes.check_tensor(job, tensor, world_size) if tensor > 1 and not reasons else []
    reasons += check_zero(job, chosen, tensor) if not reasons else []
    if reasons:
        raise CannotPlan(job.name, cluster.name, reasons)

    zero = zero_of(job.zero, len(chosen)) if job.model is not None and job.zero is not None else None
    topology = Topology(tuple(node.slots for node in chosen), tensor, zero.replicas if zero else 1)
    config = None
    if job.model is not None:
        config = _train_config(job, cluster, topology, global_batch)
    state = _state(job, cluster, topology)
    plan = Plan(
        job_name=job.name,
        cluster_name=cluster.name,
        backend=cluster.backend,
        nodes=chosen,
        topology=topology,
        train=config,
        program=_program(job, cluster),
        state=state,
        time_s=job.time,
        global_batch=config.batch.global_batch(topology.data_parallel) if config else None,
        not_built=not_built(job),
        judgement=verdict.judge(state, ()),
        pool=cluster.pool if cluster.pools else None,
        remarks=told,
    )
    return _with_step(plan, job, cluster)


def _program(job: Job, cluster: Cluster) -> Program | None:
    if job.program is None:
        return None
    return Program(job.program.argv, {file.variable: file.path for file in wanted_files(job.data, cluster)})


def _near(zero: train.Zero, topology: Topology, device_kind: str) -> tuple[bool, bool]:
    """Whether the ranks of every shard, and of every replica, read each other's memory: on CPU, where all of a group
    are on one node (and its system allows it, as all but some containers do)."""
    if device_kind != "cpu" or zero.same_host != "read":
        return False, False
    ranks = range(topology.world_size)
    groups = ([topology.shard_group(r) for r in ranks], [topology.replica_group(r) for r in ranks])
    shards, replicas = (all(map(topology.on_one_node, group)) for group in groups)
    return shards, replicas


def _with_step(plan: Plan, job: Job, cluster: Cluster) -> Plan:
    """The plan with its step, where the model's shapes are known."""
    config, model, state = plan.train, job.model, plan.state
    if config is None or not isinstance(model, GptModel) or state.chosen is None:
        return plan
    micro, topology = config.batch.micro, plan.topology
    recomputed = shapes.recomputed_blocks(job, model.layers)
    step = Step(
        shapes.Shapes.of(model, micro=micro, tensor=topology.tensor, item=PRECISION_BYTES[job.precision]),
        layout_of(job, model, topology, config.zero),
        state.stages[state.chosen],
        recomputed,
        job.activations,
        cluster.device.kind,
        config.zero,
        *_near(config.zero, topology, cluster.device.kind),
        MOMENTS[_moments(_need(job, job.optimizer, "optimizer"))],
    )
    copy = copy_lines(
        step.layout,
        background=config.checkpoint.background,
        moments=step.moments,
        device_kind=cluster.device.kind,
    )
    lines = (*step_lines(step), *copy)
    traffic = step_traffic(step, topology, config.batch.accumulation)
    flops = shapes.step_flops(model, samples=plan.global_batch or 0, recomputed=recomputed)
    return replace(
        plan,
        disk=_disk(job, step.layout, topology, copies_of(job, cluster, plan.nodes)),
        step=lines,
        traffic=traffic,
        bounds=bounds(traffic, cluster, flops=flops, world_size=topology.world_size, precision=job.precision),
        judgement=verdict.judge(state, lines),
    )


def _disk(job: Job, layout: Layout, topology: Topology, copies: int) -> Disk:
    moments = _moments(_need(job, job.optimizer, "optimizer"))
    steps = _need(job, job.steps, "steps")
    ranks = topology.world_size
    return disk_of(Elements.of_layout(layout), moments, job.checkpoint, steps=steps, ranks=ranks, copies=copies)


def job_table(job: Job, cluster: Cluster, plan: Plan, worlds: Iterable[int]) -> tuple[TableRow, ...]:
    """State of every stage at other world sizes, from the job's own partition."""
    if not isinstance(job.model, GptModel) or job.zero is None or job.optimizer is None:
        reason = Reason("model", "a table needs a model whose parameters are counted here")
        raise CannotPlan(job.name, cluster.name, [reason])
    each = _element_bytes(job, job.zero, job.optimizer)
    assert plan.train is not None
    elements = Elements.of_layout(layout_of(job, job.model, plan.topology, plan.train.zero))
    return state_table(elements, each, {*worlds, plan.topology.world_size}, device_bytes(cluster))


def check_engine(plan: Plan) -> None:
    """Refuses, by name, what is planned but not built in the engine: to be asked before anything is sent."""
    if plan.not_built:
        hint = "zerun plan and submit --dry-run answer for it all the same"
        reasons = [Reason("not_built", refusal, hint, refusal.partition(":")[0]) for refusal in plan.not_built]
        raise CannotPlan(plan.job_name, plan.cluster_name, reasons)


# --- checks ---------------------------------------------------------------------------------------


def _check_time(job: Job, cluster: Cluster) -> list[Reason]:
    time_max = cluster.time_max
    if job.time is None or time_max is None or job.time <= time_max:
        return []
    asked, most = options.slurm_time(job.time), options.slurm_time(time_max)
    return [Reason("time", f"time: {asked} was asked for, the cluster allows {most}", f"time: {most}")]


# --- state ----------------------------------------------------------------------------------------


def _state(job: Job, cluster: Cluster, topology: Topology) -> StatePlan:
    budget = device_bytes(cluster)
    if job.model is None:
        because = "a program of the user's own: its memory is not planned"
        return StatePlan(None, (), None, budget, "cannot be said", because)
    zero = _need(job, job.zero, "zero")
    each = _element_bytes(job, zero, _need(job, job.optimizer, "optimizer"))
    elements, parameters = None, None
    if isinstance(job.model, GptModel):
        layout = layout_of(job, job.model, topology, zero_of(zero, len(topology.slots)))
        elements, parameters = Elements.of_layout(layout), shapes.gpt_numel(job.model)
    return plan_state(
        elements,
        each,
        chosen=zero.stage,
        world_size=topology.world_size,
        device_bytes=budget,
        parameters=parameters,
    )


# --- what the engine reads ------------------------------------------------------------------------


def _train_config(job: Job, cluster: Cluster, topology: Topology, kept: int | None) -> train.TrainConfig:
    model, zero = job.model, _need(job, job.zero, "zero")
    gpt = factory = None
    if isinstance(model, GptModel):
        gpt = train.GPT(model.layers, model.hidden, model.heads, model.seq_len, model.vocab, model.dropout)
    elif isinstance(model, FactoryModel):
        factory = train.Factory(model.factory, dict(model.options), model.loss)
    evaluate = job.evaluate
    return train.TrainConfig(
        zero=zero_of(zero, len(topology.slots)),
        optimizer=_optimizer(_need(job, job.optimizer, "optimizer")),
        batch=_batch(job, cluster, topology, kept),
        steps=_need(job, job.steps, "steps"),
        data=_data(_need(job, job.data, "data"), cluster),
        gpt=gpt,
        factory=factory,
        weights=None if model is None else model.weights,
        precision=job.precision,
        seed=job.seed,
        tensor=topology.tensor,
        evaluate=train.Evaluate(evaluate.every, evaluate.tokens) if evaluate else None,
        checkpoint=_checkpointing(job.checkpoint),
        recompute=job.recompute,
        activations=job.activations,
        nonfinite=job.nonfinite,
        split=dict(job.parallel.split),
        groups=_groups(job),
        group_function=job.groups,
    )


def _checkpointing(said: Checkpoint) -> train.Checkpointing:
    return train.Checkpointing(said.every_steps, said.every_s, said.keep, said.background)


def _batch(job: Job, cluster: Cluster, topology: Topology, kept: int | None) -> train.Batch:
    wanted = _need(job, job.batch, "batch")
    if kept is not None:
        if kept % (wanted.micro * topology.data_parallel):
            each = topology.slots[0] if len(set(topology.slots)) == 1 and topology.tensor == 1 else None
            message = batches.cannot_keep(kept, wanted.micro, topology.data_parallel, ranks_a_node=each)
            raise CannotPlan(job.name, cluster.name, [Reason("batch", message)])
        return train.Batch(wanted.micro, kept // (wanted.micro * topology.data_parallel))
    batch, reason = batches.derive(
        micro=wanted.micro,
        accumulation=wanted.accumulation,
        global_batch=wanted.global_,
        data_parallel=topology.data_parallel,
    )
    if reason is not None:
        raise CannotPlan(job.name, cluster.name, [reason])
    return batch


def _element_bytes(job: Job, zero: Zero, optimizer: Optimizer) -> ElementBytes:
    each = element_bytes(job.precision, zero.gradient_dtype, _moments(optimizer))
    return replace(each, whole_gradients=zero.reduce_every == "step")


def _moments(optimizer: Optimizer) -> str:
    """The optimizer under the name by which its state is counted."""
    return "momentum" if optimizer.kind == "sgd" and optimizer.momentum else optimizer.kind


def _optimizer(optimizer: Optimizer) -> train.AdamW | train.SGD:
    if optimizer.kind == "sgd":
        return train.SGD(
            lr=optimizer.lr,
            momentum=optimizer.momentum,
            nesterov=optimizer.nesterov,
            weight_decay=optimizer.weight_decay,
            clip=optimizer.clip,
            warmup=optimizer.warmup,
            schedule=optimizer.schedule,
        )
    return train.AdamW(
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        betas=optimizer.betas,
        eps=optimizer.eps,
        clip=optimizer.clip,
        warmup=optimizer.warmup,
        schedule=optimizer.schedule,
    )


def _groups(job: Job) -> tuple[train.ParameterGroup, ...]:
    groups = job.optimizer.groups if job.optimizer else ()
    return tuple(train.ParameterGroup(group.match, group.lr, group.weight_decay) for group in groups)


def _data(data: Data, cluster: Cluster) -> train.Data:
    if data.dataset is not None:
        paths = {file.role: file.path for file in wanted_files(data, cluster)}
        return train.Data(None, paths["tokens"], paths.get("heldout"), None, dict(data.options))
    return train.Data(data.text, data.tokens, data.heldout, data.factory, dict(data.options))


def _need(job: Job, value: T | None, key: str) -> T:
    """A key that a job with a model has to have; the description's own check says it first, with its place."""
    if value is None:
        raise UsageError(f"job {job.name}: {key} is missing beside model")
    return value
