"""Verbs that start nothing: cluster show, cluster check, plan, render, data prepare."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.errors import Exit
from . import options, show

if TYPE_CHECKING:
    from ..backends.protocol import Finding
    from ..planning.plan import Plan, StageMemory, StatePlan

cluster_verbs = typer.Typer(help="Clusters: what a description says, and what stands there.", no_args_is_help=True)
data_verbs = typer.Typer(help="Token files.", no_args_is_help=True)


@cluster_verbs.command("show")
def cluster_show(name: options.ClusterName = None, as_json: options.Json = False) -> None:
    """Prints a cluster as it was understood.

    Every default is filled in, node lists are written out, bytes and seconds are numbers.
    """
    from ..specs import describe

    cluster = options.open_app().cluster(name)
    plain: dict[str, Any] = {**describe(cluster)}
    plain["node_list"] = [n.model_dump(mode="json", exclude_none=True) for n in cluster.node_list]
    if as_json:
        show.data_json(plain)
        return
    for line in _outline(plain):
        show.data(line)


def _outline(value: Mapping[str, Any], indent: str = "") -> list[str]:
    lines = []
    for key, item in value.items():
        if item is None or item in ({}, [], ""):
            continue
        if isinstance(item, dict):
            lines += [f"{indent}{key}:", *_outline(item, indent + "  ")]
        elif isinstance(item, list) and all(isinstance(i, dict) for i in item):
            lines.append(f"{indent}{key}: ({len(item)})")
            lines += [f"{indent}  " + ", ".join(f"{k}={_scalar(v)}" for k, v in i.items()) for i in item]
        else:
            lines.append(f"{indent}{key}: {_scalar(item)}")
    return lines


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return " ".join(_scalar(v) for v in value)
    text = str(value)
    exact = re.fullmatch(r"(\d{4,})B(/s)?", text)
    if exact:
        return f"{text} ({show.num_bytes(int(exact[1]))}{exact[2] or ''})"
    return repr(text) if "\n" in text or text != text.strip() or not text else text


@cluster_verbs.command("check")
def cluster_check(name: options.ClusterName = None, as_json: options.Json = False) -> None:
    """Reaches every node and says what a job would meet there: one line a node.

    Exit 8 when only part of the nodes are well, 4 when none answered.
    """
    findings = options.open_app().check_cluster(name)
    if as_json:
        show.data_json(findings)
    else:
        for finding in findings:
            _print_finding(finding)
    well = sum(f.ok for f in findings)
    show.note(f"{well} of {len(findings)} are well")
    if well < len(findings):
        raise typer.Exit(int(Exit.PARTIAL if well else Exit.UNREACHABLE))


def _print_finding(finding: Finding) -> None:
    mark = show.paint("ok  ", "green", sys.stdout) if finding.ok else show.paint("FAIL", "red", sys.stdout)
    facts = "  ".join(f"{k} {_fact(k, v)}" for k, v in finding.facts.items() if v not in (None, "", [], {}))
    show.data(f"{mark}  {finding.name}  {show.visible(facts)}".rstrip())
    for problem in finding.problems:
        for number, line in enumerate(problem.splitlines()):
            show.data(f"      {'- ' if number == 0 else '  '}{show.visible(line)}")


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return show.num_bytes(value)
    if key.endswith("_s") and isinstance(value, (int, float)):
        return f"{value:+.3f}" if key.startswith("clock") else f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(str(v) for v in value)
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def plan_verb(
    job: options.Job, cluster: options.Cluster = None, sets: options.Sets = None, as_json: options.Json = False
) -> None:
    """Says what a job on a cluster comes to: ranks, batch, state memory.

    Starts nothing and connects to nothing. Exit 3 when the state of the chosen ZeRO stage is above the device.
    """
    plan = options.open_app().plan(job, cluster, sets or [])
    if as_json:
        show.data_json(plan)
    else:
        for line in plan_lines(plan):
            show.data(line)
    refuse_if_too_large(plan)


def refuse_if_too_large(plan: Plan) -> None:
    """Raises DoesNotFit, the same that a submit raises."""
    from ..app import refuse_what_cannot_fit

    refuse_what_cannot_fit(plan)


def plan_lines(plan: Plan) -> list[str]:
    """The plan as text."""
    ranks = plan.topology.world_size
    slots = sorted(set(plan.topology.slots))
    a_node = f"{slots[0]}" if len(slots) == 1 else f"{slots[0]} to {slots[-1]}"
    lines = [
        f"job      {plan.job_name} on {plan.cluster_name} ({plan.backend})",
        f"ranks    {ranks} = {show.count(len(plan.nodes), 'node')}, {a_node} a node",
    ]
    named = [n.name for n in plan.nodes if n.name]
    if named:
        lines.append(f"nodes    {' '.join(named)}")
    if plan.program is not None:
        lines.append(f"program  {' '.join(plan.program.argv)}")
    if plan.train is not None:
        batch = plan.train.batch
        lines.append(
            f"batch    {plan.global_batch} samples a step = {batch.micro} micro × {batch.accumulation} accumulation"
            f" × {plan.topology.data_parallel} data-parallel ranks"
        )
        lines.append(f"steps    {plan.train.steps}, precision {plan.train.precision}")
    if plan.time_s is not None:
        lines.append(f"time     at most {show.duration(plan.time_s)}")
    lines += [f"refused  {show.visible(words)}" for words in plan.not_built]
    return lines + _state_lines(plan.state, ranks) if plan.train is not None else lines


def _state_lines(state: StatePlan, ranks: int) -> list[str]:
    lines = [""]
    if state.stages:
        device = show.num_bytes(state.device_bytes) if state.device_bytes is not None else "not described"
        lines.append(
            f"state memory of {state.parameters:,} parameters on {show.count(ranks, 'rank')}; device: {device}"
        )
        head = ("zero_stage", "parameters", "gradients", "optimizer", "a rank", "all ranks", "floor", "fits")
        rows = [_stage_row(s, s.zero_stage == state.chosen) for s in state.stages]
        lines += show.columns(head, rows, right=range(1, 7))
    lines.append(f"verdict  {state.verdict}: {state.because}" if state.because else f"verdict  {state.verdict}")
    lines.append("This is state memory, not step memory: activations, gathered parameters, communication buffers and")
    lines.append("temporaries come on top and are not in these numbers.")
    return lines


def _stage_row(stage: StageMemory, chosen: bool) -> tuple[str, ...]:
    if stage.fits is None:
        fits = "?"
    elif stage.fits:
        fits = "yes"
    elif stage.smallest_ranks_that_fit is not None:
        fits = f"no, from {stage.smallest_ranks_that_fit} ranks"
    else:
        fits = "on no number of ranks"
    sizes = (stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.total_bytes)
    cells = [show.num_bytes(n) for n in (*sizes, stage.all_ranks_bytes, stage.floor_bytes)]
    return (f"{stage.zero_stage} (chosen)" if chosen else str(stage.zero_stage), *cells, fits)


def render_verb(
    job: options.Job,
    cluster: options.Cluster = None,
    sets: options.Sets = None,
    templates: options.Templates = None,
) -> None:
    """Prints exactly the script that would be submitted.

    Needs neither Slurm nor torch nor a connection.
    """
    show.data_bytes(options.open_app(templates).render(job, cluster, sets or []))


@data_verbs.command("prepare")
def data_prepare(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text files.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where train.bin and heldout.bin go.")],
    as_json: options.Json = False,
) -> None:
    """Turns text files into token files: train.bin and heldout.bin.

    A token is a byte; whole files go to one side or the other, so that no text is in both.
    """
    made = options.open_app().prepare_data(files, out)
    if as_json:
        show.data_json(made)
        return
    for key, value in made.items():
        show.data(f"{key}: {show.num_bytes(value) if key.endswith('_bytes') else value}")
