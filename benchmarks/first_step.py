"""How long it takes from the moment the last rank has torch imported to its first step, on two ranks here.

The job is jobs/quickstart.yaml with few steps, submitted as a user would, on the laptop cluster. The moments are
read from what the run itself keeps: its ranks run with Python's own import times on (``PYTHONPROFILEIMPORTTIME``),
so each log has a line where ``import torch`` ended, and the agent noted when each line arrived (to 20 ms). The first
step is done when rank 0 says ``step 1``, and began ``step_time_s`` before that. Ranks end a step together.
"""

from __future__ import annotations

import bisect
import json
import re
import shutil
import sys
from pathlib import Path

import measuring
import sites
from measuring import ROOT, ZERUN, Options, Report, figure, timed

ROUNDS = 8
AT_MOST_S = 1.0
SETS = ("steps=22", "evaluate.tokens=2048", "optimizer.warmup=2", "env.PYTHONPROFILEIMPORTTIME=1")
TORCH = re.compile(rb"^import time: .*\| +torch$", re.MULTILINE)
FIRST = re.compile(rb"^step 1/", re.MULTILINE)


def arrival(log: Path, line: re.Pattern[bytes]) -> float:
    """When the line's first byte arrived at the agent, seconds since the epoch."""
    found = line.search(log.read_bytes())
    if found is None:
        raise SystemExit(f"{log} has no line {line.pattern.decode()!r}")
    noted = [row.split() for row in log.with_suffix(".times").read_text().splitlines()]
    at = bisect.bisect_right([int(offset) for offset, _ in noted], found.start()) - 1
    return float(noted[at][1])


def measure(options: Options) -> Report:
    begun: list[float] = []
    ended: list[float] = []
    imported: list[float] = []
    with sites.folder() as (root, environment):
        for name in ("jobs/quickstart.yaml", "clusters/laptop.yaml"):
            shutil.copy(ROOT / name, root / name)
        for number in range(options.rounds + 1):
            argv = [ZERUN, "submit", "--follow", *(word for assignment in SETS for word in ("--set", assignment))]
            argv += ["jobs/quickstart.yaml", "--cluster", "laptop"]
            _, done = timed(argv, cwd=root, environment=environment)
            attempt = root / "runs" / done.stdout.decode().split()[0] / "attempts" / "1"
            logs = sorted(attempt.glob("logs/rank-*.log"))
            torch_at = [arrival(log, TORCH) for log in logs]
            started = [float(log.with_suffix(".times").read_text().split()[1]) for log in logs]
            row = json.loads((attempt / "metrics" / "rank-00000.jsonl").read_text().splitlines()[0])
            step_ended = arrival(logs[0], FIRST)
            if number:  # the first run is a warm-up
                ended.append(step_ended - max(torch_at))
                begun.append(ended[-1] - row["step_time_s"])
                imported.append(max(at - start for at, start in zip(torch_at, started, strict=True)))
                told = f"begun after {begun[-1]:.3f}, done after {ended[-1]:.3f}"
                sys.stderr.write(f"round {number} of {options.rounds}: {told}\n")
    return Report(
        benchmark="first_step",
        command=".venv/bin/python benchmarks/first_step.py",
        machine=measuring.machine(options.load, options.waited),
        figures=[
            figure("last rank's `import torch` to the first step done", "s", ended, AT_MOST_S),
            figure("… to the first step begun", "s", begun),
            figure("the slower rank's start to torch imported", "s", imported),
        ],
        samples={"done": ended, "begun": begun, "torch imported": imported},
        notes=(f"2 ranks of jobs/quickstart.yaml with {', '.join(SETS)}; the step itself is the model's own work",),
    )


if __name__ == "__main__":
    measuring.command_line(__doc__, "first_step.py", ROUNDS, measure)
