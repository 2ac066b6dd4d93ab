"""The control channel of node rank 0: hears all agents, stops all, and decides which failure was first."""

from __future__ import annotations

import contextlib
import hmac
import socket
import time
from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple

from ..contract.plain import to_plain
from ..contract.records import Failure
from .control import (
    BEAT_S,
    CUT_S,
    FIRST_CONTACT_S,
    LOST_S,
    STOP_LIMIT_S,
    Events,
    Link,
    Log,
    Message,
    first_cause,
    read_failure,
)
from .loop import READ, Callback, Loop
from .replicas import Where, read_where

_GREET_S = 5.0
_SETTLE_S = 0.7  # reports of the same moment from other nodes are in by then
_SETTLE_ALONE_S = 0.1
_STRANGERS = 64


@dataclass
class _Member:
    """Another node's agent, as it is known here. Times are monotonic seconds."""

    node_rank: int
    name: str
    heard_at: float
    link: Optional[Link] = None
    met: bool = False
    cut_at: Optional[float] = None
    ended: bool = False
    lost: bool = False

    def suspect(self, now: float) -> bool:
        """Whether it may turn out to be lost: then it is too early to say what was first."""
        if self.lost or self.ended or not self.met:
            return False
        return self.cut_at is not None or now - self.heard_at > 2 * BEAT_S + 0.5

    def loss(self, now: float) -> Optional[Tuple[float, str]]:
        """(when, why) it is lost; None while it is not."""
        if self.lost or self.ended:
            return None
        if not self.met:
            if now - self.heard_at > 1.5 * FIRST_CONTACT_S:
                return now, "its agent never reported"
            return None
        if self.cut_at is not None and now - self.cut_at > CUT_S:
            return self.cut_at, "its agent is gone (connection closed)"
        if now - self.heard_at > LOST_S:
            return self.heard_at + BEAT_S, f"its agent was silent for {LOST_S:.0f} s"
        return None


class Coordinator:
    """``names[i]`` is node i's name as far as known. The listener is taken over."""

    def __init__(
        self, loop: Loop, listener: socket.socket, token: str, names: Sequence[str], events: Events, log: Log
    ) -> None:
        self._loop, self._listener, self._token = loop, listener, token.encode("utf-8")
        self._events, self._log, self._name = events, log, names[0]
        now = time.monotonic()
        self._members = {i: _Member(i, name or f"node rank {i}", now) for i, name in enumerate(names) if i}
        self._strangers: Dict[Link, float] = {}
        self._reports: List[Tuple[float, Failure]] = []
        self._standing: List[Message] = []  # what whoever comes (back) has to hear
        self._stopping = False
        self._decided = False
        self._own_ended = False
        self._gathered = False
        self.servers: Dict[int, Optional[Where]] = {}  # by node rank
        self._finished = False
        self._leaving: Optional[Tuple[Callback, float]] = None
        self._hurried = False  # whoever cancels tells every node itself
        listener.setblocking(False)
        loop.watch(listener, READ, self._accept)
        loop.every(BEAT_S, lambda: self._broadcast({"kind": "beat"}))
        loop.every(0.5, self._check)
        loop.after(0.0, self._see_whether_all_came)  # nobody else is to come on a single node

    def report(self, failure: Failure, died_at: float) -> None:
        if failure.kind == "cancelled":
            self._hurried = True
        if self._decided or self._finished:
            self._leave_if_possible()
            return
        self._log(f"failure reported: {failure.kind} on {failure.node}: {failure.message}")
        self._reports.append((died_at, failure))
        if not self._stopping:
            self._stopping = True
            late_s = time.monotonic() - died_at
            self._stand({"kind": "stop", "late_s": late_s})
            self._loop.after(_SETTLE_S if self._members else _SETTLE_ALONE_S, self._decide)
            self._events.stop_now(late_s)

    def ended(self) -> None:
        self._own_ended = True
        self._finish_if_all_ended()

    def warn(self) -> None:
        self._broadcast({"kind": "warn"})

    def leave(self, then: Callback) -> None:
        self._leaving = (then, time.monotonic() + STOP_LIMIT_S)
        self._leave_if_possible()

    def _broadcast(self, message: Message, but: Optional[Link] = None) -> None:
        for member in self._members.values():
            if member.link is not None and member.link is not but:
                member.link.send(message)

    def _stand(self, message: Message) -> None:
        self._standing.append(message)
        self._broadcast(message)

    def _decide(self) -> None:
        if self._decided:
            return
        now = time.monotonic()
        if any(member.suspect(now) for member in self._members.values()):
            self._loop.after(0.25, self._decide)
            return
        self._decided = True
        failure = first_cause(self._reports)
        self._log(f"first failure: {failure.kind} on {failure.node}: {failure.message}")
        self._stand({"kind": "verdict", "failure": to_plain(failure)})
        self._events.decided(failure)
        self._leave_if_possible()

    def _finish_if_all_ended(self) -> None:
        if self._stopping or self._finished or not self._own_ended:
            return
        if all(member.ended for member in self._members.values()):
            self._finished = True
            self._stand({"kind": "end"})
            self._events.finish()

    def _leave_if_possible(self) -> None:
        if self._leaving is None or not (self._decided or self._finished):
            return
        then, until = self._leaving
        if time.monotonic() < until and any(self._is_awaited(m) for m in self._members.values()):
            return
        self._leaving = None
        self._loop.forget(self._listener)
        self._listener.close()
        then()

    def _is_awaited(self, member: _Member) -> bool:
        """Who is there still hears the end. Who is only about to come has to as well, or it would wait for us in vain
        for FIRST_CONTACT_S: ranks here may fail before the other nodes' agents are up."""
        if member.lost:
            return False
        return member.link is not None or not (member.met or self._hurried)

    def _check(self) -> None:
        now = time.monotonic()
        for link, since in list(self._strangers.items()):
            if now - since > _GREET_S:
                link.close()
        for member in self._members.values():
            loss = member.loss(now)
            if loss is not None and not (self._decided or self._finished):
                member.lost = True
                self.report(Failure("node_lost", member.name, f"{member.name}: {loss[1]}", at=time.time()), loss[0])
        self._leave_if_possible()

    def _accept(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, _ = self._listener.accept()
            if len(self._strangers) >= _STRANGERS + len(self._members):
                connection.close()
                return
            self._strangers[Link(self._loop, connection, self._hear_stranger, self._closed)] = time.monotonic()

    def _hear_stranger(self, link: Link, message: Message) -> None:
        if link not in self._strangers:
            self._hear(link, message)
            return
        token, node_rank = message.get("token"), message.get("node_rank")
        greeted = isinstance(token, str) and hmac.compare_digest(token.encode("utf-8", "replace"), self._token)
        member = self._members.get(node_rank) if isinstance(node_rank, int) else None
        if not greeted or member is None or message.get("kind") != "hello":
            self._log("a connection that does not know this attempt was cut off")
            link.close()
            return
        del self._strangers[link]
        before, member.link = member.link, link
        member.name = str(message.get("node", member.name))[:128]
        member.met, member.cut_at, member.heard_at = True, None, time.monotonic()
        if before is not None:
            before.close()
        self.servers[member.node_rank] = read_where(message.get("server"))
        link.send({"kind": "welcome", "node": self._name})
        for standing in self._standing:
            link.send(standing)
        self._see_whether_all_came()

    def _see_whether_all_came(self) -> None:
        if not self._gathered and all(member.met for member in self._members.values()):
            self._gathered = True
            servers = {rank: where for rank, where in self.servers.items() if where is not None}
            self._stand({"kind": "gathered", "servers": {str(rank): where for rank, where in servers.items()}})
            self._events.gathered(servers)

    def _hear(self, link: Link, message: Message) -> None:
        member = next((m for m in self._members.values() if m.link is link), None)
        if member is None:
            return
        now = member.heard_at = time.monotonic()
        kind = message.get("kind")
        if kind == "failed":
            failure, age_s = read_failure(message), message.get("age_s")
            if failure is not None and isinstance(age_s, (int, float)):
                self.report(failure, now - min(max(float(age_s), 0.0), 60.0))
        elif kind == "ended":
            member.ended = True
            self._finish_if_all_ended()
        elif kind == "warn":
            self._broadcast({"kind": "warn"}, but=link)
            self._events.warned()

    def _closed(self, link: Link) -> None:
        self._strangers.pop(link, None)
        for member in self._members.values():
            if member.link is link:
                member.link, member.cut_at = None, time.monotonic()
        self._leave_if_possible()
