"""Who holds a slot of a node that has no scheduler, as it is written beside the slot's lock file."""

from __future__ import annotations

from dataclasses import dataclass

from .records import ProcessId


@dataclass(frozen=True)
class Lease:
    """``slot`` is the device's number where slots are devices. ``process`` is the agent that holds it."""

    slot: int
    user: str
    run: str
    attempt: int
    node: str
    since: float
    process: ProcessId
