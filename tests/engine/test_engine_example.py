"""The example of a loop of one's own runs, under torchrun's variables alone, saves and resumes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from engine_job import ROOT, wait

SCRIPT = ROOT / "jobs" / "examples" / "own_loop.py"


@contextlib.contextmanager
def _port() -> Iterator[int]:
    """A port that nobody else gets meanwhile: bound and never listened at, which lets rank 0 bind it too."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _run(folder: Path, world: int, **more: str) -> str:
    with _port() as port:
        codes = wait(_start(folder, world, port, more))
    text = (folder / "log-0").read_text()
    assert codes == [0] * world, text
    return text


def _start(folder: Path, world: int, port: int, more: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    processes = []
    for rank in range(world):
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "ZERUN_RUN_DIR": str(folder),
            **more,
        }
        with open(folder / f"log-{rank}", "wb") as log:
            processes.append(
                subprocess.Popen([sys.executable, str(SCRIPT)], env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    return processes


def _torchrun(folder: Path) -> str:
    """As a user starts it who has torch and nothing of ours but the module."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with _port() as port:
        argv += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT)]
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_under_torchrun_saves_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    text = _torchrun(tmp_path)
    losses = [float(line.split()[3]) for line in text.splitlines() if line.startswith("step ")]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert (tmp_path / "checkpoints" / "step-00000050" / "manifest.json").exists()
    assert "step 10" not in _run(tmp_path, 1, ZERUN_RESUME_FROM=str(tmp_path / "checkpoints" / "step-00000050"))
    assert len(SCRIPT.read_text().splitlines()) <= 50
