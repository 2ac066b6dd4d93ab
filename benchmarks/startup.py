"""How long ``zerun --help`` takes beyond a Python that does nothing (``python -c pass``)."""

from __future__ import annotations

import measuring
from measuring import PYTHON, ZERUN, Options, Report, figure, timed

ROUNDS = 40
AT_MOST_S = 0.150


def measure(options: Options) -> Report:
    sides = {
        "zerun --help": lambda: timed([ZERUN, "--help"])[0],
        "python -c pass": lambda: timed([PYTHON, "-c", "pass"])[0],
    }
    samples = measuring.interleave(sides, options.rounds, warm_ups=2)
    ours, bare = samples["zerun --help"], samples["python -c pass"]
    beyond = [a - b for a, b in zip(ours, bare, strict=True)]
    return Report(
        benchmark="startup",
        command=".venv/bin/python benchmarks/startup.py",
        machine=measuring.machine(options.load, options.waited),
        figures=[
            figure("`zerun --help` beyond `python -c pass`", "s", beyond, AT_MOST_S),
            figure("`zerun --help`", "s", ours),
            figure("`python -c pass`", "s", bare),
        ],
        samples=samples,
    )


if __name__ == "__main__":
    measuring.command_line(__doc__, "startup.py", ROUNDS, measure)
