"""The typed, frozen descriptions: what every key of a cluster and a job means.

Values arrive as text exactly as it was written (specs.load); each field's type decides what it is.
Bytes and bytes a second are integers, durations whole seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# Placeholders for the parsing types; specs/units.py gives the real ones.
Bytes = int
Rate = int
Seconds = int


class Description(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- cluster ------------------------------------------------------------------------------------


class Login(Description):
    host: str
    user: str | None = None
    port: int | None = None
    via: Literal["fabric"] = "fabric"  # openssh is not built yet: refused by name


class Slurm(Description):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    gpus_by: Literal["gres", "gpus-per-node", "none"] = "none"
    gpu_type: str | None = None
    extra: dict[str, str | None] = Field(default_factory=dict)  # any other sbatch option; null: a flag


class NodeEntry(Description):
    name: str
    address: str | None = None
    slots: int = 1
    devices: tuple[int, ...] | None = None


class Nodes(Description):
    """As written: ``names`` in Slurm's node-list syntax, or ``hostfile``; see Cluster.node_list."""

    names: str | None = None
    hostfile: str | None = None
    slots: int | None = None
    cpus_per_slot: int | None = None
    memory_per_slot: Bytes | None = None
    time_max: Seconds | None = None


class Device(Description):
    kind: Literal["cpu", "gpu"] = "cpu"
    model: str | None = None
    memory: Bytes | None = None
    reserve: Bytes = 0
    peak_flops: dict[str, int] = Field(default_factory=dict)  # by precision, FLOP/s


class Network(Description):
    inside: Rate | None = None  # bytes/s, per slot
    between: Rate | None = None  # bytes/s, per node and direction
    interface: str | None = None
    ports: tuple[int, int] | None = None  # written 20000-29999


class Paths(Description):
    runs: str  # ~ and $NAME are expanded on the node, all else literal
    shared: bool = True


class Ssh(Description):
    config: str | None = None  # an OpenSSH client configuration, relative to the cluster's file
    jump: str | None = None
    user: str | None = None
    port: int | None = None
    key: str | None = None
    connections: int = 32  # logins at once


class Cluster(Description):
    name: str
    backend: Literal["slurm", "direct"]
    login: Login | None = None  # Slurm: left out on the login node itself
    slurm: Slurm = Slurm()
    nodes: Nodes | tuple[NodeEntry, ...]
    device: Device = Device()
    network: Network = Network()
    paths: Paths
    setup: str = ""
    python: str = "python3"
    agent_python: str = "python3"
    env: dict[str, str] = Field(default_factory=dict)
    ssh: Ssh = Ssh()

    @property
    def node_list(self) -> tuple[NodeEntry, ...]:
        """Every node with its slots, in the order named."""
        raise NotImplementedError

    @property
    def local(self) -> bool:
        """Direct on this very machine: one node named ``localhost``."""
        raise NotImplementedError


# --- job ----------------------------------------------------------------------------------------


class GptModel(Description):
    kind: Literal["gpt"]
    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab: int = 256
    dropout: float = 0.0


class FactoryModel(Description):
    factory: str  # module:function
    options: dict[str, Any] = Field(default_factory=dict)
    loss: str | None = None


class Data(Description):
    text: Literal["python-stdlib"] | None = None
    tokens: str | None = None  # relative: in the shipped code; absolute: on the cluster
    heldout: str | None = None
    factory: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class Zero(Description):
    stage: Literal[0, 1, 2, 3]
    bucket: Bytes = 25_000_000
    gradient_dtype: Literal["fp32"] = "fp32"


class Parallel(Description):
    tensor: int = 1  # above 1 is not built yet: refused by name


class Optimizer(Description):
    kind: Literal["adamw"] = "adamw"
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = None
    warmup: int = 0
    schedule: Literal["cosine", "constant"] = "cosine"


class Batch(Description):
    """Two of three: global and micro (accumulation derived), or micro and accumulation."""

    global_: Annotated[int | None, Field(alias="global")] = None
    micro: int
    accumulation: int | None = None


class Evaluate(Description):
    every: int
    tokens: int = 65536


class Checkpoint(Description):
    every_steps: int | None = None  # written every: 50
    every_s: Seconds | None = None  # written every: 30min
    keep: int | None = None


class Code(Description):
    root: str | None = None
    exclude: tuple[str, ...] = ()
    limit: Bytes = 50_000_000


class Program(Description):
    argv: tuple[str, ...]
    stop_signal: str = "TERM"
    stop_grace: Seconds = 30


class Job(Description):
    name: str
    nodes: int = 1
    slots_per_node: int | Literal["all"] = "all"
    time: Seconds | None = None
    code: Code = Code()
    model: GptModel | FactoryModel | None = None
    data: Data | None = None
    zero: Zero | None = None
    parallel: Parallel = Parallel()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: Optimizer | None = None
    batch: Batch | None = None
    steps: int | None = None
    seed: int = 0
    evaluate: Evaluate | None = None
    recompute: Literal["none"] = "none"
    checkpoint: Checkpoint = Checkpoint()
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    program: Program | None = None
    cluster: str | None = None
