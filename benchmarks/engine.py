"""A training step of the ZeRO engine beside DDP, FSDP2, DeepSpeed and no communication at all.

``engine.py --world 2 --parameters 11M --json`` prints one JSON object a policy and line, and the verdicts on stderr.
All policies stand ready at once and step in turn, every other turn backwards; a ratio is taken turn by turn. Intervals
are bootstrap ones (95 % of 4000 resampled medians). Memory comes from separate, untimed runs with one instrument.
What stands in ``policies.py`` says how each is set up, ``company.py`` how it is run and weighed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import company
import measuring
import policies
from company import Company, Memory
from measuring import Figure, Report, judge, ratios

PAIRS = 40
WARM_UPS = 2
FEWEST = 6  # turns; below that there is no interval
RESAMPLES = 4000
BYTES_A_PARAMETER = 18  # of a usual policy, with what a step needs: only to refuse what cannot fit


@dataclass(frozen=True)
class Row:
    """One policy. Bytes and elements of the rank that has most, elements a step; ``low`` … ``high`` hold 95 %."""

    policy: str
    world: int
    parameters: int
    median_s: float
    low_s: float | None
    high_s: float | None
    ratio_to_ddp: float
    ratio_low: float | None
    ratio_high: float | None
    peak_storage_bytes: int
    peak_resident_bytes: int
    volume_elements: int
    loss: float


class Target(NamedTuple):
    """``policy`` is to take at most this share of the time of the fastest of ``others``; None: told, not judged."""

    policy: str
    others: tuple[str, ...]
    at_most: float | None


@dataclass(frozen=True)
class Measured:
    """``samples``: seconds a step of every turn, by policy."""

    rows: Sequence[Row]
    samples: Mapping[str, Sequence[float]]
    left_out: Mapping[str, str]


def targets(world: int) -> list[Target]:
    beside_ddp = 1.00 if world <= 2 else 1.05

    def deepspeed(stage: int) -> tuple[str, ...]:
        return f"deepspeed{stage}-default", f"deepspeed{stage}-set"

    return [
        Target("zero0", ("ddp",), 1.10),
        Target("zero0-native", ("ddp",), 1.03),
        Target("zero1", ("ddp",), beside_ddp),
        Target("zero2", ("ddp",), beside_ddp),
        Target("zero1", ("fsdp2-kept",), 0.75),
        Target("zero2", ("fsdp2-kept",), 0.75),
        Target("zero3", ("fsdp2",), 0.70),
        Target("zero3", ("fsdp2",), 0.75),
        Target("zero1", deepspeed(1), 0.60),
        Target("zero2", deepspeed(2), 0.60),
        Target("zero3", deepspeed(3), 0.55),
        # One thing at a time: the way that bytes take, late parameters, and the allocator's setting.
        Target("zero0-send", ("ddp",), None),
        Target("zero1-send", ("ddp",), None),
        Target("zero2-send", ("ddp",), None),
        Target("zero3-send", ("fsdp2",), None),
        Target("zero1", ("zero1-waits",), None),
        Target("zero2", ("zero2-waits",), None),
        Target("zero3-trims", ("fsdp2",), None),
        Target("zero3", ("fsdp2-heap",), None),
    ]


# --- measuring -------------------------------------------------------------------------------------------


def bootstrap(values: Sequence[float]) -> tuple[float, float] | None:
    """Between which values 95 % of the medians of resampled ``values`` lie; None below ``FEWEST``."""
    if len(values) < FEWEST:
        return None
    chance = random.Random(1)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[RESAMPLES * 25 // 1000], medians[RESAMPLES * 975 // 1000 - 1]


def take_turns(
    standing: Mapping[str, Company], pairs: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds a step of every policy, turn by turn, and its last loss; all have taken equally many steps."""
    taken: dict[str, list[float]] = {name: [] for name in standing}
    losses: dict[str, float] = {}
    for turn in range(-WARM_UPS, pairs):
        for name in standing if turn % 2 else reversed(list(standing)):
            stepped = standing[name].steps(steps)
            losses[name] = stepped.loss
            if turn >= 0:
                taken[name].append(stepped.seconds)
        if turn >= 0:
            sys.stderr.write(f"turn {turn + 1} of {pairs}\n")
    return taken, losses


def measure(names: Sequence[str], world: int, size: str, pairs: int, steps: int) -> Measured:
    """Every policy of ``names`` that can be run here, timed together, then weighed one by one."""
    left_out = {name: why for name in names if (why := policies.missing(name)) is not None}
    names = [name for name in names if name not in left_out]
    parameters = sum(p.numel() for p in policies.make_model(size).parameters())
    _refuse_too_many(len(names) * world * parameters * BYTES_A_PARAMETER, size)
    with company.standing(names, world, size) as standing:
        samples, losses = take_turns(standing, pairs, steps)
    rows = []
    for name in names:
        sys.stderr.write(f"weighing {name}\n")
        memory = company.weigh(name, world, size)
        rows.append(_row(name, world, parameters, samples, losses[name], memory))
    return Measured(rows, samples, left_out)


def _refuse_too_many(need: int, size: str) -> None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    have = int(found[1]) * 1024 if found else need
    if need > have and size != "tiny":
        raise SystemExit(
            f"all these policies at once may take {need / 1e9:.0f} GB and {have / 1e9:.0f} GB are free: "
            "name fewer with --policies (ddp is always among them)"
        )


def _row(
    name: str, world: int, parameters: int, samples: Mapping[str, Sequence[float]], loss: float, memory: Memory
) -> Row:
    beside = ratios(samples[name], samples["ddp"])
    low_s, high_s = bootstrap(samples[name]) or (None, None)
    ratio_low, ratio_high = bootstrap(beside) or (None, None)
    return Row(
        policy=name,
        world=world,
        parameters=parameters,
        median_s=statistics.median(samples[name]),
        low_s=low_s,
        high_s=high_s,
        ratio_to_ddp=statistics.median(beside),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        loss=loss,
        **asdict(memory),
    )


# --- judging ---------------------------------------------------------------------------------------------


def verdicts(measured: Measured, world: int) -> list[Figure]:
    """A figure a target: of time where both sides ran, and of memory at stage 3 beside FSDP2."""
    rows = {row.policy: row for row in measured.rows}
    found = []
    for target in targets(world):
        others = [name for name in target.others if name in rows]
        if target.policy not in rows or not others:
            continue
        fastest = min(others, key=lambda name: rows[name].median_s)
        beside = ratios(measured.samples[target.policy], measured.samples[fastest])
        interval = bootstrap(beside)
        low, high = interval or (None, None)
        found.append(
            Figure(
                f"{target.policy}, over {fastest}",
                "×",
                statistics.median(beside),
                low,
                high,
                len(beside),
                target.at_most,
                judge(interval, target.at_most),
            )
        )
    if "zero3" in rows and "fsdp2" in rows:
        ours, theirs = rows["zero3"], rows["fsdp2"]
        for what, a, b in (
            ("peak storages", ours.peak_storage_bytes, theirs.peak_storage_bytes),
            ("peak resident", ours.peak_resident_bytes, theirs.peak_resident_bytes),
        ):
            share = a / max(1, b)
            verdict = judge((share, share), 1.0)
            found.append(Figure(f"zero3, {what}, over fsdp2", "×", share, None, None, 1, 1.0, verdict))
    return found


def table(rows: Sequence[Row]) -> str:
    heads = ("policy", "ms a step", "95 % interval", "over ddp", "95 % interval", "storages", "resident", "Ψ", "loss")
    lines = [heads]
    for row in rows:
        spread = "" if row.low_s is None or row.high_s is None else f"{row.low_s * 1e3:.0f} … {row.high_s * 1e3:.0f}"
        beside = (
            "" if row.ratio_low is None or row.ratio_high is None else f"{row.ratio_low:.2f} … {row.ratio_high:.2f}"
        )
        lines.append(
            (
                row.policy, f"{row.median_s * 1e3:.0f}", spread, f"{row.ratio_to_ddp:.2f}×", beside,
                f"{row.peak_storage_bytes / 1e6:.1f} MB", f"{row.peak_resident_bytes / 1e6:.1f} MB",
                f"{row.volume_elements / row.parameters:.3f}", f"{row.loss:.6f}",
            )
        )  # fmt: skip
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def told(figures: Sequence[Figure], left_out: Mapping[str, str]) -> str:
    """A line a target, then what was not run and why."""
    lines = []
    for name, median, between, target, verdict in map(measuring.cells, figures):
        lines.append(f"{name}: {median}{f' ({between})' if between else ''}, {target}: {verdict}")
    return "\n".join([*lines, *(f"not run: {name}: {why}" for name, why in left_out.items())])


def report(measured: Measured, world: int, size: str, load: float, waited: bool) -> Report:
    """For docs/performance.md: the targets, then every policy's step and memory."""
    figures = verdicts(measured, world)
    for row in measured.rows:
        rounds = len(measured.samples[row.policy])
        figures.append(Figure(f"`{row.policy}`, a step", "s", row.median_s, row.low_s, row.high_s, rounds))
    for row in measured.rows:
        figures += [
            Figure(f"`{row.policy}`, peak storages", "MB", row.peak_storage_bytes / 1e6, None, None, 1),
            Figure(f"`{row.policy}`, peak resident", "MB", row.peak_resident_bytes / 1e6, None, None, 1),
        ]
    volumes = ", ".join(f"{r.policy} {r.volume_elements / r.parameters:.2f} Ψ" for r in measured.rows)
    notes = [f"{world} ranks, {measured.rows[0].parameters:,} parameters", f"volume a step: {volumes}"]
    notes += [f"not run: {name} ({why})" for name, why in measured.left_out.items()]
    return Report(
        benchmark=f"engine_{world}_{size}"
        + ("_deepspeed" if any("deepspeed" in row.policy for row in measured.rows) else ""),
        command=" ".join([".venv/bin/python benchmarks/engine.py", *(a for a in sys.argv[1:] if a != "--report")]),
        machine=measuring.machine(load, waited),
        figures=figures,
        samples=measured.samples,
        notes=notes,
    )


# --- the command line --------------------------------------------------------------------------------------


def chosen(text: str | None) -> list[str]:
    """The policies named, in the order of ``POLICIES``; DDP, which all are held against, always."""
    names = set(text.split(",")) | {"ddp"} if text else set(policies.POLICIES)
    unknown = names - set(policies.POLICIES)
    if unknown:
        raise SystemExit(f"no policy {', '.join(sorted(unknown))}; there are {', '.join(policies.POLICIES)}")
    return [name for name in policies.POLICIES if name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine.py", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each (default 2)")
    parser.add_argument("--parameters", choices=policies.SIZES, default="11M", help="size of the model (default 11M)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"turns (default {PAIRS}); below {FEWEST} no interval")
    parser.add_argument("--steps", type=int, default=4, help="steps that a policy takes in its turn (default 4)")
    parser.add_argument("--policies", metavar="NAME,…", help=f"default all: {','.join(policies.POLICIES)}")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="wait so long for a quiet machine")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON object a policy and line; verdicts on stderr")
    how.add_argument("--report", action="store_true", help="one JSON value with samples, for page.py")
    given = parser.parse_args()
    if min(given.world, given.pairs, given.steps) < 1:
        raise SystemExit("--world, --pairs and --steps are at least 1")
    names = chosen(given.policies)
    load = measuring.wait_for_quiet(given.quiet)
    measured = measure(names, given.world, given.parameters, given.pairs, given.steps)
    lines = told(verdicts(measured, given.world), measured.left_out)
    if given.report:
        about = report(measured, given.world, given.parameters, load, given.quiet > 0)
        print(json.dumps(asdict(about), indent=2, ensure_ascii=False))
    elif given.json:
        print("\n".join(json.dumps(asdict(row)) for row in measured.rows))
        sys.stderr.write(lines + "\n")
    else:
        print(f"{table(measured.rows)}\n\n{lines}")


if __name__ == "__main__":
    main()
