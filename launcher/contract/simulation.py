"""A simulated step: what the launcher asks an engine process, and what that answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from .train import TrainConfig


@dataclass(frozen=True)
class SimulationRequest:
    """Rank ``rank`` of the ranks that ``slots`` puts on nodes. ``code`` is the folder of the job's own modules.

    ``steps``: the last one is recorded. ``points`` bounds the length of the timeline.
    """

    train: TrainConfig
    rank: int
    slots: Tuple[int, ...]
    device_kind: str = "cpu"  # cpu: gloo's messages, as the engine sends them; gpu: the library's collectives
    code: Optional[str] = None
    steps: int = 1
    points: int = 600


@dataclass(frozen=True)
class Held:
    """Bytes of one category (engine/watching/track.py) at one moment."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The most that is held in one phase of the step, and what was alive then."""

    phase: str  # forward | backward | update
    bytes: int
    holds: Tuple[Held, ...]


@dataclass(frozen=True)
class Timeline:
    """Sizes over one step. Each point is the largest moment of its share of the step's changes: bytes by
    category, in the order of ``categories``. ``marks`` say at which point a phase begins."""

    categories: Tuple[str, ...]
    points: Tuple[Tuple[int, ...], ...]
    marks: Tuple[Tuple[int, str], ...]


@dataclass(frozen=True)
class Simulation:
    """``peaks`` has an entry a phase; the largest is the step's. Bytes are of storages of tensors: what a kernel
    or a library holds inside a call is not among them."""

    rank: int
    world_size: int
    peak_bytes: int
    peak_phase: str
    peak_holds: Tuple[Held, ...]
    peaks: Tuple[Peak, ...]
    timeline: Timeline
    parameters: int
    state_bytes: Dict[str, int]
    volume_elements: int
    sent_bytes: int
    collectives: str  # peer | native | none
    torch: str
    took_s: float
    memory_bytes: int = 0  # what the simulation itself held at most
    assumed: Tuple[str, ...] = field(default=())
