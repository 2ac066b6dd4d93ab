"""What the benchmarks share: interleaved rounds, medians with an interval, verdicts, one table and one JSON form.

A figure is the median of its rounds. Its interval holds the true median with at least 95 %, by order statistics
alone, so that it takes nothing for granted about how times are spread. A target inside the interval is neither
met nor missed: the verdict is then "not distinguishable".
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
ZERUN = str(Path(sys.executable).with_name("zerun"))
QUIET_LOAD = 1.5

Verdict = Literal["met", "missed", "not distinguishable", "too few rounds", "not judged: busy", ""]


@dataclass(frozen=True)
class Figure:
    """``low`` … ``high`` is the 95 % interval of the median, None with fewer than six rounds. ``at_most`` is
    the target; without one the figure is told for comparison only."""

    name: str
    unit: str
    median: float
    low: float | None
    high: float | None
    rounds: int
    at_most: float | None = None
    verdict: Verdict = ""


@dataclass(frozen=True)
class Report:
    """``samples`` are the rounds themselves, in the order in which they were taken."""

    benchmark: str
    command: str
    machine: Mapping[str, object]
    figures: Sequence[Figure]
    samples: Mapping[str, Sequence[float]]
    notes: Sequence[str] = field(default_factory=tuple)


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int, warm_ups: int = 1) -> dict[str, list[float]]:
    """Seconds of every side, round by round; every other round goes backwards, so that none is always the first.

    ``warm_ups`` rounds come before and are thrown away.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_ups, rounds):
        for name in sides if number % 2 else reversed(list(sides)):
            seconds = sides[name]()
            if number >= 0:
                taken[name].append(seconds)
        told = ", ".join(f"{name} {values[-1]:.3f}" for name, values in taken.items() if values)
        sys.stderr.write(f"round {number + 1} of {rounds}: {told or 'warm-up'}\n")
    return taken


def figure(name: str, unit: str, values: Sequence[float], at_most: float | None = None) -> Figure:
    """The median of ``values``, its interval, and what that says of the target."""
    interval = median_interval(values)
    low, high = interval if interval else (None, None)
    return Figure(name, unit, statistics.median(values), low, high, len(values), at_most, judge(interval, at_most))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Between which order statistics the median lies with at least 95 % (the sign test); None below six values."""
    ordered, count = sorted(values), len(values)
    outside, taken = 0.0, 0
    while taken < count // 2:
        outside += 2 * math.comb(count, taken) / 2**count
        if outside > 0.05:
            break
        taken += 1
    return (ordered[taken - 1], ordered[count - taken]) if taken else None


def judge(interval: tuple[float, float] | None, at_most: float | None) -> Verdict:
    if at_most is None:
        return ""
    if interval is None:
        return "too few rounds"
    low, high = interval
    if high <= at_most:
        return "met"
    return "missed" if low > at_most else "not distinguishable"


def without_unfair_misses(report: Report) -> Report:
    """On a busy machine a time above its target says nothing (below it, it does); ratios stand."""
    if not report.machine["busy"]:
        return report
    unfair = {f.name for f in report.figures if f.unit == "s" and f.verdict in ("missed", "not distinguishable")}
    judged = [replace(f, verdict="not judged: busy") if f.name in unfair else f for f in report.figures]
    return replace(report, figures=judged)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round, so that a machine that was slow for a while was slow for both."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def timed(
    argv: Sequence[str], *, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> tuple[float, subprocess.CompletedProcess[bytes]]:
    """Seconds from before the process starts until it is gone, and what it said. Raises SystemExit if it fails."""
    variables = {**os.environ, **(environment or {})}
    began = time.perf_counter()
    done = subprocess.run(
        list(argv), cwd=cwd, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise SystemExit(f"{' '.join(argv)} exited {done.returncode}:\n{said[-3000:]}")
    return seconds, done


def machine(load_before: float, waited: bool) -> dict[str, object]:
    """On what the figures were taken. ``busy``: others worked on it when they began."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "load_before": round(load_before, 2),
        "busy": load_before >= QUIET_LOAD,
        "waited_for_quiet": waited,
        "day": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def wait_for_quiet(limit_s: float) -> float:
    """Waits until the load of the last minute is below ``QUIET_LOAD``, at most ``limit_s``; returns the load."""
    end = time.monotonic() + limit_s
    while (load := os.getloadavg()[0]) >= QUIET_LOAD and time.monotonic() < end:
        time.sleep(5)
    return load


# --- telling ------------------------------------------------------------------------------------------


def number(value: float, unit: str) -> str:
    if unit == "×":
        return f"{value:.2f}×"
    return f"{value * 1000:.0f} ms" if unit == "s" and value < 1 else f"{value:.2f} {unit}"


def cells(shown: Figure) -> tuple[str, str, str, str, str]:
    """What a row of a table says: name, median, interval, target, verdict."""
    between = ""
    if shown.low is not None and shown.high is not None:
        between = f"{number(shown.low, shown.unit)} … {number(shown.high, shown.unit)}"
    target = "" if shown.at_most is None else f"≤ {number(shown.at_most, shown.unit)}"
    return shown.name, number(shown.median, shown.unit), between, target, shown.verdict


def conditions(report: Report) -> str:
    about = report.machine
    rounds = max((f.rounds for f in report.figures), default=0)
    busy = ", **a busy machine**" if about["busy"] else ""
    return (
        f"{rounds} rounds, {about['day']}, {about['cores']} cores {about['processor']}, {about['system']}, "
        f"Python {about['python']}, load {about['load_before']} before{busy}"
    )


def table(report: Report) -> str:
    heads = ("", "median", "95 % interval", "to reach", "")
    rows = [heads, *(cells(f) for f in report.figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"  {note}" for note in report.notes), conditions(report).replace("**", "")])


def tell(report: Report, as_json: bool) -> None:
    """Prints a report. The exit status says that it ran, never how fast it was."""
    print(json.dumps(asdict(report), indent=2, ensure_ascii=False) if as_json else table(report))


# --- the command line -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    rounds: int
    load: float
    waited: bool


def command_line(about: str | None, benchmark: str, rounds: int, measure: Callable[[Options], Report]) -> None:
    """``--rounds N --quiet SECONDS --json``, then measures and tells."""
    parser = argparse.ArgumentParser(prog=benchmark, description=about)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}; below 6 there is no interval")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="wait so long for a quiet machine")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of a table")
    given = parser.parse_args()
    report = measure(Options(given.rounds, wait_for_quiet(given.quiet), given.quiet > 0))
    tell(without_unfair_misses(report), given.json)
