"""Lines of several places into one stream by (time, rank), without waiting for anyone who is silent.

Each source hands its lines on in order. While a source sends **history** nothing later than its newest
line is given out, so history is in exact order over all sources; once **live**, a line waits for at most
``window_s`` for lines of other sources that are older, and then goes on. A source that is cut, or that
gave nothing for ``patience_s`` while it owed history, holds nothing back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class LogLine(NamedTuple):
    """``time``: when the line was finished, seconds since the epoch on its node's clock."""

    rank: int
    node: str
    time: float
    text: str
    attempt: int


Key = tuple[float, int]


def key_of(line: LogLine) -> Key:
    return (line.time, line.rank)


class _Phase(Enum):
    HISTORY = "owes lines that may be old"
    LIVE = "sends lines as they come"
    OVER = "has ended, or is cut"


class _Source:
    def __init__(self, now: float) -> None:
        self.phase = _Phase.HISTORY
        self.newest: Key | None = None  # what comes of it later is not before this
        self.heard_at = now


class Merger:
    """Pure bookkeeping: ``now`` is a monotonic time that the caller passes, so tests need no clock."""

    def __init__(self, num_sources: int, now: float, *, window_s: float = 0.25, patience_s: float = 10.0) -> None:
        self._sources = [_Source(now) for _ in range(num_sources)]
        self._window_s = window_s if num_sources > 1 else 0.0
        self._patience_s = patience_s
        self._sorted: list[LogLine] = []
        self._fresh: list[LogLine] = []
        self._arrivals: list[tuple[float, Key]] = []  # (when, the largest key that came then)

    @property
    def pending(self) -> int:
        """Lines that are held."""
        return len(self._sorted) + len(self._fresh)

    def heard(self, source: int, at: float) -> None:
        """The source gave a sign of life."""
        self._sources[source].heard_at = at

    def add(self, source: int, lines: Sequence[LogLine], newest: Key, now: float) -> None:
        """``lines`` of one source, in its order; it has read on to ``newest``, also where no line was wanted."""
        self._sources[source].newest = newest
        if lines:
            self._fresh += lines
            self._arrivals.append((now, max(map(key_of, lines))))

    def history(self, source: int) -> None:
        """The source (again) sends what was written before."""
        self._sources[source].phase = _Phase.HISTORY
        self._sources[source].newest = None

    def live(self, source: int) -> None:
        self._sources[source].phase = _Phase.LIVE

    def over(self, source: int) -> None:
        self._sources[source].phase = _Phase.OVER

    def _owing(self, now: float) -> list[tuple[Key | None, int]]:
        """Sources that hold lines back, each with the key up to which it does not."""
        return [
            (s.newest, i)
            for i, s in enumerate(self._sources)
            if s.phase is _Phase.HISTORY and now - s.heard_at < self._patience_s
        ]

    def slowest(self, now: float) -> set[int]:
        """The sources that have to go on first; empty when none holds anything back."""
        owing = self._owing(now)
        behind = [i for key, i in owing if key is None]
        if behind or not owing:
            return set(behind)
        return {min(((key, i) for key, i in owing if key is not None))[1]}

    def release(self, now: float) -> list[LogLine]:
        """The lines that may go, in order."""
        if not self._sorted and not self._fresh:
            return []
        owing = [key for key, _ in self._owing(now)]
        limits = [key for key in owing if key is not None]
        if len(limits) < len(owing):
            return []
        if any(s.phase is _Phase.LIVE for s in self._sources):
            due = self._due(now)
            if due is None:
                return []
            limits.append(due)
        self._sort()
        return self._cut(bisect_right(self._sorted, min(limits), key=key_of) if limits else len(self._sorted))

    def drain(self) -> list[LogLine]:
        """Everything that is held, in order."""
        self._sort()
        return self._cut(len(self._sorted))

    def _sort(self) -> None:
        if self._fresh:
            # Runs that are sorted already: timsort merges them, and is stable within a rank.
            self._sorted += self._fresh
            self._sorted.sort(key=key_of)
            self._fresh = []

    def _due(self, now: float) -> Key | None:
        """The largest key among lines that have waited for the window."""
        until = now - self._window_s
        due: Key | None = None
        for at, key in self._arrivals:
            if at > until:
                break
            due = key if due is None else max(due, key)
        return due

    def _cut(self, count: int) -> list[LogLine]:
        ready, self._sorted = self._sorted[:count], self._sorted[count:]
        if ready:
            last = key_of(ready[-1])
            self._arrivals = [entry for entry in self._arrivals if entry[1] > last] if self._sorted else []
        return ready
