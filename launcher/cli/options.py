"""The arguments and options that several verbs share, so that they mean and say the same everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import complete

if TYPE_CHECKING:
    from ..app import App

Job = Annotated[Path, typer.Argument(metavar="JOB", help="The job's YAML file.", show_default=False)]
ClusterName = Annotated[
    str | None,
    typer.Argument(
        metavar="[CLUSTER]",
        help="A name in clusters/, or a path. Default: $ZERUN_CLUSTER, then yours.",
        autocompletion=complete.clusters,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        metavar="CLUSTER",
        help="A name in clusters/, or a path. Default: the job's, $ZERUN_CLUSTER.",
        autocompletion=complete.clusters,
    ),
]
ClusterAlone = Annotated[  # of verbs that read no job
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        metavar="CLUSTER",
        help="A name in clusters/, or a path. Default: $ZERUN_CLUSTER, then yours.",
        autocompletion=complete.clusters,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Overrides a key of the job, or of its cluster: --set zero.stage=3, --set cluster.nodes.slots=4.",
        autocompletion=complete.assignments,
    ),
]
JobSets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Overrides a key of the job: --set steps=600."),
]
Templates = Annotated[
    Path | None, typer.Option("--templates", metavar="DIR", help="Templates that replace ours, by the same names.")
]


def _run_named(more: str = "") -> Any:
    told = f"A run's id, a unique beginning of one, or `last`{more}."
    return typer.Argument(metavar="RUN", help=told, show_default=False, autocompletion=complete.runs)


Run = Annotated[str, _run_named()]
RunOrFolder = Annotated[str, _run_named("; or the path of a folder that zero.save() wrote")]
Json = Annotated[bool, typer.Option("--json", help="Prints one JSON value instead of text.")]


FOR_EVER = "for ever"


def filled_in(arguments: Sequence[str]) -> list[str]:
    """``--wait-free`` alone stands for no limit: options here take their value always or never."""
    found = list(arguments)
    for at in [i for i, word in enumerate(found) if word == "--wait-free"]:
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?[a-z]*([0-9]+[a-z]+)*", found[at + 1] if at + 1 < len(found) else ""):
            found[at] = f"--wait-free={FOR_EVER}"
    return found


def open_app(templates: Path | None = None) -> App:
    """The use cases; imported here because only verbs that run need them."""
    from ..app import App

    return App(templates=templates)
