"""What the agent writes down: its node's record, its own log, and the word to whoever started it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ..contract.folder import AttemptFolder
from ..contract.plain import dumps, loads, write_atomically
from ..contract.records import Failure, NodeRecord, ProcessId, RankRecord
from . import allowance


class AgentLog:
    """``logs/agent-NODE.log``: a line a happening, with the time. A full disk does not stop the agent."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __call__(self, message: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
        text = message.replace("\n", "\\n")
        with contextlib.suppress(OSError):
            os.write(self._handle, f"{stamp} {text}\n".encode("utf-8", "surrogateescape"))

    def close(self) -> None:
        os.close(self._handle)


class Ready:
    """Tells the ``start`` verb, over a pipe that the agent inherited, how the first seconds went."""

    def __init__(self, handle: Optional[int]) -> None:
        self._handle = handle
        if handle is not None:
            os.set_inheritable(handle, False)

    def say(self, last: bool = False, **words: Any) -> None:
        """One JSON line; nothing is said after the ``last``."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.write(self._handle, json.dumps(words).encode("ascii") + b"\n")
            if last:
                os.close(self._handle)
                self._handle = None


_RESERVE_BYTES = 64 * 1024


class Keeper:
    """Writes ``nodes/NODE.json`` whole at every change, and as a sign of life in between.

    Ranks may fill the disk, and how they ended must still be told: a few blocks are set aside for that.
    """

    def __init__(self, folder: AttemptFolder, node: str, node_rank: int, agent: ProcessId, log: AgentLog) -> None:
        self._path = Path(folder.node_record(node))
        self._node, self._node_rank, self._agent, self._log = node, node_rank, agent, log
        self._started_at = time.time()
        self._troubled = False
        self._reserve = self._path.with_name(f".{node}.reserve")
        self._set_aside()
        self.state = "starting"
        self.host = ""
        self.python = ""
        self.job_id: Optional[str] = None
        self.restart_count = 0
        self.failure: Optional[Failure] = None
        self.ended_at: Optional[float] = None
        self.notes: List[str] = []
        self.allowed = allowance.here()
        self.stop_sent_at: Optional[float] = None
        self.leased: Optional[Tuple[int, ...]] = None
        self.kept_by = ""

    def write(self, ranks: Tuple[RankRecord, ...]) -> None:
        record = NodeRecord(
            node=self._node,
            node_rank=self._node_rank,
            agent=self._agent,
            state=self.state,
            started_at=self._started_at,
            beat_at=time.time(),
            host=self.host,
            python=self.python,
            ranks=ranks,
            failure=self.failure,
            ended_at=self.ended_at,
            job_id=self.job_id,
            restart_count=self.restart_count,
            notes=tuple(self.notes),
            cores=self.allowed.cores,
            cpus=self.allowed.cpus,
            memory_bytes=self.allowed.memory_bytes,
            memory_by=self.allowed.memory_by,
            stop_sent_at=self.stop_sent_at,
            leased=self.leased,
            kept_by=self.kept_by,
        )
        if self.state == "ended":
            self._spend()
        try:
            write_atomically(self._path, dumps(record))
            self._troubled = False
        except OSError as problem:
            if not self._troubled:
                self._log(f"the record could not be written: {problem}")
            self._troubled = True

    def _set_aside(self) -> None:
        with contextlib.suppress(OSError):
            handle = os.open(str(self._reserve), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(handle, 0, _RESERVE_BYTES)
            finally:
                os.close(handle)

    def _spend(self) -> None:
        with contextlib.suppress(OSError):
            self._reserve.unlink()


def own_files(folder: AttemptFolder) -> None:
    for path in (folder.nodes, folder.logs, folder.metrics):
        Path(path).mkdir(parents=True, exist_ok=True)


def leave_place(folder: AttemptFolder, node: str) -> None:
    """What :func:`take_place` took: nothing was begun, so another agent may come."""
    with contextlib.suppress(OSError):
        (Path(folder.nodes) / f".{node}.agent").unlink()


def take_place(folder: AttemptFolder, node: str, agent: ProcessId) -> Optional[Dict[str, Any]]:
    """Makes this agent the only one of its node and attempt. Returns who was there before, or None."""
    path = Path(folder.nodes) / f".{node}.agent"
    try:
        handle = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        try:
            before = loads(path.read_bytes())
        except (OSError, ValueError):
            before = None
        return before if isinstance(before, dict) else {}
    with os.fdopen(handle, "wb") as file:
        file.write(dumps(agent))
    return None
