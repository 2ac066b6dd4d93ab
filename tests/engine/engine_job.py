"""Starts an attempt's ranks as an agent does: real processes of ``launcher.engine.job.main``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.contract.launch import LaunchSpec, Node
from launcher.contract.manifest import Manifest
from launcher.contract.plain import dumps, from_plain
from launcher.contract.records import Outcome
from launcher.contract.train import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
RANK = "import sys; from launcher.engine.job.main import main; sys.exit(main(sys.argv[1:]))"


class Job:
    """One run folder (or one a node, where nothing is shared), and attempts in it."""

    def __init__(self, *folders: Path, slots: int = 2) -> None:
        self.folders = folders
        self.slots = slots

    @property
    def world(self) -> int:
        return len(self.folders) * self.slots

    def start(
        self, train: TrainConfig, attempt: int = 1, *, resume: int | None = None, env: dict[str, str] | None = None
    ) -> list[subprocess.Popen[bytes]]:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        listening.set_inheritable(True)
        processes = []
        for number, folder in enumerate(self.folders):
            place = folder / "attempts" / str(attempt)
            place.mkdir(parents=True)
            spec = LaunchSpec(
                run="run",
                attempt=attempt,
                run_dir=str(folder),
                runtime="",
                nodes=tuple(Node(f"n{i}", self.slots) for i in range(len(self.folders))),
                shared=len(self.folders) == 1,
                token="t",
                python=sys.executable,
                agent_python=sys.executable,
                train=train,
                resume_step=resume,
            )
            (place / "launch.json").write_bytes(dumps(spec))
            for local_rank in range(self.slots):
                rank = number * self.slots + local_rank
                variables = {
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(ROOT),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local_rank),
                    "WORLD_SIZE": str(self.world),
                    "LOCAL_WORLD_SIZE": str(self.slots),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(listening.getsockname()[1]),
                    "ZERUN_NODE": f"n{number}",
                    "OMP_NUM_THREADS": "1",
                    **(env or {}),
                }
                if rank == 0:
                    variables["ZERUN_LISTEN_FD"] = str(listening.fileno())
                with open(place / f"log-{rank}", "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-c", RANK, "--run-dir", str(folder), "--attempt", str(attempt)],
                            env=variables,
                            cwd=folder,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            pass_fds=[listening.fileno()] if rank == 0 else [],
                        )
                    )
        listening.close()
        return processes

    def run(self, train: TrainConfig, attempt: int = 1, **more: Any) -> list[int]:
        """Exit codes in rank order."""
        return wait(self.start(train, attempt, **more))

    def _folder_of(self, rank: int) -> Path:
        return self.folders[rank // self.slots]

    def log(self, rank: int, attempt: int = 1) -> str:
        return (self._folder_of(rank) / "attempts" / str(attempt) / f"log-{rank}").read_text()

    def metrics(self, rank: int, attempt: int = 1) -> list[dict[str, Any]]:
        path = self._folder_of(rank) / "attempts" / str(attempt) / "metrics" / f"rank-{rank:05d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def outcome(self, attempt: int = 1) -> Outcome:
        path = self.folders[0] / "attempts" / str(attempt) / "outcome.json"
        return from_plain(Outcome, json.loads(path.read_text()))

    def manifest(self, step: int, folder: int = 0) -> Manifest:
        return Manifest.from_bytes(
            (self.folders[folder] / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_bytes()
        )


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 240.0) -> list[int]:
    try:
        return [p.wait(timeout_s) for p in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
