"""The example of a loop of one's own runs, under torchrun's variables alone, saves and resumes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from engine_job import ROOT, wait

SCRIPT = ROOT / "jobs" / "examples" / "own_loop.py"


def _run(folder: Path, world: int, **more: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
    codes = wait(processes)
    text = (folder / "log-0").read_text()
    assert codes == [0] * world, text
    return text


def _torchrun(folder: Path) -> str:
    """As a user starts it who has torch and nothing of ours but the module."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    argv += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(SCRIPT)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_trains_under_torchrun_saves_and_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    text = _torchrun(tmp_path)
    losses = [float(line.split()[3]) for line in text.splitlines() if line.startswith("step ")]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert (tmp_path / "checkpoints" / "step-00000050" / "manifest.json").exists()
    assert "step 10" not in _run(tmp_path, 1, ZERUN_RESUME_FROM=str(tmp_path / "checkpoints" / "step-00000050"))
    assert len(SCRIPT.read_text().splitlines()) <= 50
