"""What comes after: cancel, checkpoints, home, removal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..attempts import remembered
from ..contract.errors import (
    Unreachable,
    UsageError,
)
from ..runs import RunState
from .project import Project

if TYPE_CHECKING:
    from ..checkpoints import Candidate, Collected, Report
    from ..clearing import Clearing


class Ends(Project):
    """The use cases after, or instead of, the end."""

    def cancel(self, run: str) -> RunState:
        """Ends every process of the run on every node. Cancelling what has ended changes nothing.

        Raises PartialAnswer naming nodes where something may be left, of this attempt or of an earlier one.
        """
        from .. import specs
        from ..attempts.former import end_remembered

        loaded = self.store.load(self.resolve(run))
        cluster = specs.cluster_from_plain(loaded.about["cluster"])
        backend = self.attempts.open_for(loaded)
        try:
            before = self.attempts.look(backend, [loaded])[0]
            loaded = self.store.load(loaded.name)
            if before.ended:
                # An agent that was killed could not end what its ranks had left in sessions of their own.
                if before.state == "failed" and loaded.handle is not None:
                    backend.cancel(loaded.handle, loaded.name, before.attempt)
                end_remembered(self.attempts, backend, cluster, loaded)
                return before
            if before.state == "submitting":
                raise UsageError(f"{loaded.name}: {before.why}", hint=f"zerun cancel {loaded.name} again, in a moment")
            loaded = self.store.append(loaded, "cancelling", before.attempt, time.time())
            if loaded.handle is not None:
                backend.cancel(loaded.handle, loaded.name, before.attempt)
            elif before.state == "unknown":
                raise Unreachable(f"{loaded.name}: {before.why}", hint=f"zerun cancel {loaded.name} again, later")
            loaded = self.store.append(loaded, "cancelled", before.attempt, time.time())
            end_remembered(self.attempts, backend, cluster, loaded)
            return self.attempts.look(backend, [loaded])[0]
        finally:
            backend.close()

    def checkpoints(self, run: str) -> list[Candidate]:
        """Every checkpoint of the run that a resume could take or has to pass over, oldest first: on its cluster, and
        what is whole at home alone; with what is wrong with it."""
        from ..checkpoints import candidates

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            return candidates(self._about(backend, loaded), loaded.folder, sends_back=True)
        finally:
            backend.close()

    def collect(
        self, run: str, checkpoint: str = "newest", progress: Callable[[int, int], None] | None = None
    ) -> Collected:
        """Brings logs, metrics and a checkpoint (``newest``, ``none`` or a step) home, verified."""
        from ..checkpoints import collect

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            got = collect(backend, loaded.name, loaded.folder, checkpoint, progress)
        finally:
            backend.close()
        self.store.append(loaded, "collected", loaded.attempt, time.time(), checkpoint=got.step)
        return got

    def verify(self, run: str, step: int | None = None) -> Report:
        """Reads a checkpoint that is at home whole, and holds every block against its digest."""
        from .keeping import verify_at_home

        return verify_at_home(self.store.load(self.resolve(run)), step)

    def remove(self, run: str, *, remote: bool, sure: Callable[[Clearing], bool]) -> Clearing | None:
        """Removes a run that has ended: at home, and with ``remote`` on its cluster. ``sure`` is asked once it is known
        what would go; None when it says no."""
        from .. import specs
        from ..clearing import clear, look

        loaded = self.store.load(self.resolve(run))
        local = specs.cluster_from_plain(loaded.about["cluster"]).local
        state = remembered(loaded)
        backend = self.attempts.open_for(loaded) if remote or local or state is None else None
        try:
            if state is None and backend is not None:
                state = self.attempts.look(backend, [loaded])[0]
            assert state is not None
            clearing = look(backend, loaded, state, remote=remote, local=local)
            if not sure(clearing):
                return None
            clear(backend, clearing)
            return clearing
        finally:
            if backend is not None:
                backend.close()
