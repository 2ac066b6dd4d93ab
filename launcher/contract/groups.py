"""Which parameters train with settings of their own: patterns of names, where the first group that matches wins.

Engine and planner ask this file, because parameters of different groups share no flat buffer.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple


class Unmatched(NamedTuple):
    """Pattern ``pattern`` of group ``group`` (both counted from 0) takes nothing; ``message`` says why."""

    group: int
    pattern: int
    message: str


def assign(names: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> List[int]:
    """Of each parameter, given with all its names (tied ones have several): the group from 1 on whose pattern matches
    first, or 0. ``*`` stands for any characters, dots too.

    Raises ``ValueError`` where a pattern matches no parameter, or where earlier groups leave a group none.
    """
    found, problems = _assign(names, groups)
    for problem in problems:
        raise ValueError(problem.message)
    return found


def unmatched(names: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> List[Unmatched]:
    """Every pattern that takes nothing."""
    return _assign(names, groups)[1]


def _assign(names: Sequence[Sequence[str]], groups: Sequence[Sequence[str]]) -> Tuple[List[int], List[Unmatched]]:
    found = [0] * len(names)
    problems: List[Unmatched] = []
    for number, patterns in enumerate(groups):
        new = known = 0
        for at, pattern in enumerate(patterns):
            hits = [i for i, aliases in enumerate(names) if any(fnmatchcase(alias, pattern) for alias in aliases)]
            if not hits:
                said = f"{pattern!r} matches no parameter of the model; closest: {', '.join(_closest(pattern, names))}"
                problems.append(Unmatched(number, at, said))
            known += len(hits)
            for i in hits:
                if not found[i]:
                    found[i] = number + 1
                    new += 1
        if known and not new:
            said = f"{patterns[0]!r} is left nothing: an earlier group takes all that it matches, and the first wins"
            problems.append(Unmatched(number, 0, said))
    return found, problems


def _closest(pattern: str, names: Sequence[Sequence[str]]) -> List[str]:
    """The names that are most like ``pattern``, by any of their endings, since a pattern often begins with ``*``."""
    core = pattern.replace("*", "").strip(".")
    whole: Dict[str, str] = {}
    for aliases in names:
        for alias in aliases:
            for ending in _endings(alias):
                whole.setdefault(ending, alias)
    close = difflib.get_close_matches(core, list(whole), n=8, cutoff=0.3)
    chosen = list(dict.fromkeys(whole[ending] for ending in close)) or [aliases[0] for aliases in names]
    return chosen[:3]


def _endings(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[at:]) for at in range(len(parts)))
