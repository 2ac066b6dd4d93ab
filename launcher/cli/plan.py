"""``zerun plan``: what a job on a cluster comes to, or a number of parameters on a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.errors import DoesNotFit, UsageError
from . import options, show
from .plan_text import count_lines, plan_lines, search_lines, table_lines

if TYPE_CHECKING:
    from ..planning.memory import Count
    from ..planning.plan import Plan

__all__ = ["plan_lines", "plan_verb", "refuse_if_too_large"]

_SCALES = {"k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


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
Parameters = Annotated[str | None, typer.Option("--parameters", metavar="N", help="Without a job: 7.5e9, 7.5B, 1T.")]
Ranks = Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, help="Ranks in all, with --parameters.")]
Tensor = Annotated[
    int | None, typer.Option("--tensor", metavar="T", min=1, help="Tensor-parallel degree, with --parameters.")
]
Precision = Annotated[
    str | None, typer.Option("--precision", metavar="P", help="bf16 (default), fp16 or fp32, with --parameters.")
]
GradientDtype = Annotated[
    str | None,
    typer.Option("--gradient-dtype", metavar="P", help="Of gradients, with --parameters. Default: the precision."),
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", metavar="O", help="adamw (default), momentum or sgd, with --parameters.")
]
Frozen = Annotated[
    str | None, typer.Option("--frozen", metavar="N", help="Parameters that are not trained, beside --parameters.")
]
DeviceMemory = Annotated[
    str | None, typer.Option("--device-memory", metavar="BYTES", help="32GB, 80GiB, with --parameters.")
]


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
    parameters: Parameters = None,
    ranks: Ranks = None,
    tensor: Tensor = None,
    precision: Precision = None,
    gradient_dtype: GradientDtype = None,
    optimizer: Optimizer = None,
    frozen: Frozen = None,
    device_memory: DeviceMemory = None,
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
    if job is not None:
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
        return
    if parameters is None:
        raise UsageError("plan what? a JOB, or --parameters N --ranks N", hint="zerun plan --help")
    if cluster is not None or sets or search or simulate or room:
        raise UsageError(
            "--cluster, --set, --search, --simulate and --room need a job", hint="or leave them out beside --parameters"
        )
    if ranks is None and not table:
        raise UsageError("--parameters needs --ranks too", hint="--ranks 64, or --table for many numbers of ranks")
    _plan_count(_count_of(given), _bytes(device_memory), as_json=as_json, table=table)


def _count_of(given: Mapping[str, str | int]) -> Count:
    from ..planning.memory import Count

    tensor = int(given.get("--tensor", 1))
    dtype = given.get("--gradient-dtype")
    return Count(
        parameters=_count(str(given["--parameters"]), "--parameters"),
        frozen=_count(str(given.get("--frozen", 0)), "--frozen"),
        ranks=int(given.get("--ranks", tensor)),
        tensor=tensor,
        precision=str(given.get("--precision", "bf16")),
        gradient_dtype=None if dtype is None else str(dtype),
        optimizer=str(given.get("--optimizer", "adamw")),
    )


def _plan_job(job: Path, cluster: str | None, sets: Sequence[str], *, as_json: bool, table: bool, search: bool) -> None:
    from ..planning.make import job_table
    from ..planning.search import search as find
    from ..planning.told import WORLDS, told_plan, told_table

    loaded_job, loaded_cluster, plan = options.open_app().planned(job, cluster, sets)
    told: dict[str, Any] = told_plan(plan)
    lines = plan_lines(plan)
    if table:
        rows = job_table(loaded_job, loaded_cluster, plan, WORLDS)
        told["table"] = told_table(rows)
        lines += ["", *table_lines(rows)]
    if search:
        found = find(loaded_job, loaded_cluster)
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


def _plan_count(count: Count, device_bytes: int | None, *, as_json: bool, table: bool) -> None:
    from ..planning.memory import plan_state, state_table
    from ..planning.told import WORLDS, told_count, told_table

    total = count.parameters + count.frozen
    state = plan_state(
        count.elements, count.each, chosen=None, world_size=count.ranks, device_bytes=device_bytes, parameters=total
    )
    told = told_count(count, state)
    lines = count_lines(count, state)
    if table:
        rows = state_table(count.elements, count.each, {*WORLDS, count.ranks}, device_bytes)
        told["table"] = told_table(rows)
        lines += ["", *table_lines(rows)]
    if as_json:
        show.data_json(told)
        return
    for line in lines:
        show.data(line)


def refuse_if_too_large(plan: Plan) -> None:
    """Raises DoesNotFit when arithmetic says so."""
    found = plan.judgement
    if found.verdict == "does not fit":
        sets = " ".join(f"--set {s}" for s in found.best)
        raise DoesNotFit(
            found.because, hint=f"this would fit: {sets}" if sets else "no single setting would make it fit"
        )


def _count(text: str, option: str) -> int:
    """``7.5e9``, ``7.5B``, ``1T`` or plain digits → a whole number."""
    scale = _SCALES.get(text[-1:], 1)
    try:
        value = Decimal(text[:-1] if scale > 1 else text.replace("_", "")) * scale
        if value.is_finite() and value == value.to_integral_value() and value >= 0:
            return int(value)
    except InvalidOperation:
        pass
    raise UsageError(f"{option} {text!r} is not a whole number of parameters; accepted: 7500000000, 7.5e9, 7.5B, 1T")


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from ..specs.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as problem:
        raise UsageError(f"--device-memory: {problem}") from None
