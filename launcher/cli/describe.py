"""Verbs that start nothing: cluster show, cluster check, render. (plan: plan.py, data: data.py.)"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.errors import Exit, UsageError
from . import options, show

if TYPE_CHECKING:
    from ..backends.protocol import Finding

cluster_verbs = typer.Typer(help="Clusters: what a description says, and what stands there.", no_args_is_help=True)


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
            inner = _outline(item, indent + "  ")
            lines += [f"{indent}{key}:", *inner] if inner else []
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
def cluster_check(
    name: options.ClusterName = None,
    job: Annotated[
        bool, typer.Option("--job", help="Runs a small job too: do all pairs of nodes reach each other?")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", metavar="N", min=1, help="How many nodes --job takes. Default: 2 under Slurm, else all of them."
        ),
    ] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", metavar="POOL", help="In which pool --job runs. Default: the cluster's.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Reaches every node and says what a job would meet there: one line a node.

    With --job a job of its own follows (Slurm: it queues, and is over within two minutes): every node opens a port
    from network.ports, all pairs connect, and ranks sum a small tensor; the pairs that fail are named.

    Exit 8 when something is not well, 4 when no node could be reached.
    """
    if (nodes is not None or pool is not None) and not job:
        raise UsageError("--nodes and --pool are for --job", hint="zerun cluster check --job --nodes N --pool POOL")
    findings = options.open_app().check_cluster(name)
    if job and any(f.facts.get("reached") for f in findings):
        findings += options.open_app().check_network(name, nodes, show.note, pool=pool)
    if as_json:
        show.data_json(findings)
    else:
        for finding in findings:
            _print_finding(finding)
    well = sum(f.ok for f in findings)
    show.note(f"{well} of {len(findings)} are well")
    if well < len(findings):
        answered = well or any(f.facts.get("reached") for f in findings)
        raise typer.Exit(int(Exit.PARTIAL if answered else Exit.UNREACHABLE))


def _print_finding(finding: Finding) -> None:
    mark = show.paint("ok  ", "green", sys.stdout) if finding.ok else show.paint("FAIL", "red", sys.stdout)
    facts = "  ".join(f"{k} {_fact(k, v)}" for k, v in finding.facts.items() if v not in (None, "", [], {}))
    show.data(f"{mark}  {finding.name}  {show.visible(facts)}".rstrip())
    for problem in finding.problems:
        for number, line in enumerate(problem.splitlines()):
            show.data(f"      {'- ' if number == 0 else '  '}{show.visible(line)}")


def _fact(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key.endswith("_bytes"):
        return show.num_bytes(value)
    if key.endswith("_s") and isinstance(value, (int, float)):
        return f"{value:+.3f}" if key.startswith("clock") else f"{value:.3g}"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, (list, tuple)):
        return ",".join(str(v) for v in value)
    if isinstance(value, Mapping):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return str(value)


def render_verb(
    job: options.Job,
    cluster: options.Cluster = None,
    sets: options.Sets = None,
    templates: options.Templates = None,
) -> None:
    """Prints exactly the script that would be submitted.

    Needs neither Slurm nor torch nor a connection. What only a submit knows stands as RUN (the run's id), and as ~
    or $NAME in paths.runs, which are expanded on the cluster.
    """
    show.data_bytes(options.open_app(templates).render(job, cluster, sets or []))
