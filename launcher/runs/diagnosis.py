"""The first cause of a failed attempt, from what agents recorded and the failed ranks' last lines.

When one rank dies, its peers die of it moments later ("Connection closed by peer"), and the agents stop
the rest. Only one of all these ends is the cause; the others are fallout. Pure: no clock, no I/O.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..contract.errors import Exit
from ..contract.records import Failure, NodeRecord, Outcome, RankRecord

TOGETHER_S = 1.0
"""Ends so near to each other are told apart by what was written, not by clocks of different nodes."""
FALLOUT_S = 3.0
"""When the first end is fallout, its cause ended at most so long after it (it was still writing its traceback)."""

_SIGNALS = {
    "SIGKILL": "killed: out of memory or by hand",
    "SIGSEGV": "crashed: it touched memory that is not its own",
    "SIGABRT": "aborted: native code gave up",
    "SIGBUS": "bus error: often no room behind a mapped file or in /dev/shm",
    "SIGILL": "illegal instruction: built for another processor",
    "SIGFPE": "arithmetic error in native code",
    "SIGTERM": "asked to end, by someone outside this run",
    "SIGINT": "interrupted, by someone outside this run",
    "SIGHUP": "hung up: its terminal or session went away",
    "SIGXCPU": "its limit of processor time was reached",
    "SIGXFSZ": "its limit of file size was reached",
}
_CODES = {
    126: "the command cannot be executed",
    127: "the command was not found",
    137: "something it started was killed (SIGKILL): out of memory or by hand",
    139: "something it started crashed (SIGSEGV)",
}
_PEER = re.compile(
    r"Connection (?:closed|reset|refused|aborted) by (?:remote )?peer|Connection reset|connection was closed|"
    r"Connection refused|Broken pipe|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|"
    r"gloo/transport|Gloo connectFullMesh|Application timeout caused pair closure|"
    r"NCCL (?:error|communicator was aborted)|nccl(?:Remote|System|Internal|Unhandled\w*)Error|"
    r"ProcessGroupNCCL|Watchdog caught collective|DistBackendError|DistNetworkError|DistStoreError|"
    r"recvValue failed|sendBytes failed|failed to recv, got 0 bytes|Socket Timeout|Timed out waiting \d+ms for",
    re.IGNORECASE,
)
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]|\bNoSpace\b|: no space for ")
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]:\s?)?(?P<error>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*"
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failed|Refused|Timeout|NoSpace)\b(?::.*)?)$"
)
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Cause:
    """Why an attempt failed. ``rank`` is None when it was no rank (a lost node, a failed setup). ``no_space``: a disk
    or a quota was full, as whoever failed said itself."""

    kind: str
    node: str
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    at: float | None = None
    words: str = ""
    last_lines: tuple[str, ...] = ()
    others: str = ""
    no_space: bool = False

    @property
    def signal_name(self) -> str | None:
        return None if self.signal is None else name_of(self.signal)

    def sentence(self) -> str:
        """One line: who, where, how."""
        if self.rank is None:
            return self.words if self.node and self.node in self.words else f"node {self.node}: {self.words}"
        how = f"signal {self.signal} ({self.signal_name})" if self.signal is not None else f"exit code {self.exit_code}"
        return f"rank {self.rank} on {self.node}: {how}{': ' + self.words if self.words else ''}"


class _End(NamedTuple):
    """One rank that ended badly on its own. ``weight``: 0 its own fault is seen, 1 nothing is, 2 fallout."""

    at: float
    node: str
    record: RankRecord
    weight: int
    error: str


def name_of(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for what has no name here."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(
    records: Sequence[NodeRecord], outcome: Outcome | None, last_lines: Mapping[int, Sequence[str]]
) -> Cause | None:
    """The first cause, or None when nothing failed by itself (cancelled, out of time, stopped, agents gone).

    What the agents agreed on goes first, unless its last lines show that it died of another's death.
    """
    ends = [_end(r.node, rank, last_lines) for r in records for rank in r.ranks if _failed(rank, outcome)]
    agreed = _agreed(records)
    if agreed is not None and agreed.kind in ("cancelled", "time_limit"):
        return None
    if agreed is not None and agreed.rank is None:
        # A node that seems lost, while a rank elsewhere died of itself before: then that was the cause.
        own = [e for e in ends if e.weight == 0 and (agreed.at is None or e.at < agreed.at - TOGETHER_S)]
        if not own:
            words = agreed.message or agreed.kind.replace("_", " ")
            return Cause(
                agreed.kind, agreed.node, at=agreed.at, words=words, others=_others(records, ends, None),
                no_space=agreed.kind == "no_space",
            )  # fmt: skip
    if not ends:
        return _of_failure(agreed, records, last_lines)
    first = _choose(ends, agreed)
    rank = first.record
    return Cause(
        kind="rank_signal" if rank.signal is not None else "rank_exit",
        node=first.node,
        rank=rank.rank,
        exit_code=rank.exit_code,
        signal=rank.signal,
        at=first.at,
        words=_words(first),
        last_lines=tuple(last_lines.get(rank.rank, ())),
        others=_others(records, ends, rank.rank),
        no_space=_had_no_space(first, last_lines.get(rank.rank, ())),
    )


def _had_no_space(end: _End, lines: Sequence[str]) -> bool:
    """By the exception that ended it; the engine tells without a traceback, and exits with the code for it."""
    said = lines if end.record.exit_code == Exit.NO_SPACE else [end.error]
    return any(_NO_SPACE.search(line) for line in said)


def _failed(rank: RankRecord, outcome: Outcome | None) -> bool:
    if not rank.ended or rank.status == 0 or rank.stopped_by_us:
        return False
    return not (rank.status == Exit.STOPPED and outcome is not None and outcome.outcome == "stopped")


def _agreed(records: Sequence[NodeRecord]) -> Failure | None:
    failures = [r.failure for r in sorted(records, key=lambda r: r.node_rank) if r.failure is not None]
    if failures and all(f.kind == "node_lost" for f in failures):
        # A cut network has two sides, and each calls the other lost: most nodes are right, else the first one.
        votes = [sum(g.node == f.node for g in failures) for f in failures]
        return failures[votes.index(max(votes))]
    return min(failures, key=lambda f: float("inf") if f.at is None else f.at, default=None)


def _of_failure(
    agreed: Failure | None, records: Sequence[NodeRecord], last_lines: Mapping[int, Sequence[str]]
) -> Cause | None:
    """A rank's failure that its node's record (lost with the node, perhaps) does not show."""
    if agreed is None or agreed.rank is None:
        return None
    return Cause(
        kind=agreed.kind,
        node=agreed.node,
        rank=agreed.rank,
        exit_code=agreed.exit_code,
        signal=agreed.signal,
        at=agreed.at,
        words=agreed.message,
        last_lines=tuple(last_lines.get(agreed.rank, ())),
        others=_others(records, [], agreed.rank),
    )


def _end(node: str, rank: RankRecord, last_lines: Mapping[int, Sequence[str]]) -> _End:
    lines = last_lines.get(rank.rank, ())
    errors = _errors(lines)
    own = [error for error in errors if not _PEER.search(error)]
    if own:
        weight = 0
    elif any(_PEER.search(line) for line in lines[-10:]):
        # NCCL's watchdog ends its process by SIGABRT: fallout too, whatever the signal is.
        weight = 2
    else:
        weight = 0 if rank.signal is not None else 1
    error = own[0] if own else (errors[-1] if errors else "")
    return _End(rank.ended_at or 0.0, node, rank, weight, error)


def _errors(lines: Sequence[str]) -> list[str]:
    """The exception lines of tracebacks, the first (of a chain: the cause) first."""
    seen_traceback = False
    errors = []
    for line in lines:
        if _TRACEBACK in line:
            seen_traceback = True
        match = _ERROR_LINE.match(line)
        if match is not None and seen_traceback:
            errors.append(match["error"])
    return errors


def _choose(ends: Sequence[_End], agreed: Failure | None) -> _End:
    first = min(ends, key=lambda e: (e.at, e.record.rank))
    if agreed is not None and agreed.rank is not None:
        first = next((e for e in ends if e.record.rank == agreed.rank), first)
    reach = FALLOUT_S if first.weight == 2 else TOGETHER_S
    near = [e for e in ends if abs(e.at - first.at) <= reach]
    return min(near, key=lambda e: (e.weight, e is not first, e.at, e.record.rank))


def _words(end: _End) -> str:
    if end.record.signal is not None:
        words = _SIGNALS.get(name_of(end.record.signal), "")
        return f"{words}; {end.error}" if words and end.error else words or end.error
    words = end.error or _CODES.get(end.record.exit_code or 0, "")
    if end.weight == 2:
        return f"it lost its connection to another rank{': ' + words if words else ''}"
    return words


def _others(records: Sequence[NodeRecord], ends: Sequence[_End], cause: int | None) -> str:
    """What became of everyone else, in one line."""
    stopped = [rank.rank for r in records for rank in r.ranks if rank.stopped_by_us and rank.rank != cause]
    fallout = [e.record.rank for e in ends if e.record.rank != cause and e.weight == 2]
    failed = [e.record.rank for e in ends if e.record.rank != cause and e.weight < 2]
    well = [rank.rank for r in records for rank in r.ranks if rank.ended and rank.status == 0 and rank.rank != cause]
    told = [
        _told(stopped, "stopped by us"),
        _told(fallout, "lost the connection to it"),
        _told(failed, "failed too"),
        _told(well, "ended well"),
    ]
    return "; ".join(t for t in told if t)


def _told(ranks: Iterable[int], what: str) -> str:
    found = sorted(ranks)
    if not found:
        return ""
    return f"rank{'' if len(found) == 1 else 's'} {fold_ranks(found)} {what}"


def fold_ranks(ranks: Iterable[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
