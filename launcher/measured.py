"""Planned beside measured: what a run's plan said of a rank, and what its ranks then wrote down.

Measured figures come from the metrics that lie at home (a laptop run's are there; ``collect`` brings the others).
A figure that nobody measured, or that the plan could not say, is None: never filled in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .planning.plan import Plan
from .runs import Run


@dataclass(frozen=True)
class Beside:
    """``what`` in ``unit`` (bytes, or elements), on the rank where it was largest; ``source`` is the plan's."""

    what: str
    planned: int | None
    measured: int | None
    source: str = "arithmetic"

    @property
    def ratio(self) -> float | None:
        """Measured over planned."""
        return self.measured / self.planned if self.planned and self.measured is not None else None


def beside(run: Run, attempt: int, plan: Plan) -> list[Beside]:
    """The lines of ``zerun status --plan``."""
    rows = list(_rows(Path(str(run.paths.attempt(attempt).metrics))))
    stage = next((s for s in plan.state.stages if s.zero_stage == plan.state.chosen), None)
    lines = [
        Beside(
            f"{kind}, bytes a rank",
            getattr(stage, f"{kind}_bytes") if stage else None,
            _largest(row["state_bytes"].get(kind) for row in rows),
        )
        for kind in ("parameters", "gradients", "optimizer")
    ]
    # A tensor group's and that between replicas are told apart in a row; the plan's is all of them.
    sent = _largest(sum(n for name, n in row.items() if name.endswith("sent_bytes")) for row in rows)
    lines.append(Beside("sent, bytes a rank and step", plan.sent_bytes_per_step, sent))
    peak = _largest(row["peak_allocated_bytes"] for row in rows)
    if plan.simulation is not None:
        lines.append(Beside("peak of a step, bytes a rank", plan.simulation.peak_bytes, peak, "simulated"))
    else:
        lines.append(Beside("peak of a step, bytes a rank", _peak(plan), peak, "arithmetic and assumed"))
    return lines


def _peak(plan: Plan) -> int | None:
    """The fullest of the moments that the plan looks at, all of its lines together."""
    if not plan.step:
        return None
    alive = [line.alive for line in plan.step]
    return max(sum(a.loss for a in alive), sum(a.backward for a in alive), sum(a.update for a in alive))


def _largest(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if known else None


def _rows(folder: Path) -> Iterable[Mapping[str, Any]]:
    """Every whole line of every rank's metrics; a last line that was cut never happened."""
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            row = json.loads(line)
            if isinstance(row, dict):
                yield row
