"""``zerun plan``: what a job on a cluster comes to, or a number of parameters on a number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.errors import DoesNotFit, UsageError
from . import options, plan_count, show
from .plan_text import plan_lines, search_lines, table_lines

if TYPE_CHECKING:
    from ..planning.plan import Plan

__all__ = ["plan_lines", "plan_verb", "refuse_if_too_large"]

Table = Annotated[bool, typer.Option("--table", help="State of every ZeRO stage at many world sizes.")]
Search = Annotated[
    bool,
    typer.Option("--search", help="Every stage, micro-batch and recomputation that fits, by lower-bound step time."),
]
Simulate = Annotated[
    bool,
    typer.Option("--simulate", help="Runs one step of the real engine on nothing, in a process that needs torch."),
]
Rank = Annotated[int | None, typer.Option("--rank", metavar="R", min=0, help="Which rank to simulate. Default: 0.")]
Svg = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="With --simulate: memory over the step, as a picture.")
]
Room = Annotated[bool, typer.Option("--room", help="Asks the cluster whether checkpoints have room: exit 6 when not.")]


def plan_verb(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB]", help="The job's YAML file; or give --parameters and --ranks.")
    ] = None,
    cluster: options.Cluster = None,
    sets: options.Sets = None,
    as_json: options.Json = False,
    table: Table = False,
    search: Search = False,
    simulate: Simulate = False,
    rank: Rank = None,
    svg: Svg = None,
    room: Room = False,
    parameters: plan_count.Parameters = None,
    ranks: plan_count.Ranks = None,
    tensor: plan_count.Tensor = None,
    precision: plan_count.Precision = None,
    gradient_dtype: plan_count.GradientDtype = None,
    optimizer: plan_count.Optimizer = None,
    frozen: plan_count.Frozen = None,
    device_memory: plan_count.DeviceMemory = None,
) -> None:
    """Says what a job on a cluster comes to: state memory, the whole step, communication, bounds, and whether it fits.

    Connects to nothing but with --room; needs no torch but for --simulate. Exit 3 when it does not fit. Without a job,
    --parameters and --ranks give the state memory of every ZeRO stage.
    """
    if not simulate and (rank is not None or svg is not None):
        raise UsageError("--rank and --svg say what of a simulation", hint="give --simulate with them")
    alone: dict[str, str | int | None] = {
        "--parameters": parameters,
        "--ranks": ranks,
        "--tensor": tensor,
        "--precision": precision,
        "--gradient-dtype": gradient_dtype,
        "--optimizer": optimizer,
        "--frozen": frozen,
        "--device-memory": device_memory,
    }
    given = {name: value for name, value in alone.items() if value is not None}
    if job is None:
        if parameters is None:
            raise UsageError("plan what? a JOB, or --parameters N --ranks N", hint="zerun plan --help")
        if cluster is not None or sets or search or simulate or room:
            said = "--cluster, --set, --search, --simulate and --room need a job"
            raise UsageError(said, hint="or leave them out beside --parameters")
        plan_count.plan(given, as_json=as_json, table=table)
        return
    if given:
        hint = "with one, say it by --set: zero.stage=3, cluster.device.memory=80GiB"
        raise UsageError(f"{next(iter(given))} goes without a job", hint=hint)
    if simulate:
        if table or search:
            raise UsageError("--simulate is of one plan: leave --table and --search out")
        _simulate(job, cluster, sets or [], rank or 0, svg, as_json=as_json)
        return
    _plan_job(job, cluster, sets or [], as_json=as_json, table=table, search=search)
    if room:
        for line in options.open_app().room(job, cluster, sets or []):
            show.note(line)


def _plan_job(job: Path, cluster: str | None, sets: Sequence[str], *, as_json: bool, table: bool, search: bool) -> None:
    from ..planning.make import job_table
    from ..planning.search import search as find
    from ..planning.told import WORLDS, told_plan, told_table

    app = options.open_app()
    loaded_job, loaded_cluster, plan = app.planned(job, cluster, sets)
    told: dict[str, Any] = told_plan(plan)
    lines = plan_lines(plan)
    with app.telling_where(job, cluster or loaded_job.cluster, sets):
        rows = job_table(loaded_job, loaded_cluster, plan, WORLDS) if table else None
        found = find(loaded_job, loaded_cluster) if search else None
    if rows is not None:
        told["table"] = told_table(rows)
        lines += ["", *table_lines(rows)]
    if found is not None:
        told["search"] = found
        lines = search_lines(found) if not table else [*lines, "", *search_lines(found)]
    if as_json:
        show.data_json(told)
    else:
        for line in lines:
            show.data(line)
    if not search:
        refuse_if_too_large(plan)


def _simulate(
    job: Path, cluster: str | None, sets: Sequence[str], rank: int, svg: Path | None, *, as_json: bool
) -> None:
    from ..contract.plain import write_atomically
    from ..planning.timeline import timeline_svg
    from ..planning.told import told_plan

    plan = options.open_app().simulate(job, cluster, sets, rank=rank)
    assert plan.simulation is not None
    if svg is not None:
        picture = timeline_svg(plan.simulation, f"{plan.job_name} on {plan.cluster_name}", plan.state.device_bytes)
        try:
            write_atomically(svg, picture.encode())
        except OSError as problem:
            raise UsageError(f"--svg {svg}: {problem.strerror}") from problem
    if as_json:
        show.data_json(told_plan(plan))
    else:
        for line in plan_lines(plan):
            show.data(line)
    refuse_if_too_large(plan)


def refuse_if_too_large(plan: Plan) -> None:
    """Raises DoesNotFit when arithmetic says so."""
    found = plan.judgement
    if found.verdict == "does not fit":
        sets = " ".join(f"--set {s}" for s in found.best)
        raise DoesNotFit(
            found.because, hint=f"this would fit: {sets}" if sets else "no single setting would make it fit"
        )
