"""Which lines are wanted: raw flags to one typed, checked selection, in one place."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.errors import UsageError

MAX_RANKS = 1_000_000
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


@dataclass(frozen=True)
class Selection:
    """None means: no such limit. ``since`` is seconds since the epoch; ``last`` counts lines a rank."""

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    grep: re.Pattern[str] | None = None
    since: float | None = None
    last: int | None = None

    def wants_node(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes


def select(
    *,
    ranks: str | None = None,
    nodes: Sequence[str] = (),
    grep: str | None = None,
    since: str | None = None,
    tail: int | None = None,
    clock: Callable[[], float] = time.time,
) -> Selection:
    """The selection that flags mean; UsageError says what is wrong with which, and what is accepted."""
    if tail is not None and tail < 0:
        raise UsageError(f"--tail {tail}: a number of lines, 0 or more")
    return Selection(
        ranks=None if ranks is None else parse_ranks(ranks),
        nodes=parse_nodes(nodes) if nodes else None,
        grep=None if grep is None else parse_grep(grep),
        since=None if since is None else parse_since(since, clock()),
        last=tail,
    )


def parse_ranks(text: str) -> frozenset[int]:
    """``0,3-7`` → {0, 3, 4, 5, 6, 7}."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part, re.ASCII)
        if match is None:
            raise UsageError(f"--rank {text!r}: {part.strip()!r} is no rank and no range", hint="as in --rank 0,3-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"--rank {text!r}: the range {part.strip()!r} goes down", hint=f"write {last}-{first}")
        if last - first + len(found) >= MAX_RANKS:
            raise UsageError(f"--rank {text!r}: more than {MAX_RANKS} ranks")
        found.update(range(first, last + 1))
    return frozenset(found)


def parse_nodes(texts: Sequence[str]) -> frozenset[str]:
    """Node names in Slurm's syntax: ``node[01-03],gpu7``."""
    from ..specs.nodelist import NodeListError, expand

    names: set[str] = set()
    for text in texts:
        try:
            names.update(expand(text))
        except NodeListError as problem:
            raise UsageError(
                f"--node {text!r}, column {problem.column}: {problem}", hint="as in --node 'node[01-03],gpu7'"
            ) from problem
    return frozenset(names)


def parse_grep(text: str) -> re.Pattern[str]:
    """A regular expression; an error names the place in it."""
    try:
        return re.compile(text)
    except re.error as problem:
        column = (problem.pos or 0) + 1
        raise UsageError(
            f"--grep: {problem.msg} at character {column} of {text!r}",
            hint="a Python regular expression; put \\ before a character that is meant as itself, like \\( or \\[",
        ) from problem


def parse_since(text: str, now: float) -> float:
    """``90s``, ``10m`` (or ``10min``), ``2h``, ``1d`` ago, or an ISO time (local unless it says otherwise)."""
    match = _AGE.fullmatch(text.strip())
    if match is not None:
        return now - float(match[1]) * _SECONDS[match[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text!r}: neither an age nor a time", hint="as in --since 90s, 10m, 2h or 2026-01-31T14:25"
        ) from None


def request(selection: Selection, run_dir: str, attempt: int, *, follow: bool) -> dict[str, Any]:
    """The ``tail`` verb's request; nodes and grep are applied on this side."""
    return {
        "run_dir": run_dir,
        "attempt": attempt,
        "ranks": None if selection.ranks is None else sorted(selection.ranks),
        "follow": follow,
        "since": selection.since,
        "positions": {},
        "last": selection.last,
    }
