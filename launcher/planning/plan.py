"""The plan: what a job on a cluster comes to. Plain frozen data, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.launch import Node, Program
from ..contract.topology import Topology
from ..contract.train import TrainConfig


@dataclass(frozen=True)
class StageMemory:
    """State bytes of one ZeRO stage (ZeRO paper §3.1 / §5): state memory, not step memory."""

    zero_stage: int
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    total_bytes: int
    all_ranks_bytes: int
    floor_bytes: int
    fits: bool | None
    smallest_ranks_that_fit: int | None


@dataclass(frozen=True)
class StatePlan:
    """``parameters`` is None when the model is a user's own and was not counted."""

    parameters: int | None
    stages: tuple[StageMemory, ...]
    chosen: int | None
    device_bytes: int | None
    verdict: Literal["fits", "does not fit", "cannot be said"]
    because: str


@dataclass(frozen=True)
class Plan:
    """``nodes`` have empty names under Slurm, which chooses them."""

    job_name: str
    cluster_name: str
    backend: Literal["slurm", "direct"]
    nodes: tuple[Node, ...]
    topology: Topology
    train: TrainConfig | None
    program: Program | None
    state: StatePlan
    time_s: int | None
    global_batch: int | None
    not_built: tuple[str, ...] = ()  # planned, but refused by name when submitted (planning.check_engine)
