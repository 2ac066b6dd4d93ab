"""Who holds a slot of a node that has no scheduler, as it is written beside the slot's lock file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from .records import ProcessId


@dataclass(frozen=True)
class Lease:
    """``slot`` is the device's number where slots are devices. ``process`` is the agent that holds it.

    The other two find what an agent that was killed left behind: ``mark``, the SHA-256 of the attempt's token, by the
    environment of processes, which their own user alone can read; ``sessions``, their leaders, by what all can see.
    """

    slot: int
    user: str
    run: str
    attempt: int
    node: str
    since: float
    process: ProcessId
    mark: str = ""
    sessions: Tuple[ProcessId, ...] = ()
