"""A plan as text: a block a question, and where each number comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import show

if TYPE_CHECKING:
    from ..planning.memory import Count
    from ..planning.plan import Plan, StageMemory, StatePlan, TableRow
    from ..planning.search import Searched

_MOST_FOUND = 20


def plan_lines(plan: Plan) -> list[str]:
    """The plan of a job as text."""
    ranks = plan.topology.world_size
    lines = _head_lines(plan)
    if plan.train is None:
        return lines
    if plan.state.stages:
        lines += ["", *_state_lines(plan.state, ranks), _STATE_ONLY]
    if plan.step:
        lines += ["", *_step_lines(plan)]
    if plan.traffic is not None:
        lines += ["", *_traffic_lines(plan), "", *_bound_lines(plan)]
    return [*lines, "", *_verdict_lines(plan)]


_STATE_ONLY = "This is state memory, not step memory: what a step needs beside it stands below, line by line."


def _head_lines(plan: Plan) -> list[str]:
    topology = plan.topology
    slots = sorted(set(topology.slots))
    a_node = f"{slots[0]}" if len(slots) == 1 else f"{slots[0]} to {slots[-1]}"
    cut = f", {topology.data_parallel} data-parallel × {topology.tensor} tensor" if topology.tensor > 1 else ""
    if topology.replicas > 1:
        cut += f"; {topology.replicas} replicas, each partitioned over {topology.shard_ranks} ranks"
    lines = [
        f"job      {plan.job_name} on {plan.cluster_name} ({plan.backend}{f', pool {plan.pool}' if plan.pool else ''})",
        f"ranks    {topology.world_size} = {_count(len(plan.nodes), 'node')}, {a_node} a node{cut}",
    ]
    named = [n.name for n in plan.nodes if n.name]
    if named:
        lines.append(f"nodes    {' '.join(named)}")
    if plan.program is not None:
        lines.append(f"program  {' '.join(plan.program.argv)}")
        lines += [f"data     {variable}: {show.visible(path)}" for variable, path in plan.program.data.items()]
    if plan.train is not None:
        batch = plan.train.batch
        lines.append(
            f"batch    {plan.global_batch} samples a step = {batch.micro} micro × {batch.accumulation} accumulation"
            f" × {topology.data_parallel} data-parallel ranks"
        )
        lines.append(f"steps    {plan.train.steps}, precision {plan.train.precision}")
    if plan.time_s is not None:
        lines.append(f"time     at most {show.duration(plan.time_s)}")
    if plan.disk is not None:
        from ..planning.disk import sentence

        lines.append(f"disk     {sentence(plan.disk)}")
    lines += [f"note     {remark}" for remark in plan.remarks]
    return lines + [f"refused  when submitted: {refusal}" for refusal in plan.not_built]


def _size(count: int | None) -> str:
    """Decimal units, as the paper and the verdict tell them."""
    from ..planning.memory import readable

    return "-" if count is None else readable(count)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- state ----------------------------------------------------------------------------------------


def _state_lines(state: StatePlan, ranks: int) -> list[str]:
    device = _size(state.device_bytes) if state.device_bytes is not None else "not described"
    head = ("zero_stage", "parameters", "gradients", "optimizer", "a rank", "all ranks", "floor", "fits", "largest")
    rows = [_stage_row(s, state, state.largest[s.zero_stage] if state.largest else None) for s in state.stages]
    title = f"state memory of {state.parameters:,} parameters on {_count(ranks, 'rank')}; device: {device}"
    return [title, *show.columns(head, rows, right=(*range(1, 7), 8))]


def _stage_row(stage: StageMemory, state: StatePlan, largest: int | None) -> tuple[str, ...]:
    if stage.fits is None:
        fits = "?"
    elif stage.fits:
        fits = "yes"
    elif stage.smallest_ranks_that_fit is not None:
        fits = f"no, from {stage.smallest_ranks_that_fit} ranks"
    else:
        fits = f"never: the floor {_size(stage.floor_bytes)} is above the {_size(state.device_bytes)}"
    sizes = (stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.total_bytes)
    cells = [_size(n) for n in (*sizes, stage.all_ranks_bytes, stage.floor_bytes)]
    most = "-" if largest is None else f"{largest:,}"
    return (
        f"{stage.zero_stage} (chosen)" if stage.zero_stage == state.chosen else str(stage.zero_stage),
        *cells,
        fits,
        most,
    )


def count_lines(count: Count, state: StatePlan) -> list[str]:
    """A number of parameters without a job."""
    dtype = count.gradient_dtype or count.precision
    each = count.each
    return [
        *_state_lines(state, count.ranks),
        f"{count.precision} weights {each.weights} B, {dtype} gradients {each.gradients} B, {count.optimizer} "
        f"{each.optimizer} B a parameter; tensor degree {count.tensor}. State memory, not step memory.",
    ]


def table_lines(rows: Sequence[TableRow]) -> list[str]:
    """Stages × world sizes, in the paper's decimal units and by its rounding."""
    head = ("ranks", *(f"stage {s.zero_stage}" for s in rows[0].stages))
    cells = [(str(row.ranks), *(_size(s.total_bytes) + _mark(s) for s in row.stages)) for row in rows]
    return ["state bytes a rank (* fits the device)", *show.columns(head, cells, right=range(5))]


def _mark(stage: StageMemory) -> str:
    return " " if stage.fits is None else "*" if stage.fits else " "


# --- the step -------------------------------------------------------------------------------------


def _step_lines(plan: Plan) -> list[str]:
    moments = ("at the loss", "in backward", "in the update")
    if plan.simulation is not None:
        moments = ("most in forward", "in backward", "in the update")
    head = ("a step holds", *moments, "source", "")
    rows = [
        (
            line.what,
            *(_size(n) if n else "-" for n in (line.alive.loss, line.alive.backward, line.alive.update)),
            line.source,
            line.note,
        )
        for line in plan.step
        if line.bytes or "in host memory" in line.note
    ]
    lines = show.columns(head, rows, right=(1, 2, 3))
    if plan.simulation is not None:
        from ..planning.simulated import sentence

        lines.append(sentence(plan.simulation))
    return lines


def _traffic_lines(plan: Plan) -> list[str]:
    if not plan.traffic:
        return ["communication: none, one rank is alone"]
    rows = [
        (
            t.what,
            f"{t.collective} over {t.group} ranks",
            f"{t.volume_elements:,}",
            *(_size(n) for n in (t.sent_bytes, t.inside_bytes, t.node_bytes)),
        )
        for t in plan.traffic
    ]
    head = ("sent a step", "", "elements", "a rank", "inside its node", "out of a node")
    total = _size(plan.sent_bytes_per_step)
    return [*show.columns(head, rows, right=(2, 3, 4, 5)), f"in all {total} a rank"]


def _bound_lines(plan: Plan) -> list[str]:
    bounds = plan.bounds
    if bounds is None:
        return []
    known = {"compute": bounds.compute_s, "inside a node": bounds.inside_s, "between nodes": bounds.between_s}
    told = "   ".join(f"{name} {_seconds(value)}" for name, value in known.items())
    lines = [f"bounds   {told}"]
    if bounds.step_s is not None:
        lines.append(f"         a step takes {_seconds(bounds.step_s)} or more, bound by {bounds.bounded_by}")
    if bounds.missing:
        lines.append(f"         not in the cluster's description: {', '.join(bounds.missing)}")
    return lines


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1000:.3g} ms"


def _verdict_lines(plan: Plan) -> list[str]:
    found = plan.judgement
    lines = [f"verdict  {found.verdict}: {found.because}"]
    if found.best:
        lines.append(f"try      {' '.join(f'--set {s}' for s in found.best)}")
    for one in found.tried:
        later = f"; {len(one.not_built)} not built" if one.not_built else ""
        needs = f", {_size(one.needs_bytes)} by arithmetic" if one.needs_bytes is not None else ""
        lines.append(f"tried    {' '.join(one.sets)}: {one.verdict}{needs}{later}")
    return lines


# --- search ---------------------------------------------------------------------------------------


def search_lines(searched: Searched) -> list[str]:
    """What fits, quickest bound first."""
    lines = [
        f"{len(searched.found)} of {searched.planned} fit at a global batch of {searched.global_batch} "
        f"({searched.unsure} could not be said); lower bounds, not predictions"
    ]
    head = ("step", "bound by", "zero_stage", "tensor", "micro", "accumulation", "recompute", "holds", "sends", "", "")
    rows = [
        (
            _seconds(f.step_s),
            f.bounded_by or "-",
            str(f.zero_stage),
            str(f.tensor),
            str(f.micro_batch),
            str(f.accumulation),
            f.recompute,
            _size(f.needs_bytes),
            _size(f.sent_bytes_per_step),
            "not built" if f.not_built else "",
            " ".join(f"--set {s}" for s in f.sets),
        )
        for f in searched.found[:_MOST_FOUND]
    ]
    if rows:
        lines += show.columns(head, rows, right=(0, 7, 8))
    if len(searched.found) > _MOST_FOUND:
        lines.append(f"and {len(searched.found) - _MOST_FOUND} more (--json has all)")
    return lines
