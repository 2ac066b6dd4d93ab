"""What a backend is: how a prepared attempt gets started, asked after and ended.

Backend × Transport are two independent choices. A backend works on **places**: a place is one folder
``runs`` reached by one transport. With a shared filesystem there is one place for all nodes; without
one there is a place a node, and the run's folder lies there in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..bundles import Shipment
from ..contract.errors import Busy
from ..contract.launch import LaunchSpec, Node
from ..transports.protocol import Stream, Transport


@dataclass(frozen=True)
class Place:
    """``runs`` is absolute and expanded. ``node`` is None when the place holds every node's files. ``ahead_s``: how far
    that node's clock is ahead of this machine's, as far as that could be told; 0 where places hold many nodes'."""

    transport: Transport
    runs: str
    node: str | None = None
    ahead_s: float = 0.0


@dataclass(frozen=True)
class Submission:
    """What goes to the other side: written into the run folder before anything starts.

    ``files`` are relative to the run folder (``attempts/1/script``, ``attempts/1/launch.json``, …);
    ``blobs`` are shipped bytes by SHA-256 and suffix (the runtime zip; a bundle of an older launcher's), sent only
    where lacking; of ``code``, the job's tree, what is lacking.
    ``secrets`` go into one 0600 file outside the run folder (LaunchSpec.secrets_file), never elsewhere.
    """

    run: str
    attempt: int
    name: str  # unique: by it a submit that lost its answer finds its own job
    launch: LaunchSpec
    script: bytes
    files: Mapping[str, bytes]
    blobs: Mapping[str, bytes]  # "<sha256>.zip" → bytes
    secrets: Mapping[str, str] = field(default_factory=dict)
    code: Shipment | None = None


@dataclass(frozen=True)
class Handle:
    """What finds a submitted attempt again: plain data, kept in the journal.

    Slurm: ``{"job": "123", "name": …}``; direct: ``{"agents": {node: ProcessId as dict}}``.
    """

    backend: Literal["slurm", "direct"]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Poll:
    """The scheduler's (direct: the processes') view. ``state``:

    queued · running · ended · absent (it answered, and knows no such job) · unknown (it did not answer;
    ``why`` says so). ``word`` is the scheduler's own word (``PENDING``, ``NODE_FAIL``, …), ``why`` its reason
    in plain words, ``starts_at`` an expected start as it was told.
    """

    state: Literal["queued", "running", "ended", "absent", "unknown"]
    word: str = ""
    why: str = ""
    starts_at: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One line of ``zerun cluster check``: a node (or the login node), and what is wrong with it."""

    name: str
    ok: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


class Backend(Protocol):
    name: Literal["slurm", "direct"]

    def expect(self, code: Shipment) -> None:
        """This code will be submitted: the first question to a machine asks about it too, which spares a second."""

    def sent(self) -> Mapping[str, frozenset[str]]:
        """By machine that a submission's code was brought to: which of its contents (SHA-256) had to be sent there."""

    def places(self) -> Sequence[Place]:
        """Where run folders lie; connects on first use. Raises Unreachable or Refused."""

    def call(
        self, place: Place, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> Mapping[str, Any]:
        """The answer of one of the agent's verbs at a place. Its error replies come as ZerunError classes."""

    def tail(self, place: Place, request: Mapping[str, Any]) -> Stream:
        """The agent's ``tail`` verb at a place: its frames as they come."""

    def serve(self, place: Place, request: Mapping[str, Any]) -> Stream:
        """The agent's ``serve`` verb: other nodes may take the run's shards there for as long as this is open."""

    def busy(self, nodes: Sequence[Node], device_kind: str) -> Busy | None:
        """Why these nodes cannot be had now: who holds their slots, since when. None when they can, and where a
        scheduler queues. Raises Unreachable or Refused."""

    def would_start(self, script: bytes) -> str | None:
        """When and where the scheduler would start ``script``, in a sentence; None where nothing queues.

        Raises UsageError with the scheduler's own words when it refuses the job, Unreachable."""

    def submit(self, submission: Submission) -> Handle:
        """Starts the attempt, or adopts it when it finds that an earlier call already did."""

    def find(self, name: str, run: str, attempt: int) -> Handle | None:
        """The handle of a submission whose answer was lost; None when nothing of the name is there."""

    def poll(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        """One batched question for all handles."""

    def cancel(self, handle: Handle, run: str, attempt: int) -> None:
        """Ends every process of the attempt on every node, and nothing else."""

    def execute(self, handle: Handle, node: str, request: Mapping[str, Any]) -> Stream:
        """The agent's ``exec`` verb on a node of a job that runs: a command beside its ranks."""

    def check(self) -> Sequence[Finding]:
        """Reaches every node in parallel."""

    def close(self) -> None: ...
