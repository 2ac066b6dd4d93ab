"""The control channel: agents of one attempt talk, so that all of them stop for the first failure.

Node rank 0's agent listens and decides (:mod:`.coordinator`); the others connect (:class:`Peer`). A
message is one JSON object on one line. The first line of a connection greets with the attempt's token;
whoever does not know it is cut off, and nothing that is sent here can do more than that.

::

    peer  → first   hello {token, node, node_rank, server} · beat · failed {failure, age_s} · ended · warn
    first → peer    welcome {node} · gathered {servers} · beat · stop · verdict {failure} · end · warn

``failed`` stops everybody at once; *which* failure was first is decided a moment later, when slower
reports are in: the death of a rank is fallout if another one's came before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from ..contract.plain import PlainError, from_plain, to_plain
from ..contract.records import Failure
from .loop import READ, WRITE, Callback, Loop
from .replicas import read_servers

BEAT_S = 2.0
LOST_S = 10.0  # of silence: a node without power, a cable that was pulled
CUT_S = 4.0  # after a closed connection: the network works, the agent does not come back
FIRST_CONTACT_S = 60.0
STOP_LIMIT_S = 16.0
_LINE_BYTES = 64 * 1024
_BACKLOG_BYTES = 1024 * 1024
_CONNECT_S = 5.0
_RETRY_S = 0.3
_AT_ONCE_S = 0.05  # closer than this, the kind of death says more than the clock
_ASKED_S = 1.0
# Deaths that a rank does not bring upon itself because another one went away.
_HARD = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}

Message = Dict[str, Any]
Log = Callable[[str], None]


def first_cause(reports: Sequence[Tuple[float, Failure]]) -> Failure:
    """The failure that came first; ``reports`` are (when, what) on one clock.

    An order from outside (cancel) is the cause of whatever fell with it. Of deaths in the same instant
    a hard signal is the cause, and a survivor's broken connection the fallout.
    """
    earliest = min(when for when, _ in reports)
    asked = [failure for when, failure in reports if failure.kind == "cancelled" and when - earliest <= _ASKED_S]
    if asked:
        return asked[0]
    at_once = [(failure.signal not in _HARD, when, i) for i, (when, failure) in enumerate(reports)]
    return reports[min(entry for entry in at_once if entry[1] - earliest <= _AT_ONCE_S)[2]][1]


class Events(Protocol):
    """What the agent does when the others say so."""

    def gathered(self, servers: Dict[int, Dict[str, Any]]) -> None:
        """Every node's agent has greeted; ``servers``: where each serves shards, by node rank, if it does. May come
        more than once."""

    def stop_now(self, late_s: float = 0.0) -> None:
        """Some node failed ``late_s`` ago: end the ranks; why follows. May come more than once."""

    def decided(self, failure: Failure) -> None:
        """This was the first failure. Comes once, before or after the ranks are down."""

    def finish(self) -> None:
        """Every rank of every node ended well."""

    def warned(self) -> None:
        """The stop signal is due: the ranks may save."""


class Council(Protocol):
    """How the agent takes part, whether it decides or not."""

    def report(self, failure: Failure, died_at: float) -> None:
        """This node failed at ``died_at`` (monotonic)."""

    def ended(self) -> None:
        """All ranks of this node ended well."""

    def warn(self) -> None: ...

    def leave(self, then: Callback) -> None:
        """This node's processes are gone: calls ``then`` once the others need this agent no more."""


class Link:
    """One connection: JSON lines out, JSON lines in, never blocking, never trusting."""

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket,
        heard: Callable[[Link, Message], None],
        closed: Callable[[Link], None],
    ) -> None:
        self._loop = loop
        self._socket = connection
        self._heard = heard
        self._closed = closed
        self._in = b""
        self._out = b""
        self.is_open = True
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(connection, READ, self._ready)

    def send(self, message: Message) -> None:
        if not self.is_open:
            return
        self._out += json.dumps(message).encode("ascii") + b"\n"
        if len(self._out) > _BACKLOG_BYTES:
            self.close()
        else:
            self._flush()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.forget(self._socket)
            self._socket.close()
            self._closed(self)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if self.is_open and events & READ:
            self._receive()

    def _flush(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        self._loop.watch(self._socket, READ | WRITE if self._out else READ, self._ready)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            message = _parse(line)
            if message is None:
                self.close()
            if not self.is_open or message is None:
                return
            self._heard(self, message)
        if len(self._in) > _LINE_BYTES:
            self.close()


def _parse(line: bytes) -> Optional[Message]:
    if len(line) > _LINE_BYTES:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def read_failure(message: Message) -> Optional[Failure]:
    try:
        return from_plain(Failure, message.get("failure"))
    except PlainError:
        return None


class Peer:
    """The control channel of every node but the first. Reconnects until it is told how it ended."""

    def __init__(
        self, loop: Loop, find: Callable[[], Optional[Tuple[str, int]]], hello: Message, events: Events, log: Log
    ) -> None:
        self._loop, self._find, self._hello, self._events, self._log = loop, find, hello, events, log
        self._link: Optional[Link] = None
        self._welcomed = False
        self._first = "the first node"
        self._begun = self._heard_at = time.monotonic()
        self._cut_at: Optional[float] = None
        self._connecting: Optional[Tuple[socket.socket, float]] = None
        self._problem = "nothing was announced"
        self._failed: List[Tuple[float, Failure]] = []
        self._has_ended = False
        self._settled = False
        self._then: Optional[Callback] = None
        self.on_welcome: Callback = lambda: None
        loop.every(BEAT_S, lambda: self._say({"kind": "beat"}))
        loop.every(_RETRY_S, self._check)
        self._connect()

    def report(self, failure: Failure, died_at: float) -> None:
        if not self._settled:
            self._failed.append((died_at, failure))
            self._say_failed(died_at, failure)

    def ended(self) -> None:
        self._has_ended = True
        self._say({"kind": "ended"})

    def warn(self) -> None:
        self._say({"kind": "warn"})

    def leave(self, then: Callback) -> None:
        self._then = then
        if self._settled:
            self._go()
        else:
            # Nobody tells how it ended: what is known here has to do.
            self._loop.after(LOST_S + CUT_S, self._give_up)

    def _say(self, message: Message) -> None:
        if self._link is not None and self._welcomed:
            self._link.send(message)

    def _say_failed(self, died_at: float, failure: Failure) -> None:
        age_s = time.monotonic() - died_at
        self._say({"kind": "failed", "failure": to_plain(failure), "age_s": age_s})

    def _go(self) -> None:
        if self._then is not None:
            then, self._then = self._then, None
            if self._link is not None:
                self._link.close()
            then()

    def _give_up(self) -> None:
        if not self._settled:
            self._lose(f"{self._first} does not answer")

    def _lose(self, why: str) -> None:
        self._log(f"control channel lost: {why}")
        late_s = time.monotonic() - self._heard_at if self._cut_at is None else 0.0
        if not self._failed:
            self._failed.append((0.0, Failure("node_lost", self._first, why, at=time.time())))
        self._settle(first_cause(self._failed), late_s)

    def _settle(self, failure: Failure, late_s: float = 0.0) -> None:
        if not self._settled:
            self._settled = True
            self._events.stop_now(late_s)
            self._events.decided(failure)
            self._go()

    def _check(self) -> None:
        now = time.monotonic()
        if self._settled:
            return
        if self._connecting is not None and now - self._connecting[1] > _CONNECT_S:
            self._drop_attempt("no answer")
        if self._cut_at is None and self._link is None and now - self._begun > FIRST_CONTACT_S:
            self._lose(f"the first node's agent could not be reached in {FIRST_CONTACT_S:.0f} s: {self._problem}")
        elif self._cut_at is not None and self._link is None and now - self._cut_at > CUT_S:
            self._lose(f"{self._first}: its agent is gone (connection closed, then: {self._problem})")
        elif self._welcomed and now - self._heard_at > LOST_S:
            self._lose(f"{self._first}: silent for {LOST_S:.0f} s")
        elif self._link is None and self._connecting is None:
            self._connect()

    def _connect(self) -> None:
        place = self._find()
        if place is None:
            return
        try:
            family, kind, _, _, address = socket.getaddrinfo(place[0], place[1], 0, socket.SOCK_STREAM)[0]
            attempt = socket.socket(family, kind)
        except OSError as problem:
            self._problem = f"{place[0]}: {problem}"
            return
        attempt.setblocking(False)
        self._connecting = (attempt, time.monotonic())
        code = attempt.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self._drop_attempt(f"{place[0]}:{place[1]}: {errno.errorcode.get(code, code)}")
            return
        self._loop.watch(attempt, WRITE, lambda _: self._connected(attempt, f"{place[0]}:{place[1]}"))

    def _drop_attempt(self, problem: str) -> None:
        if self._connecting is not None:
            self._loop.forget(self._connecting[0])
            self._connecting[0].close()
            self._connecting = None
            self._problem = problem

    def _connected(self, attempt: socket.socket, where: str) -> None:
        code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop_attempt(f"{where}: {errno.errorcode.get(code, code)}")
            return
        self._connecting = None
        self._loop.forget(attempt)
        self._heard_at = time.monotonic()
        self._link = Link(self._loop, attempt, self._hear, self._closed)
        self._link.send({"kind": "hello", **self._hello})

    def _closed(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._problem = "the connection was closed"
            if self._welcomed:
                self._welcomed = False
                self._cut_at = time.monotonic()

    def _hear(self, _link: Link, message: Message) -> None:
        self._heard_at = time.monotonic()
        kind = message.get("kind")
        if kind == "welcome":
            self._welcome(message)
        elif kind == "gathered":
            self._events.gathered(read_servers(message))
        elif kind == "stop":
            late_s = message.get("late_s")
            self._events.stop_now(float(late_s) if isinstance(late_s, (int, float)) else 0.0)
        elif kind == "verdict":
            failure = read_failure(message)
            if failure is not None:
                self._settle(failure)
        elif kind == "end" and not self._settled:
            self._settled = True
            self._events.finish()
            self._go()
        elif kind == "warn":
            self._events.warned()

    def _welcome(self, message: Message) -> None:
        self._welcomed, self._cut_at = True, None
        self._first = str(message.get("node", self._first))[:128]
        for died_at, failure in self._failed:
            self._say_failed(died_at, failure)
        if self._has_ended:
            self._say({"kind": "ended"})
        self.on_welcome()
