"""Ways to communicate that are late, or fail at one message: put in front of a real one (``ZeroEngine(…, comm=…)``)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from launcher.engine.comm import Comm, CommError, Pending


class InFront:
    """Passes everything on; ``begins`` is called before each message, ``waits`` before each wait for one."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def begins(self, what: str) -> None:
        """A message of this name is about to begin."""

    def waits(self, what: str) -> None:
        """It is about to be waited for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def gather(self, flat: Tensor, what: str) -> Pending:
        self.begins(what)
        return _Held(self._comm.gather(flat, what), lambda: self.waits(what))

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        self.begins(what)
        return _Held(self._comm.reduce(flat, out, scratch, what, add=add), lambda: self.waits(what))

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        self.begins(what)
        return _Held(self._comm.all_reduce(flat, what), lambda: self.waits(what))

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        self.begins(what)
        return self._comm.exchange(send, send_counts, receive_counts, what)

    def gather_small(self, value: Tensor, what: str) -> Tensor:
        self.begins(what)
        return self._comm.gather_small(value, what)

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        self.begins(what)
        self._comm.broadcast(value, source, what)


class _Held:
    def __init__(self, pending: Pending, before: Callable[[], None]) -> None:
        self._pending, self._before = pending, before

    def wait(self) -> None:
        self._before()
        self._pending.wait()


class Late(InFront):
    """Every other beginning and wait comes up to ``most_s`` late, by chance, on each rank at another one."""

    def __init__(self, comm: Comm, seed: int, most_s: float = 0.003) -> None:
        super().__init__(comm)
        self._chance, self._most_s = random.Random(1000 * seed + comm.rank), most_s
        self.delays = 0

    def begins(self, what: str) -> None:
        if self._chance.random() < 0.5:
            self.delays += 1
            time.sleep(self._chance.random() * self._most_s)

    waits = begins


class Cut(InFront):
    """Where ``armed``, the ``number``-th message (from 0, while it ``counts``) fails instead of beginning: the rank is
    told by this class, or, where ``theirs``, as it would be of a message that broke."""

    theirs = False

    def __init__(self, comm: Comm, number: int) -> None:
        super().__init__(comm)
        self._number = number
        self.armed = self.counts = False
        self.begun: list[str] = []
        self.waited: list[str] = []

    def begins(self, what: str) -> None:
        if not self.counts:
            return
        self.begun.append(what)
        if self.armed and len(self.begun) > self._number:
            if self.theirs:
                raise self._comm.failed(what, -1, OSError("the cable is cut"))  # type: ignore[attr-defined]
            raise CommError(f"rank {self._comm.rank}: {what}: the cable is cut")

    def waits(self, what: str) -> None:
        if self.counts:
            self.waited.append(what)

    def unfinished(self) -> list[str]:
        """What was begun and not waited for, in the order of beginning; small messages are over at once."""
        waited = list(self.waited)
        small = (
            "gradient norm",
            "unused parameters",
            "loss",
            "buffers",
            "the order in which gradients are summed",
            "the order in which units are used",
        )
        return [what for what in self.begun if what not in small and not _taken(waited, what)]


def _taken(rows: list[str], row: str) -> bool:
    if row in rows:
        rows.remove(row)
        return True
    return False
