"""What a run is, as it can be told: its state, how far it is, and what one look at an attempt found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from ..backends.protocol import Handle, Poll
from ..contract.errors import Exit
from ..contract.plain import to_plain
from ..contract.records import NodeRecord, Outcome
from .diagnosis import Cause

State = Literal["submitting", "queued", "running", "done", "failed", "cancelled", "stopped", "time_limit", "unknown"]
EXITS: Mapping[State, Exit | None] = {
    "submitting": None,
    "queued": None,
    "running": None,
    "unknown": None,
    "done": Exit.DONE,
    "failed": Exit.JOB_FAILED,
    "cancelled": Exit.CANCELLED,
    "stopped": Exit.STOPPED,
    "time_limit": Exit.TIME_LIMIT,
}


@dataclass(frozen=True)
class Progress:
    """The last line of rank 0's metrics. ``steps`` is what the attempt is to reach."""

    step: int
    steps: Optional[int] = None  # Optional: from_plain reads no other spelling
    loss: Optional[float] = None
    step_time_s: Optional[float] = None
    tokens_per_s: Optional[float] = None


@dataclass(frozen=True)
class Observation:
    """What one look at an attempt found. ``replies`` are the agents' records from every place that answered;
    ``silent`` names the places that did not, with the reason."""

    poll: Poll
    attempt: int
    records: tuple[NodeRecord, ...] = ()
    alive: frozenset[str] = frozenset()  # nodes whose agent lives
    outcome: Outcome | None = None
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoints: tuple[int, ...] = ()  # whole ones on the line that the run is on, oldest first
    attempt_checkpoints: tuple[int, ...] = ()  # those that this attempt wrote
    silent: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    progress: Progress | None = None
    being_made: bool = False  # some command was submitting it when the look began


@dataclass(frozen=True)
class RunState:
    """A run as it can be told. ``exit_code`` is what ``wait`` returns, None while it goes on."""

    run: str
    job: str
    cluster: str
    state: State
    attempt: int
    since: float | None = None
    exit_code: int | None = None
    why: str = ""
    nodes: tuple[str, ...] = ()
    ranks: int = 0
    cause: Cause | None = None
    outcome: Outcome | None = None
    checkpoints: tuple[int, ...] = ()
    handle: Handle | None = None
    notes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    progress: Progress | None = None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain
