"""The plan: what a job on a cluster comes to. Plain frozen data, no clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.launch import Node, Program
from ..contract.simulation import Simulation
from ..contract.topology import Topology
from ..contract.train import TrainConfig

Verdict = Literal["fits", "does not fit", "cannot be said"]
Source = Literal["arithmetic", "simulated", "assumed"]


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
    """``parameters`` is None when the model is a user's own and was not counted. ``largest`` is, of each stage, the
    most parameters whose state would fit the device at this number of ranks; empty where no device is described."""

    parameters: int | None
    stages: tuple[StageMemory, ...]
    chosen: int | None
    device_bytes: int | None
    verdict: Verdict
    because: str
    largest: tuple[int, ...] = ()


@dataclass(frozen=True)
class TableRow:
    """State of every stage at one world size."""

    ranks: int
    stages: tuple[StageMemory, ...]


@dataclass(frozen=True)
class Alive:
    """Bytes of one line at three moments of a step: ``loss`` (forward has ended, backward begins),
    ``backward`` (inside the first block that backward visits), ``update`` (the optimizer's step)."""

    loss: int = 0
    backward: int = 0
    update: int = 0


@dataclass(frozen=True)
class StepLine:
    """What a rank holds in a step, a line a kind. ``bytes`` is the most of its ``alive``; lines peak at different
    moments, so their sum is no peak."""

    what: str
    bytes: int
    source: Source
    alive: Alive
    note: str = ""

    @classmethod
    def of(cls, what: str, alive: Alive, source: Source, note: str = "") -> StepLine:
        return cls(what, max(alive.loss, alive.backward, alive.update), source, alive, note)


@dataclass(frozen=True)
class Traffic:
    """What one rank sends of one kind in one optimizer step.

    ``volume_elements`` counts whole messages, as the ZeRO paper does; ``sent_bytes`` is what leaves the rank, of
    which ``inside_bytes`` stay in its node; ``node_bytes`` leave a whole node, all its ranks together (the busiest
    node's). ``group`` is over which ranks: data (of one replica) · replica (across them) · tensor.
    """

    what: str
    collective: Literal["all-gather", "reduce-scatter", "all-reduce"]
    group: Literal["data", "replica", "tensor"]
    volume_elements: int
    sent_bytes: int
    inside_bytes: int
    node_bytes: int


@dataclass(frozen=True)
class Bounds:
    """Seconds that a step cannot be shorter than, each for its own reason; None where ``missing`` says what lacks.

    Bounds, not predictions: no link and no device reaches its peak, and not everything overlaps. ``step_s`` is the
    largest of those that are known, ``bounded_by`` its name.
    """

    compute_s: float | None
    inside_s: float | None
    between_s: float | None
    step_s: float | None
    bounded_by: Literal["compute", "inside", "between"] | None
    flops: int | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tried:
    """A change of one setting, planned: ``sets`` is what ``--set`` takes."""

    sets: tuple[str, ...]
    verdict: Verdict
    needs_bytes: int | None
    not_built: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """Whether the whole step fits. ``needs_bytes`` is the most that lines of arithmetic alone hold at one moment;
    ``best`` the smallest change that would fit, of all ``tried``."""

    verdict: Verdict
    because: str
    needs_bytes: int | None = None
    best: tuple[str, ...] = ()
    tried: tuple[Tried, ...] = ()


@dataclass(frozen=True)
class Disk:
    """``checkpoint_bytes`` of one, all ranks together; ``at_once`` how many may lie there together (the newest that
    are kept, and the one being written), None when that depends on how long steps take. ``copies`` of every shard lie
    on other nodes."""

    checkpoint_bytes: int
    at_once: int | None
    kept: int | None
    ranks: int
    copies: int = 0

    @property
    def most_bytes(self) -> int:
        """What has to be there; of a number that is not known, two: one, and the next that is being written."""
        return self.checkpoint_bytes * (self.at_once or 2)

    @property
    def all_bytes(self) -> int:
        """The same on all nodes together, with the copies."""
        return self.most_bytes * (1 + self.copies)

    @property
    def most_files(self) -> int:
        """Files and folders of the whole run, about: shards, manifests and folders; a rank's log, its arrival times and
        metrics; journal, records and code."""
        each = self.ranks + 3
        return each * (self.at_once or 2) + self.ranks * 3 + 40


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
    step: tuple[StepLine, ...] = ()  # empty where nobody knows the model's shapes
    traffic: tuple[Traffic, ...] | None = None  # None likewise; empty on one rank
    bounds: Bounds | None = None
    judgement: Judgement = Judgement("cannot be said", "the step is not planned")
    disk: Disk | None = None  # what checkpoints take; None where nobody knows the model's shapes
    pool: str | None = None  # the cluster's pool that it is planned for, where there are pools
    remarks: tuple[str, ...] = ()  # what a person should read before walking away, a line each
    simulation: Simulation | None = None  # of one rank's step; ``step`` then tells what it held

    @property
    def sent_bytes_per_step(self) -> int | None:
        """What a rank sends in an optimizer step: what the engine's own ``sent_bytes`` will say."""
        return None if self.traffic is None else sum(t.sent_bytes for t in self.traffic)
