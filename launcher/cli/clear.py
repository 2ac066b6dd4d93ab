"""Verbs that remove: said in bytes first, done when a person (or --yes) says so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.errors import PartialAnswer, UsageError
from . import complete, options, show

if TYPE_CHECKING:
    from ..clearing import Clearing

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN…",
        help="Runs' ids, unique beginnings, or `last`.",
        show_default=False,
        autocompletion=complete.runs,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Does not ask.")]


def rm_verb(
    runs: Runs,
    remote: Annotated[bool, typer.Option("--remote", help="Also what lies on the run's cluster.")] = False,
    yes: Yes = False,
) -> None:
    """Removes runs that have ended: their logs, metrics and checkpoints at home, with --remote on the cluster too.

    Says first where how many bytes lie, and asks; off a terminal --yes is needed. A machine that does not answer keeps
    its part, and home keeps its own, so that the rest is found again (exit 8).
    """
    app = options.open_app()

    def sure(clearing: Clearing) -> bool:
        for line in clearing_lines(clearing):
            show.note(line)
        return confirmed(f"remove {show.num_bytes(clearing.bytes)}?", yes)

    left: dict[str, Clearing] = {}
    for name in [app.resolve(run) for run in runs]:
        gone = app.remove(name, remote=remote, sure=sure)
        if gone is None:
            show.note(f"{name} stays")
            continue
        where = f" on {', '.join(heap.where for heap in gone.heaps)}" if gone.silent else ""
        show.data(f"{name}  removed{where}, {show.num_bytes(gone.bytes)} free again")
        left.update({name: gone} if gone.silent else {})
    _say_what_is_left(left)


def _say_what_is_left(left: Mapping[str, Clearing]) -> None:
    """Raises PartialAnswer for what machines that did not answer may still hold."""
    from ..clearing import the_rest

    if left:
        told = [f"{name}: what lies on {', '.join(gone.silent)} and at home stays" for name, gone in left.items()]
        said = dict(pair for gone in left.values() for pair in gone.silent.items())
        first = next(iter(left.values()))
        raise PartialAnswer("\n".join([*told, *said.values()]), hint=the_rest(first.run))


def clearing_lines(clearing: Clearing) -> list[str]:
    lines = []
    for heap in clearing.heaps:
        size = f"{show.num_bytes(heap.bytes)} in {show.count(heap.files, 'file')}"
        lines.append(f"{clearing.run.name}  {size}, {heap.where}: {heap.folder}")
        if heap.shipped_files:
            code = f"{show.num_bytes(heap.shipped_bytes)} in {show.count(heap.shipped_files, 'file')}"
            lines.append(f"  beside it {code} of shipped code that no run needs any more")
    if clearing.only_there:
        there = clearing.only_there
        lines.append(f"  nowhere else whole: checkpoint{'s' if len(there) > 1 else ''} at step {show.steps(there)}")
    if clearing.silent:
        lines.append(f"  not answering: {', '.join(clearing.silent)}; what lies there and at home stays")
    if clearing.stays:
        lines.append(f"  what lies on {clearing.stays} stays (--remote removes it too)")
    return lines


def confirmed(question: str, yes: bool) -> bool:
    """Raises UsageError where nobody can be asked: what removes must never be answered by a closed stdin."""
    if yes:
        return True
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise UsageError(f"{question} nobody can be asked here", hint="--yes says so beforehand")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
