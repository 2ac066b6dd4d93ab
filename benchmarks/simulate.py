"""How long a simulated step of the paper's models takes, and what it holds.

Each simulation is a process of its own with one thread; ``import torch`` is timed apart and left out. Told are seconds
on the clock, round by round the ratio of a rank of 4,096 to one of 400, and the most memory that any of them held.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field

import measuring
from measuring import PYTHON, ROOT, Options, Report, figure, ratios

sys.path.insert(0, str(ROOT))

from launcher.contract.plain import dumps
from launcher.contract.simulation import SimulationRequest
from launcher.contract.train import GPT, AdamW, Batch, Data, TrainConfig, Zero

ROUNDS = 6
MODELS = {"1.5B": (48, 1600, 25), "100B": (125, 8192, 64), "170B": (212, 8192, 64)}
TARGET_S = {"1.5B": 5.0, "100B": 15.0, "170B": 25.0}
CASES = [
    ("1.5B", 25, 0), ("1.5B", 256, 4095), ("100B", 25, 0), ("100B", 25, 203), ("100B", 25, 399), ("100B", 256, 2048),
    ("170B", 25, 399), ("170B", 256, 0),
]  # fmt: skip
"""Model, nodes of 16, rank."""
SAME = {"1.5B": (0, 1), "100B": (3, 5), "170B": (6, 7)}
"""Which two of them are to take the same time."""
NO_SLOWER = 1.05
MOST_MB = 500.0

PROCESS = """
import json, sys, time
import torch
loaded = time.perf_counter()
from launcher.engine.rehearsal.simulate import main
code = main()
print(json.dumps(time.perf_counter() - loaded), file=sys.stderr)
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


@dataclass
class Runs:
    """Runs simulations, and remembers what they said of themselves."""

    most_bytes: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str, nodes: int, rank: int) -> float:
        request = SimulationRequest(config(name), rank, (16,) * nodes, "gpu")
        done = subprocess.run(
            [PYTHON, "-c", PROCESS],
            input=dumps(request),
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise SystemExit(f"{name}: {answer['error']}")
        self.most_bytes[name] = max(self.most_bytes.get(name, 0), answer["memory_bytes"])
        self.peaks[name] = f"{answer['peak_bytes'] / 1e9:.2f} GB in {answer['peak_phase']}"
        return float(done.stderr.splitlines()[-1])


def measure(options: Options) -> Report:
    runs = Runs()
    names = [f"{name}, rank {rank:,} of {16 * nodes:,}" for name, nodes, rank in CASES]
    samples = measuring.interleave(
        {title: lambda case=case: runs.seconds(*case) for title, case in zip(names, CASES, strict=True)},  # type: ignore[misc]
        options.rounds,
        warm_ups=0,
    )
    figures = [figure(title, "s", samples[title], TARGET_S[case[0]]) for title, case in zip(names, CASES, strict=True)]
    for name, (few, many) in SAME.items():
        over = ratios(samples[names[many]], samples[names[few]])
        figures.append(figure(f"{name}, of 4,096 ranks over of 400", "×", over, NO_SLOWER))
    most = max(runs.most_bytes.values()) / 1e6
    return Report(
        benchmark="simulate",
        command=".venv/bin/python benchmarks/simulate.py",
        machine=measuring.machine(options.load, options.waited),
        figures=figures,
        samples=samples,
        notes=[
            f"at most {most:.0f} MB in a process, {'within' if most <= MOST_MB else '**above**'} {MOST_MB:.0f} MB",
            f"simulated peaks: {', '.join(f'{name} {peak}' for name, peak in runs.peaks.items())}",
        ],
    )


if __name__ == "__main__":
    measuring.command_line(__doc__, "simulate.py", ROUNDS, measure)
