"""The verb ``tail``: this folder's rank logs as one stream of frames, in time order, from any position.

A frame is one JSON line and then exactly ``bytes`` raw bytes::

    {"rank":3,"node":"n1","offset":0,"time":1.5,"bytes":123}⏎ …123 bytes…

``"last":true`` says that nothing follows in this file. Lines without ``rank`` bytes are events:
``at`` (where each rank's reading begins: ``positions``), ``live`` (history is sent), ``beat`` (every few
seconds), ``truncated`` (``rank`` starts again at 0), ``problem`` (``rank``, ``message``), ``new_attempt``
(``attempt``) and ``ended``. Nothing here changes a file; 400 files cost 400 stats a poll.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import time
from typing import Any, BinaryIO, Dict, List, Mapping, NamedTuple, Optional, Tuple

from ..contract.errors import UsageError
from ..contract.folder import rank_of
from .tail_files import NodeRecords, Source

BEAT_S = 2.0
POLL_S = (0.1, 0.3)  # while something comes; while nothing does
LIST_S = 0.5  # how often folders are listed and records looked at
NEW_ATTEMPT_QUIET_S = 6.0
NAMELESS_S = 2.0  # a rank of which no record tells for so long is shown without its node
MISSING_S = 5.0  # an attempt has its folder before it is started: a node without one has no part in it


class Request(NamedTuple):
    """What to send. ``since`` is seconds since the epoch; ``positions`` go before ``since`` and ``last``."""

    run_dir: str
    attempt: int
    ranks: Optional[frozenset[int]]
    follow: bool
    since: Optional[float]
    positions: Dict[int, int]
    last: Optional[int]


def read_request(request: Mapping[str, Any]) -> Request:
    """The typed request; raises UsageError for what it cannot mean."""
    try:
        ranks = request.get("ranks")
        since, last = request.get("since"), request.get("last")
        return Request(
            run_dir=str(request["run_dir"]),
            attempt=int(request["attempt"]),
            ranks=None if ranks is None else frozenset(int(r) for r in ranks),
            follow=bool(request.get("follow", False)),
            since=None if since is None else float(since),
            positions={int(k): int(v) for k, v in (request.get("positions") or {}).items()},
            last=None if last is None else int(last),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UsageError(f"tail: the request cannot be read: {problem!r}") from problem


class Tail:
    """One reader of one attempt's logs."""

    def __init__(self, request: Request, out: BinaryIO) -> None:
        self.request = request
        self.out = out
        self.folder = os.path.join(request.run_dir, "attempts", str(request.attempt))
        self.records = NodeRecords(self.folder)
        self.sources: Dict[int, Source] = {}
        self._nameless: Dict[int, float] = {}  # rank → when its log was first seen, while no record tells its node
        self._existed = False
        self._began = time.monotonic()
        self._listed_at = float("-inf")
        self._beat_at = time.monotonic()
        self._told_attempt = False
        self._parent = os.getppid()
        self._troubled: Dict[int, str] = {}
        self._poller = select.poll()
        try:
            self._poller.register(out.fileno(), 0)
            self._has_reader = True
        except (OSError, ValueError, AttributeError):
            self._has_reader = False

    def run(self) -> None:
        """Sends history, then what comes, until the attempt is over or the reader goes (ConnectionError)."""
        self._list(first=True)
        self._event("at", positions={str(rank): source.at for rank, source in sorted(self.sources.items())})
        self._send(final=not self.request.follow or self.records.ended)
        self._event("live")
        busy_at = time.monotonic()
        while self.request.follow:
            now = time.monotonic()
            over = False
            if now - self._listed_at >= LIST_S:
                self._list(first=False)
                self._tell_attempt()
                # Asked before files are looked at: what an agent wrote before its last word is then sent.
                over = self._over(now)
            if self._send(final=over and self.records.ended):
                busy_at = now
            if over:
                break
            if now - self._beat_at >= BEAT_S:
                self._event("beat")
            self.out.flush()
            self._wait(POLL_S[0] if now - busy_at < 2.0 else POLL_S[1])
        self._event("ended")
        self.out.flush()

    def _over(self, now: float) -> bool:
        if not os.path.isdir(self.folder):
            return self._existed or now - self._began >= MISSING_S
        self._existed = True
        return self.records.settled(now, NEW_ATTEMPT_QUIET_S if self._told_attempt else NodeRecords.QUIET_S)

    def _wait(self, seconds: float) -> None:
        """Sleeps, unless the reader goes: then ConnectionError. An orphan has no reader either."""
        if os.getppid() != self._parent:
            raise BrokenPipeError("the process that asked is gone")
        if not self._has_reader:
            time.sleep(seconds)
        elif self._poller.poll(int(seconds * 1000)):
            raise BrokenPipeError("nobody reads any more")

    def _list(self, *, first: bool) -> None:
        """Finds logs that were not there before, and reads records that changed."""
        self._listed_at = time.monotonic()
        self.records.refresh(self._listed_at)
        logs = os.path.join(self.folder, "logs")
        try:
            names = os.listdir(logs)
        except OSError:
            return
        for name in names:
            rank = rank_of(name)
            if rank is None or not name.endswith(".log") or rank in self.sources:
                continue
            if self.request.ranks is not None and rank not in self.request.ranks:
                continue
            if self.request.follow and self._waits_for_name(rank):
                continue
            source = Source(rank, os.path.join(logs, name), self.request.positions.get(rank, 0))
            self.sources[rank] = source
            if source.look():
                self._event("truncated", rank=rank)
            try:
                found_later = not first and rank not in self._nameless
                if found_later or rank in self.request.positions:
                    source.start(None, None)
                else:
                    source.start(self.request.since, self.request.last)
            except OSError as problem:
                self._trouble(rank, problem)

    def _waits_for_name(self, rank: int) -> bool:
        """A rank writes before its agent has written down where it stands; its first lines wait for that."""
        if rank in self.records.node_of:
            return False
        return self._listed_at - self._nameless.setdefault(rank, self._listed_at) < NAMELESS_S

    def _tell_attempt(self) -> None:
        if self._told_attempt:
            return
        try:
            numbers = [int(n) for n in os.listdir(os.path.dirname(self.folder)) if n.isascii() and n.isdigit()]
        except OSError:
            return
        later = [n for n in numbers if n > self.request.attempt]
        if later:
            self._told_attempt = True
            self._event("new_attempt", attempt=min(later))

    def _send(self, *, final: bool) -> bool:
        """Sends all that is there now, merged by time over ranks; says whether that was anything."""
        ends: Dict[int, int] = {}
        heap: List[Tuple[float, int, int]] = []
        for rank, source in self.sources.items():
            # The last N lines of what is there: what comes while they are sent would be one more.
            counted = not self.request.follow and self.request.last is not None
            if not counted and source.look():
                self._event("truncated", rank=rank)
            ends[rank] = source.size
            span = source.next(source.size)
            if span is not None:
                heap.append((span.time, rank, span.stop))
        heapq.heapify(heap)
        sent = bool(heap)
        while heap:
            _, rank, _ = heap[0]
            source = self.sources[rank]
            following = self._frame(source, ends[rank], final)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, following)
        return sent

    def _frame(self, source: Source, end: int, final: bool) -> Optional[Tuple[float, int, int]]:
        """Sends one frame of ``source``; its next entry in the heap, or None when it has no more."""
        span = source.next(end)
        if span is None:
            return None
        try:
            data = source.read(span)
        except OSError as problem:
            self._trouble(source.rank, problem)
            return None
        if not data:
            return None
        node = self.records.node_of.get(source.rank, "")
        head = {"rank": source.rank, "node": node, "offset": span.start, "time": span.time, "bytes": len(data)}
        if final and source.at >= end:
            head["last"] = True
        self._write(head)
        self.out.write(data)
        following = source.next(end) if len(data) == span.stop - span.start else None
        return None if following is None else (following.time, source.rank, following.stop)

    def _trouble(self, rank: int, problem: OSError) -> None:
        message = problem.strerror or str(problem)
        if self._troubled.get(rank) != message:
            self._troubled[rank] = message
            self._event("problem", rank=rank, message=message)

    def _event(self, event: str, **facts: object) -> None:
        self._write({"event": event, **facts})
        self.out.flush()

    def _write(self, head: Mapping[str, object]) -> None:
        self._beat_at = time.monotonic()
        self.out.write(json.dumps(head, separators=(",", ":")).encode("ascii") + b"\n")


def stream(request: Dict[str, Any], out: BinaryIO) -> int:
    """Writes frames to ``out``; returns the exit status. A reader that goes away is no error."""
    tail = Tail(read_request(request), out)
    try:
        tail.run()
    except ConnectionError:
        _hush(out)
    return 0


def _hush(out: BinaryIO) -> None:
    """Keeps the interpreter from complaining about bytes that nobody will read."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return
