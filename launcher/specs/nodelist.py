"""Slurm's node-list syntax and hostfiles, and the one place where host names are checked.

Order and zero padding are kept: rank 0's node is the first named. ``rack[1-2]node[01-04]-ib`` expands like
nested loops, the last bracket fastest. What Slurm itself takes with a shrug (an empty range, a range that
goes down, a bracket never closed) is an error here that names its column.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

MAX_NODES = 65_536
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_NAME = 128  # they become file names: contract.folder.SAFE_NAME
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


class NodeListError(ValueError):
    """A node list that cannot be read. ``column`` counts from 1, inside the text."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.column = column


def host_problem(name: str) -> str | None:
    """What is wrong with a host name, or None: letters, digits, ``-``, ``.``, ``_``; first a letter or digit."""
    if not name:
        return "a host name is empty"
    if name.startswith("-"):
        return f"host name {name!r} begins with '-': programs would read it as an option"
    if not name.isascii() or not _NAME.fullmatch(name):
        bad = next((c for c in name if not re.fullmatch(r"[A-Za-z0-9._-]", c)), name[0])
        accepted = "accepted: letters, digits, '-', '.', '_', the first a letter or digit"
        return f"host name {name!r} holds {bad!r}; {accepted}"
    if ".." in name:
        return f"host name {name!r} holds '..'"
    if len(name) > _MAX_NAME:
        return f"host name {name[:20]!r}… is longer than {_MAX_NAME} characters"
    return None


def address_problem(address: str) -> str | None:
    """Like :func:`host_problem`, and IPv4 and IPv6 addresses are fine too."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return host_problem(address)
    return None if "%" not in address else f"address {address!r} holds a zone ('%')"


# --- expand ---------------------------------------------------------------------------------------


def expand(text: str, limit: int = MAX_NODES) -> tuple[str, ...]:
    """Every name of a node list, in order; duplicates stay. Raises :class:`NodeListError`.

    ``limit`` bounds the number of names *before* any is made, so that ``n[1-9999999999]`` costs nothing.
    """
    names: list[str] = []
    for start, element in _elements(text):
        pieces = _pieces(element, start)
        count = 1
        for piece in pieces:
            if not isinstance(piece, str):
                count *= sum(r.count for r in piece)
        if len(names) + count > limit:
            raise NodeListError(f"the list names more than {limit:,} nodes", start + 1)
        choices = [[p] if isinstance(p, str) else [n for r in p for n in r.words()] for p in pieces]
        for parts in product(*choices):
            name = "".join(parts)
            problem = host_problem(name)
            if problem:
                raise NodeListError(problem, start + 1)
            names.append(name)
    return tuple(names)


@dataclass(frozen=True)
class _Numbers:
    """``01-04``: the numbers first…last, zero-padded to ``width``; it may stand for a huge range."""

    first: int
    last: int
    width: int

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def words(self) -> Iterator[str]:
        return (f"{n:0{self.width}d}" for n in range(self.first, self.last + 1))


def _elements(text: str) -> Iterator[tuple[int, str]]:
    """Splits at commas outside brackets: (offset, element)."""
    if not text:
        raise NodeListError("the node list is empty", 1)
    start, opened = 0, -1
    for at, char in enumerate(text + ","):
        if char == "[":
            if opened >= 0:
                raise NodeListError("'[' inside a bracket; brackets do not nest", at + 1)
            opened = at
        elif char == "]":
            if opened < 0:
                raise NodeListError("']' without '['", at + 1)
            opened = -1
        elif char == "," and (opened < 0 or at == len(text)):
            if opened >= 0:
                raise NodeListError("this '[' is never closed", opened + 1)
            if at == start:
                raise NodeListError("a name is missing beside a comma", min(at, len(text) - 1) + 1)
            yield start, text[start:at]
            start = at + 1


def _pieces(element: str, start: int) -> list[str | list[_Numbers]]:
    pieces: list[str | list[_Numbers]] = []
    at = 0
    while at < len(element):
        opening = element.find("[", at)
        if opening < 0:
            pieces.append(element[at:])
            break
        if opening > at:
            pieces.append(element[at:opening])
        closing = element.index("]", opening)
        pieces.append(_ranges(element[opening + 1 : closing], start + opening + 1))
        at = closing + 1
    return pieces


def _ranges(inside: str, offset: int) -> list[_Numbers]:
    ranges, at = [], offset
    for part in inside.split(","):
        ranges.append(_numbers(part, at + 1))
        at += len(part) + 1
    return ranges


def _numbers(part: str, column: int) -> _Numbers:
    if not part:
        raise NodeListError("an empty range in brackets; accepted: [1-4], [01,03-07]", column)
    match = _RANGE.fullmatch(part)
    if match is None:
        if part.startswith("-"):
            raise NodeListError(f"range {part!r}: numbers cannot be negative", column)
        if re.fullmatch(r"\d+-", part, re.ASCII):
            raise NodeListError(f"range {part!r} has no end", column)
        if "/" in part or ":" in part:
            raise NodeListError(f"range {part!r}: steps are not part of Slurm's node lists", column)
        raise NodeListError(f"range {part!r} is not a number or number-number", column)
    first, last = match[1], match[2] or match[1]
    if max(len(first), len(last)) > 18:
        raise NodeListError(f"range {part[:24]!r}… has too many digits", column)
    if int(last) < int(first):
        raise NodeListError(f"range {part!r} goes down; write the smaller number first", column)
    if len(last) > len(first) and last.startswith("0"):
        raise NodeListError(f"range {part!r} is padded differently at its ends", column)
    return _Numbers(int(first), int(last), len(first))


# --- fold -----------------------------------------------------------------------------------------

_LAST_NUMBER = re.compile(r"(.*?)(\d{1,18})([^\d]*)", re.ASCII | re.DOTALL)


def fold(names: Sequence[str]) -> str:
    """The short form of names, order and padding kept: ``expand(fold(names)) == names``."""
    words: list[str] = []
    frame: tuple[str, str] | None = None
    ranges: list[tuple[str, str]] = []

    def close() -> None:
        if frame is None:
            return
        prefix, suffix = frame
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            words.append(prefix + ranges[0][0] + suffix)
        else:
            inside = ",".join(a if a == b else f"{a}-{b}" for a, b in ranges)
            words.append(f"{prefix}[{inside}]{suffix}")

    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        if match is None:
            close()
            frame, ranges = None, []
            words.append(name)
            continue
        prefix, digits, suffix = match[1], match[2], match[3]
        if frame != (prefix, suffix):
            close()
            frame, ranges = (prefix, suffix), [(digits, digits)]
        elif digits == _after(*ranges[-1]):
            ranges[-1] = (ranges[-1][0], digits)
        else:
            ranges.append((digits, digits))
    close()
    return ",".join(words)


def _after(first: str, last: str) -> str:
    """The number that would lengthen the range ``first``-``last``, padded as the range is."""
    return f"{int(last) + 1:0{len(first)}d}"


# --- hostfiles ------------------------------------------------------------------------------------


class HostfileMistake(NamedTuple):
    line: int
    column: int
    message: str


def parse_hostfile(text: str) -> tuple[list[tuple[str, int | None]], list[HostfileMistake]]:
    """``host slots=N`` a line, ``#`` comments: [(host, slots or None)], and everything that is wrong."""
    hosts: list[tuple[str, int | None]] = []
    mistakes: list[HostfileMistake] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = [(m.start() + 1, m[0]) for m in re.finditer(r"\S+", line.split("#", 1)[0])]
        if not words:
            continue
        column, host = words[0]
        problem = host_problem(host)
        if problem is None and host in seen:
            problem = f"host {host!r} stands here and in line {seen[host]}; name it once, with all its slots"
        if problem:
            mistakes.append(HostfileMistake(number, column, problem))
        seen.setdefault(host, number)
        slots: int | None = None
        for at, word in words[1:]:
            match = re.fullmatch(r"slots=(\d{1,6})", word, re.ASCII)
            if match is None or int(match[1]) < 1 or slots is not None:
                mistakes.append(HostfileMistake(number, at, f"{word!r} is not understood; accepted: slots=N, once"))
                continue
            slots = int(match[1])
        hosts.append((host, slots))
        if len(hosts) > MAX_NODES:
            mistakes.append(HostfileMistake(number, 1, f"the file names more than {MAX_NODES:,} hosts"))
            break
    if not hosts and not mistakes:
        mistakes.append(HostfileMistake(1, 1, "the hostfile names no host; accepted: a line 'host slots=N' for each"))
    return hosts, mistakes
