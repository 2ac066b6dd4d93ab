"""Every rank's log of an attempt as one merged stream of lines, over connections that may break.

Times are this machine's: what a node's clock is ahead was measured when the node was first asked, and is taken off.
One connection a place, one thread a connection; a cursor a rank. After a cut the place is asked again
from the cursors, so nothing is lost and nothing repeated, until the run is known to have ended. What a person should
know (a source was cut, is silent, answers again) goes to ``notice``.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contract.errors import PartialAnswer, Unreachable, UsageError, ZerunError
from ..contract.folder import RunFolder
from .frames import Frames
from .lines import Lines
from .merge import Key, LogLine, Merger, key_of
from .select import Selection, request

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place
    from ..transports.protocol import Stream

Notice = Callable[[str], None]

QUEUE_LINES = 20_000  # a source that is this far ahead is not read on
HELD_LINES = 100_000  # so much held for order: then only those who are behind are read
FLUSH_S = 2.0  # an unfinished line is shown after so much silence
SILENT_S = 12.0  # beats come every 2 s
START_S = 60.0
STEADY_S = 5.0  # a connection that lasted so long was a good one: the next is tried soon
BACK_OFF_S = (0.5, 15.0)
TRIES = 4  # without follow
ASK_END_S = 5.0  # so long what was heard of the run's end is believed


class Known(NamedTuple):
    """What is known of the attempt before any node is asked. ``nodes``: those that run it; None: any place may hold a
    part of it. ``ended``: whether the run has ended, asked only while a node does not answer."""

    nodes: frozenset[str] | None = None
    ended: Callable[[], bool] = lambda: False

    def has(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes


class _Rank:
    def __init__(self) -> None:
        self.lines = Lines()
        self.time = 0.0
        self.node = ""
        self.heard_at = 0.0


class _Source:
    """One place, read by one thread. What the main thread shares with it is guarded by ``ready``."""

    def __init__(self, place: Place, ask: dict[str, Any], selection: Selection, ready: threading.Condition) -> None:
        self.place = place
        self.name = place.node or place.transport.name
        self.ready = ready
        self.batches: deque[tuple[str, list[LogLine], Key | None]] = deque()
        self.queued = 0
        self.blocked = False
        self.over = False
        self.failure: ZerunError | None = None
        self.heard_at = time.monotonic()
        self.started = False
        self.stream: Stream | None = None
        self.ask = ask
        self._selection = selection
        self._ranks: dict[int, _Rank] = {}
        self._positions: dict[int, int] = {}
        self._next_attempt: int | None = None
        self._checked_at = 0.0
        self._live_at: float | None = None  # since when this connection shows lines as they come
        self._unanswered = 0  # connections in a row that brought nothing
        self._notice: Notice = lambda _: None
        self.stopping = False

    # --- the reader's thread ----------------------------------------------------------------------

    def read(self, backend: Backend, follow: bool, notice: Notice, ended: Callable[[], bool]) -> None:
        """Reads to the end of the attempt (and of those after it), over as many connections as it takes. Following, a
        node that stays silent is asked once more when the run has ended, and then no longer."""
        failures, last_time = 0, False
        self._notice = notice
        try:
            while not self.stopping:
                asked_at = time.monotonic()
                problem = self._connect(backend)
                if problem is None:
                    if self._next_attempt is None or not follow:
                        return
                    notice(f"attempt {self._next_attempt} begins on {self.name}")
                    self._turn_to(self._next_attempt)
                    continue
                lasted = self.started and time.monotonic() - asked_at > STEADY_S
                failures = 1 if lasted else failures + 1
                self._unanswered = 0 if self.started else self._unanswered + 1
                given_up = (last_time and self._unanswered > 1) if follow else failures >= TRIES
                if self.stopping or not isinstance(problem, Unreachable) or given_up:
                    self.failure = None if self.stopping else problem
                    return
                self._put("cut", [], None)
                pause = min(BACK_OFF_S[1], BACK_OFF_S[0] * 2 ** (failures - 1)) * random.uniform(0.8, 1.2)
                self._tell(problem, pause)
                last_time = follow and self._unanswered > 1 and ended()
                self._sleep(BACK_OFF_S[0] if last_time else pause)
        finally:
            with self.ready:
                self.over = True
                self.ready.notify_all()

    def _tell(self, problem: ZerunError, pause: float) -> None:
        """Each cut, but a silence only once."""
        if self._unanswered < 2:
            self._notice(f"{self.name}: {problem.message}; asking again in {pause:.1f} s, nothing is lost")
        elif self._unanswered == 2:
            self._notice(f"{self.name}: still no answer; it is asked until it answers, or the run has ended")

    def _connect(self, backend: Backend) -> ZerunError | None:
        """Reads one connection; None when the attempt is over."""
        self.started = False
        self._live_at = None
        self.heard_at = time.monotonic()
        frames = Frames(self.name)
        try:
            # As of the first answer the cursors say it all; before, they would be cut by `last` or `since`.
            positions = {str(rank): offset for rank, offset in sorted(self._positions.items())}
            asked = {**self.ask, "positions": positions}
            stream = backend.tail(self.place, asked)
            self.stream = stream
            with stream:
                for chunk in stream:
                    self.heard_at = time.monotonic()
                    if self._chunk(frames, chunk):
                        return None
                    if self.stopping:
                        return None
        except ZerunError as problem:
            return problem
        finally:
            self.stream = None
        said = frames.noise.decode("utf-8", "backslashreplace").strip().splitlines()
        return Unreachable(f"the log stream broke off{': ' + said[-1][:200] if said and not self.started else ''}")

    def _chunk(self, frames: Frames, chunk: bytes) -> bool:
        """Takes what a chunk holds; True when the attempt is over."""
        lines: list[LogLine] = []
        newest: Key | None = None
        for head, payload in frames.feed(chunk):
            if "rank" in head and "event" not in head:
                newest = self._frame(head, payload, lines)
                continue
            if "error" in head:
                raise UsageError(f"{self.name}: {head['error']}", hint=head.get("hint"))
            event = head.get("event")
            self._event(event, head, lines)
            if event in ("at", "live", "ended"):
                if event == "ended":
                    lines += self._flush(float("inf"))
                self._put({"at": "history", "live": "live"}.get(event, "lines"), lines, newest)
                lines = []
            if event == "ended":
                return True
        now = time.monotonic()
        # A rank is silent only as far as we could hear it: what it wrote during a cut is still to come.
        if self._live_at is not None and now - self._live_at >= FLUSH_S and now - self._checked_at >= 0.5:
            self._checked_at = now
            lines += self._flush(now - FLUSH_S)
        self._put("lines", lines, newest)
        return False

    def _event(self, event: Any, head: dict[str, Any], lines: list[LogLine]) -> None:
        if event == "at":
            self.started = True
            if self._unanswered > 1:
                self._notice(f"{self.name}: answers again")
            self.ask = {**self.ask, "since": None, "last": None}
            for rank, offset in head["positions"].items():
                self._positions.setdefault(int(rank), offset)
        elif event == "live":
            self._live_at = self.heard_at
        elif event == "truncated":
            rank = int(head["rank"])
            if rank in self._ranks:
                lines += self._lines(rank, self._ranks[rank], self._ranks[rank].lines.flush())
                self._ranks[rank].lines = Lines()
            self._positions[rank] = 0
        elif event == "problem":
            lines.append(self._own(head, f"[zerun: this log cannot be read: {head.get('message')}]"))
        elif event == "new_attempt":
            self._next_attempt = int(head["attempt"])

    def _own(self, head: dict[str, Any], text: str) -> LogLine:
        rank = int(head["rank"])
        known = self._ranks.get(rank)
        return LogLine(rank, known.node if known else self.place.node or "", time.time(), text, self.ask["attempt"])

    def _frame(self, head: dict[str, Any], payload: bytes, lines: list[LogLine]) -> Key:
        rank, offset = head["rank"], head["offset"]
        found = self._ranks.get(rank)
        if found is None:
            found = self._ranks[rank] = _Rank()
        expected = self._positions.get(rank, offset)
        self._positions[rank] = offset + len(payload)
        at = head["time"] - self.place.ahead_s  # on this machine's clock, like all others'
        found.time, found.node, found.heard_at = at, head["node"] or self.place.node or "", self.heard_at
        if offset > expected:
            lines.append(self._own(head, f"[zerun: {offset - expected} bytes of this log are gone]"))
        elif offset < expected:
            payload = payload[expected - offset :]
            self._positions[rank] = max(expected, self._positions[rank])
        texts = found.lines.feed(payload)
        if head.get("last"):
            texts += found.lines.flush()
        if texts:
            lines += self._lines(rank, found, texts)
        return (found.time, rank)

    def _lines(self, rank: int, found: _Rank, texts: list[str]) -> list[LogLine]:
        if not self._selection.wants_node(found.node):
            return []
        if self._selection.grep is not None:
            wanted = self._selection.grep.search
            texts = [text for text in texts if wanted(text)]
        node, at, attempt = found.node, found.time, self.ask["attempt"]
        return [LogLine(rank, node, at, text, attempt) for text in texts]

    def _flush(self, heard_before: float) -> list[LogLine]:
        lines: list[LogLine] = []
        for rank, found in self._ranks.items():
            if found.lines.pending and found.heard_at <= heard_before:
                lines += self._lines(rank, found, found.lines.flush())
        return sorted(lines, key=key_of)

    def _turn_to(self, attempt: int) -> None:
        self.ask = {**self.ask, "attempt": attempt}
        self._ranks.clear()
        self._positions.clear()
        self._next_attempt = None
        self._put("cut", [], None)

    def _put(self, kind: str, lines: list[LogLine], newest: Key | None) -> None:
        if kind == "lines" and not lines and newest is None:
            return
        with self.ready:
            self.blocked = True
            while self.queued > QUEUE_LINES and not self.stopping:
                self.ready.wait()
            self.blocked = False
            self.batches.append((kind, lines, newest))
            self.queued += len(lines)
            self.ready.notify_all()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self.ready:
            while not self.stopping and time.monotonic() < end:
                self.ready.wait(max(0.01, end - time.monotonic()))

    # --- the main thread --------------------------------------------------------------------------

    def stop(self) -> None:
        with self.ready:
            self.stopping = True
            self.ready.notify_all()
        self.break_off()

    def break_off(self) -> None:
        """Ends the connection; its reader then asks again, or stops."""
        stream = self.stream
        if stream is not None:
            with suppress(ZerunError, OSError):
                stream.close()


class Follower:
    """The merged stream. ``batches`` is for whoever writes many lines at once; ``close`` ends it from anywhere."""

    def __init__(
        self, backend: Backend, run: str, attempt: int, selection: Selection, follow: bool, notice: Notice,
        known: Known = Known(),
    ) -> None:  # fmt: skip
        self._backend = backend
        self._known = known
        self._asking = threading.Lock()
        self._ended, self._asked_at = False, float("-inf")
        self._follow = follow
        self._notice = notice
        self._ready = threading.Condition()
        self._sources: list[_Source] = []
        for place in backend.places():
            if place.node is None or (selection.wants_node(place.node) and known.has(place.node)):
                ask = request(selection, str(RunFolder.at(place.runs, run).root), attempt, follow=follow)
                if ask.get("since") is not None:
                    ask["since"] += place.ahead_s
                self._sources.append(_Source(place, ask, selection, self._ready))
        self._merger = Merger(len(self._sources), time.monotonic())

    def batches(self) -> Iterator[list[LogLine]]:
        """Lines in order, many at a time. Raises Unreachable when no place could be read to its end,
        PartialAnswer when some could not, after all that was read was given out."""
        if not self._sources:
            return
        threads = []
        for source in self._sources:
            arguments = (self._backend, self._follow, self._notice, self._has_ended)
            threads.append(threading.Thread(target=source.read, args=arguments, daemon=True))
            threads[-1].start()
        try:
            while True:
                done = self._take()
                ready = self._merger.release(time.monotonic())
                if ready:
                    yield ready
                elif done:
                    break
            rest = self._merger.drain()
            if rest:
                yield rest
        finally:
            self.close()
            for thread in threads:
                thread.join(2.0)
        self._complain()

    def close(self) -> None:
        for source in self._sources:
            source.stop()

    def _has_ended(self) -> bool:
        """Whether the run has ended. Every silent node's reader asks, the cluster is asked for all of them at once."""
        with self._asking:
            if not self._ended and time.monotonic() - self._asked_at > ASK_END_S:
                self._ended = self._known.ended()
                self._asked_at = time.monotonic()
            return self._ended

    def _take(self) -> bool:
        """Waits a little for something to come and takes it; True when nothing can come any more."""
        with self._ready:
            chosen = self._chosen()
            if not any(s.batches for s in chosen):
                self._ready.wait(0.05 if self._merger.pending else 0.5)
                chosen = self._chosen()
            taken = [(s, list(s.batches)) for s in chosen if s.batches]
            for source, _ in taken:
                source.batches.clear()
                source.queued = 0
            over = all(s.over and not s.batches for s in self._sources)
            self._ready.notify_all()
        now = time.monotonic()
        for source, batches in taken:
            self._merge(self._sources.index(source), batches, now)
        for index, source in enumerate(self._sources):
            if source.over:
                self._merger.over(index)
            waits = source.blocked or bool(source.batches)
            self._merger.heard(index, now if waits else source.heard_at)
            self._watch(source, now)
        return over and not taken

    def _chosen(self) -> list[_Source]:
        if self._merger.pending > HELD_LINES:
            behind = self._merger.slowest(time.monotonic())
            if behind:
                return [self._sources[i] for i in behind]
        return self._sources

    def _merge(self, index: int, batches: list[tuple[str, list[LogLine], Key | None]], now: float) -> None:
        for kind, lines, newest in batches:
            if kind == "history":
                self._merger.history(index)
            if newest is not None or lines:
                self._merger.add(index, lines, newest or key_of(lines[-1]), now)
            if kind == "live":
                self._merger.live(index)
            elif kind == "cut":
                self._merger.over(index)

    def _watch(self, source: _Source, now: float) -> None:
        """A connection on which not even beats come is dead: it is ended, and made anew."""
        limit = SILENT_S if source.started else START_S
        if source.stream is not None and not source.blocked and now - source.heard_at > limit:
            self._notice(f"{source.name}: silent for {limit:.0f} s")
            source.heard_at = now
            # Closing may wait for the other side, and nobody else shall wait for it.
            threading.Thread(target=source.break_off, daemon=True).start()

    def _complain(self) -> None:
        failed = [s for s in self._sources if s.failure is not None]
        if not failed:
            return
        first = failed[0].failure
        assert first is not None
        if len(failed) == len(self._sources):
            raise first
        names = ", ".join(s.name for s in failed)
        hint = first.hint or "what the others wrote was shown; again when they answer"
        raise PartialAnswer(f"the logs on {names} could not be read to their end: {first.message}", hint=hint)


def follow(
    backend: Backend,
    run: str,
    attempt: int,
    selection: Selection,
    *,
    follow: bool = False,
    notice: Notice = lambda _: None,
    known: Known = Known(),
) -> Iterator[LogLine]:
    """All ranks' lines of an attempt (and, when following, of those that come after it), merged by time.

    Without ``follow`` it ends with what is there; with it, when every node has ended, or the run has and those that
    are left do not answer.
    """
    for batch in Follower(backend, run, attempt, selection, follow, notice, known).batches():
        yield from batch
