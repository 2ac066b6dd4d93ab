"""The launch specification: ``attempts/K/launch.json``, all that an agent needs to start its ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, Optional, Tuple

from .container import Container
from .data_files import DataFile
from .kept import Foreign
from .train import TrainConfig


@dataclass(frozen=True)
class Node:
    """A node of the job. ``address`` is what other nodes connect to; empty means the name itself.

    Under Slurm nodes are not known before the allocation: then ``LaunchSpec.nodes`` holds entries
    with an empty name, one a node, and agents take theirs from ``SLURM_NODEID``.
    """

    name: str
    slots: int
    address: str = ""
    devices: Optional[Tuple[int, ...]] = None
    among: Optional[Tuple[int, ...]] = None  # no scheduler: all slots of the node, of which ``slots`` are leased


@dataclass(frozen=True)
class Program:
    """A user's own script, started once a slot with torchrun's variables. ``data``: the variable by which it finds a
    file of the job's data → its path, absolute on the cluster or inside the code."""

    argv: Tuple[str, ...]
    data: Dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SetupPart:
    """``lines`` lines of the setup text, from its line ``first`` (counted from 1) on: whose they are (``cluster`` or
    ``job``), and where the first of them stands on the submitter's machine, if that is known."""

    of: str
    first: int
    lines: int
    file: str = ""
    line: Optional[int] = None


@dataclass(frozen=True)
class LaunchSpec:
    """Everything an attempt is started from. Paths are absolute and expanded; times are seconds.

    ``env`` is the cluster's ``env`` overlaid with the job's; what the launcher owns (RANK, …) comes
    after it, what ``setup`` exported before it. Values of ``secrets`` are never here: the agent reads
    them from ``secrets_file``, a JSON object in a 0600 file outside the run folder.
    """

    run: str
    attempt: int
    run_dir: str
    runtime: str  # path of the shipped agent and engine (a zip that Python runs)
    nodes: Tuple[Node, ...]
    shared: bool  # one filesystem under run_dir for all nodes
    token: str  # known to the agents of this attempt alone: greets the control channel, marks processes
    python: str
    agent_python: str
    train: Optional[TrainConfig] = None  # exactly one of train and program is set
    program: Optional[Program] = None
    code: Optional[str] = None  # the job's bundle (.tree, or an older launcher's .tar.gz), laid out in run_dir/code
    tensor: int = 1
    device_kind: str = "cpu"  # cpu | gpu
    cpus_per_slot: Optional[int] = None
    setup: str = ""
    setup_parts: Tuple[SetupPart, ...] = ()
    env: Dict[str, str] = field(default_factory=dict)
    secrets: Tuple[str, ...] = ()
    secrets_file: Optional[str] = None
    interface: Optional[str] = None
    ports: Optional[Tuple[int, int]] = None  # inclusive
    time_s: Optional[int] = None  # enforced by the agent under direct; by Slurm otherwise
    warn_s: int = 120  # before the limit: the stop signal, so that a job can save
    grace_s: int = 10  # from SIGTERM to SIGKILL when others are stopped
    stop_signal: str = "USR2"
    resume_step: Optional[int] = None
    stage: Tuple[DataFile, ...] = ()  # copied to node_local, once a node, before the ranks start
    reach: bool = False  # `cluster check --job` under Slurm: all pairs of nodes try each other before ranks start
    outputs: Tuple[str, ...] = ()  # patterns of files that are collected (contract.kept)
    foreign: Optional[Foreign] = None  # the program's own checkpoints
    resume_from: Optional[str] = None  # one of them, relative to run_dir
    replicas: int = 0  # copies of each shard on the nodes after its own, where nothing is shared
    here: Optional[str] = None  # the job id of an allocation that was there before, which it runs inside
    container: Optional[Container] = None  # that ranks run in; the agent stays outside
    job_id: Optional[str] = None  # Slurm's, filled in when the script claims the attempt
    restart_count: int = 0
    node_local: Optional[str] = None  # a folder of each node's own disk, not expanded: agent.expand does, after setup
