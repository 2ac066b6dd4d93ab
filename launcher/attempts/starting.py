"""The first attempt of a run on nodes without a scheduler: started when their slots are free, or refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..backends import free
from ..contract.errors import Busy
from ..runs import Run
from .make import Attempts, Source, one_folder, take_attempt

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Handle, Place
    from ..contract.launch import Node


class Waiting(NamedTuple):
    """How long a submit waits for slots: 0 not at all, None until they are free. ``notice`` hears for whom."""

    limit_s: float | None = 0
    notice: Callable[[str], None] = lambda _: None

    def for_slots(self, backend: Backend, nodes: Sequence[Node], device_kind: str) -> Waiting:
        """Returns when they are free, with what is left of the time; raises Busy. Nothing is begun meanwhile."""
        begun = time.monotonic()
        free.wait(backend, nodes, device_kind, self.limit_s, self.notice)
        if not self.limit_s:
            return self
        return self._replace(limit_s=max(0.0, self.limit_s - (time.monotonic() - begun)))


def start_first(
    attempts: Attempts,
    backend: Backend,
    run: Run,
    source: Source,
    secret_values: Mapping[str, str],
    waiting: Waiting,
) -> tuple[Run, Handle, int]:
    """Sends the run's first attempt. Where others took the slots in the very moment and there is time to wait, it
    waits again and sends the next one: the refused attempt stays in the journal."""
    places: Sequence[Place] = backend.places()
    attempt = 1
    while True:
        launch = attempts.launch(source, run.name, attempt, one_folder(places))
        try:
            run, handle = attempts.send(backend, run, source, launch, secret_values)
            return run, handle, attempt
        except Busy as problem:
            if waiting.limit_s is not None and waiting.limit_s <= 0:
                raise
            waiting.notice(f"others were faster: {problem.message}")
            waiting = waiting.for_slots(backend, launch.nodes, launch.device_kind)
            run = attempts.store.load(run.name)
            attempt += 1
            take_attempt(run, attempt)
