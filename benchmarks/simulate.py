"""How long simulations of the paper's models take: ``python benchmarks/simulate.py [--all]``.

Each line is a process of its own with one thread; ``import torch`` is timed apart, and taken off. What is told: CPU
seconds and seconds on the clock, the most memory that the process held, and the simulated peak.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from launcher.contract.plain import dumps  # noqa: E402
from launcher.contract.simulation import SimulationRequest  # noqa: E402
from launcher.contract.train import GPT, AdamW, Batch, Data, TrainConfig, Zero  # noqa: E402

MODELS = {"1.5B": (48, 1600, 25), "100B": (125, 8192, 64), "170B": (212, 8192, 64)}
TARGET_S = {"1.5B": 5.0, "100B": 15.0, "170B": 25.0}
QUICK = [("1.5B", 25, 0), ("100B", 25, 0), ("100B", 25, 203), ("100B", 25, 399), ("100B", 256, 2048), ("170B", 25, 399)]
MORE = [("1.5B", 25, 203), ("1.5B", 256, 4095), ("170B", 25, 0), ("170B", 25, 203), ("170B", 256, 0)]

PROCESS = """
import json, sys, time
began = time.perf_counter(), time.process_time()
import torch
loaded = time.perf_counter(), time.process_time()
from launcher.engine.simulate import main
code = main()
ended = time.perf_counter(), time.process_time()
print(json.dumps({"import_s": loaded[0] - began[0], "wall_s": ended[0] - loaded[0], "cpu_s": ended[1] - loaded[1]}),
      file=sys.stderr)
raise SystemExit(code)
"""


def config(name: str) -> TrainConfig:
    layers, hidden, heads = MODELS[name]
    return TrainConfig(
        zero=Zero(3),
        optimizer=AdamW(1.5e-4, clip=1.0),
        batch=Batch(micro=8, accumulation=1),
        steps=10,
        data=Data(tokens="train.bin"),
        gpt=GPT(layers, hidden, heads, 1024, 51200),
        precision="bf16",
        recompute="block",
    )


def measure(name: str, nodes: int, rank: int) -> dict[str, Any]:
    request = replace(SimulationRequest(config(name), rank, (16,) * nodes, "gpu"))
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        input=dumps(request),
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise SystemExit(f"{name}: {answer['error']}")
    told = {"most": answer["memory_bytes"], "peak": answer["peak_bytes"], "phase": answer["peak_phase"]}
    return {**json.loads(done.stderr.splitlines()[-1]), **told}


def main() -> None:
    cases = QUICK + (MORE if "--all" in sys.argv[1:] else [])
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {time.strftime('%H:%M:%S')}")
    print(f"{'model':6} {'ranks':>6} {'rank':>5} {'wall s':>7} {'cpu s':>6} {'target':>7} {'RSS MB':>7}  peak")
    for name, nodes, rank in cases:
        found = measure(name, nodes, rank)
        print(
            f"{name:6} {16 * nodes:6} {rank:5} {found['wall_s']:7.1f} {found['cpu_s']:6.1f} {TARGET_S[name]:7.0f} "
            f"{found['most'] / 1e6:7.0f}  {found['peak'] / 1e9:.2f} GB in {found['phase']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
