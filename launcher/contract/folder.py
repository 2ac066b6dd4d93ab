"""Where everything of a run lies. The same layout on the cluster and at home (``docs/run-folder.md``).

Pure path arithmetic on POSIX paths: nothing here touches a disk, so it also names files that are on
another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Optional, Union

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of runs, nodes in file names, clusters: nothing here can leave a folder or be read as an option."""


def is_safe_name(name: str) -> bool:
    return bool(SAFE_NAME.fullmatch(name)) and ".." not in name


@dataclass(frozen=True)
class AttemptFolder:
    """``RUN/attempts/K``: what one attempt was, and what happened in it."""

    root: PurePosixPath

    @property
    def script(self) -> PurePosixPath:
        """What was submitted, byte for byte."""
        return self.root / "script"

    @property
    def launch(self) -> PurePosixPath:
        """The LaunchSpec as JSON."""
        return self.root / "launch.json"

    @property
    def claim(self) -> PurePosixPath:
        """A folder that the started script makes; whoever makes it owns the attempt."""
        return self.root / "claim"

    @property
    def nodes(self) -> PurePosixPath:
        return self.root / "nodes"

    def node_record(self, node: str) -> PurePosixPath:
        """The agent's record of one node (contract.records.NodeRecord)."""
        return self.nodes / f"{node}.json"

    @property
    def rendezvous(self) -> PurePosixPath:
        """host:port pairs that node rank 0's agent announced (contract.records.Announcement)."""
        return self.root / "rendezvous.json"

    @property
    def reach(self) -> PurePosixPath:
        """Which node reaches which: the board of ``cluster check --job`` under Slurm (agent.reach)."""
        return self.root / "reach"

    @property
    def outcome(self) -> PurePosixPath:
        """The engine's own last word (contract.records.Outcome), written by rank 0."""
        return self.root / "outcome.json"

    @property
    def stop(self) -> PurePosixPath:
        """Exists once a graceful stop was asked for (``ZERUN_STOP_FILE``)."""
        return self.root / "stop"

    @property
    def logs(self) -> PurePosixPath:
        return self.root / "logs"

    def log(self, rank: int) -> PurePosixPath:
        """The bytes that the rank wrote, unchanged."""
        return self.logs / f"rank-{rank:05d}.log"

    def arrivals(self, rank: int) -> PurePosixPath:
        """When they arrived: lines of ``offset seconds``, see agent.capture."""
        return self.logs / f"rank-{rank:05d}.times"

    def agent_log(self, node: str) -> PurePosixPath:
        return self.logs / f"agent-{node}.log"

    def setup_log(self, node: str) -> PurePosixPath:
        return self.logs / f"setup-{node}.log"

    @property
    def metrics(self) -> PurePosixPath:
        return self.root / "metrics"

    def metrics_of(self, rank: int) -> PurePosixPath:
        return self.metrics / f"rank-{rank:05d}.jsonl"


@dataclass(frozen=True)
class CheckpointFolder:
    """``RUN/checkpoints/step-00000100``: a checkpoint exists if and only if its manifest does."""

    root: PurePosixPath

    @property
    def manifest(self) -> PurePosixPath:
        return self.root / "manifest.json"

    def shard(self, rank: int) -> PurePosixPath:
        return self.root / f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class RunFolder:
    """One run's folder, wherever it lies."""

    root: PurePosixPath

    @classmethod
    def at(cls, runs: Union[str, PurePosixPath], run: str) -> RunFolder:
        """The folder of ``run`` under the folder ``runs``; the name was checked at the border."""
        if not is_safe_name(run):
            raise ValueError(f"unsafe run name {run!r}")
        return cls(PurePosixPath(runs) / run)

    @property
    def run_json(self) -> PurePosixPath:
        return self.root / "run.json"

    @property
    def events(self) -> PurePosixPath:
        return self.root / "events.jsonl"

    @property
    def code(self) -> PurePosixPath:
        """The job's own tree as it was when it was submitted; the ranks' working folder."""
        return self.root / "code"

    @property
    def data(self) -> PurePosixPath:
        """Token files that the run made for itself (``data: {text: …}``)."""
        return self.root / "data"

    def attempt(self, number: int) -> AttemptFolder:
        return AttemptFolder(self.root / "attempts" / str(number))

    @property
    def attempts(self) -> PurePosixPath:
        return self.root / "attempts"

    @property
    def checkpoints(self) -> PurePosixPath:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> CheckpointFolder:
        return CheckpointFolder(self.checkpoints / f"step-{step:08d}")


_STEP = re.compile(r"^step-(\d{8,})$")
_RANK = re.compile(r"^rank-(\d{5,})\.")


def step_of(folder_name: str) -> Optional[int]:
    """The step that a checkpoint folder's name says, or None for another name."""
    match = _STEP.match(folder_name)
    return int(match.group(1)) if match else None


def rank_of(file_name: str) -> Optional[int]:
    """The rank that a per-rank file's name says, or None for another name."""
    match = _RANK.match(file_name)
    return int(match.group(1)) if match else None


def blob(runs: Union[str, PurePosixPath], digest: str, suffix: str) -> PurePosixPath:
    """Where shipped bytes with this SHA-256 lie: shared by every run below ``runs``."""
    return PurePosixPath(runs) / ".blobs" / f"{digest}{suffix}"


def content(runs: Union[str, PurePosixPath], digest: str) -> PurePosixPath:
    """Where the content with this SHA-256 of a shipped tree lies (contract.bundle)."""
    return PurePosixPath(runs) / ".blobs" / "contents" / digest[:2] / digest
