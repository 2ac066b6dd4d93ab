"""Every case of the exactness table, run for real and on nothing. As a program: one JSON list of requests on stdin,
their simulations on stdout (``real`` alone: a real run of one rank)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORLDS = (1, 2, 4)
STAGES = (0, 1, 2, 3)
RECOMPUTE = ("none", "block")
PHASES = ("forward", "backward", "update")
UPDATE_TOLERANCE = 65536
"""gloo's worker threads let go of the last message's buffer when they get to it."""


@dataclass(frozen=True)
class Case:
    """One job on ``world`` ranks; ``setting`` is one of ``real_steps.SETTINGS``, or nothing."""

    world: int
    stage: int
    recompute: str
    train: Any
    setting: str = ""


@dataclass(frozen=True)
class Row:
    """One rank of one case: bytes at each phase's peak, and by how much each category differs."""

    world: int
    stage: int
    recompute: str
    rank: int
    simulated: dict[str, int]
    real: dict[str, int]
    differs: dict[str, dict[str, int]]
    sent: tuple[int, int]
    setting: str = ""


def ranks_of(world: int) -> list[int]:
    """The first, and of the largest world the last one too."""
    return [0, world - 1] if world == max(WORLDS) else [0]


def plain_cases(worlds: tuple[int, ...] = WORLDS) -> list[Case]:
    """The first table: fp32, AdamW."""
    from real_steps import config, plain

    return [
        Case(world, stage, recompute, plain(config(stage, recompute=recompute)))
        for world in worlds
        for stage in STAGES
        for recompute in RECOMPUTE
    ]


def cases_of(setting: str, world: int = 4, stages: tuple[int, ...] = STAGES) -> list[Case]:
    """The rows of one setting in the second table."""
    from real_steps import plain
    from real_steps import setting as make

    kinds = ("block",) if "activations" in setting else RECOMPUTE
    return [Case(world, s, r, plain(make(setting, s, r)), setting) for s in stages for r in kinds]


def rows(cases: list[Case]) -> list[Row]:
    """Every case for real, a world of ranks at a time, and on nothing."""
    from engine_ranks import run_ranks
    from real_steps import measure_all

    wanted = [(case, rank) for case in cases for rank in ranks_of(case.world)]
    simulated = run_batch([_request(case, rank) for case, rank in wanted])
    real: dict[int, list[list[dict[str, Any]]]] = {}
    numbers: dict[int, int] = {}
    for world in sorted({case.world for case in cases}):
        same = [case for case in cases if case.world == world]
        plains = [case.train for case in same]
        numbers.update({id(case): number for number, case in enumerate(same)})
        real[world] = (
            [run_batch([{"real": p} for p in plains])]
            if world == 1
            else run_ranks(world, measure_all, plains, timeout_s=800)
        )
    return [
        _row(case, rank, one, real[case.world][rank][numbers[id(case)]])
        for (case, rank), one in zip(wanted, simulated, strict=True)
    ]


def _request(case: Case, rank: int) -> dict[str, Any]:
    return {"train": case.train, "rank": rank, "slots": [case.world], "steps": 2, "points": 10}


def _row(case: Case, rank: int, one: dict[str, Any], real: dict[str, Any]) -> Row:
    peaks = {peak["phase"]: peak for peak in one["peaks"]}
    differs: dict[str, dict[str, int]] = {}
    for phase in PHASES:
        ours, theirs = {h["what"]: h["bytes"] for h in peaks[phase]["holds"]}, real[phase][1]
        parts = {what: ours.get(what, 0) - theirs.get(what, 0) for what in {*ours, *theirs}}
        differs[phase] = {what: n for what, n in parts.items() if n}
    return Row(
        case.world,
        case.stage,
        case.recompute,
        rank,
        {phase: peaks[phase]["bytes"] for phase in PHASES},
        {phase: real[phase][0] for phase in PHASES},
        differs,
        (one["sent_bytes"], real["sent"]),
        case.setting,
    )


def run_batch(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All in one process, which imports torch once."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        input=json.dumps(requests),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "simulate")]
    import torch
    from real_steps import measure

    from launcher.contract.plain import from_plain, to_plain
    from launcher.contract.simulation import SimulationRequest
    from launcher.contract.train import TrainConfig
    from launcher.engine.rehearsal.simulate import simulate

    torch.set_num_threads(1)
    answers = []
    for request in json.load(sys.stdin):
        if "real" in request:
            answers.append(measure(from_plain(TrainConfig, request["real"]), 0, 1))
        else:
            answers.append(to_plain(simulate(from_plain(SimulationRequest, request))))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main()
