"""Every shipped job on every shipped cluster: planned and rendered, or refused with the named reason.

``matrix.txt`` says what is expected, one line each; ``ZERUN_UPDATE_GOLDEN=1`` writes it anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from render_cases import ROOT, load, script

from launcher.contract.errors import UsageError
from launcher.planning import CannotPlan, check_engine, make_plan

MATRIX = Path(__file__).with_name("matrix.txt")
# What no shipped job asks for, and some cluster must refuse.
VARIANTS = {
    "quickstart precision=bf16": ("quickstart", ["precision=bf16", "batch.micro=2"]),
    "quickstart nodes=4": ("quickstart", ["nodes=4", "batch.micro=1", "batch.global=64"]),
    "quickstart slots_per_node=8": ("quickstart", ["slots_per_node=8", "batch.micro=1"]),
    "quickstart time=3-00:00:00": ("quickstart", ["time=3-00:00:00", "batch.micro=2"]),
}
HEADER = "# job [changes] on cluster: planned and rendered, or the names of the reasons why not\n"


def outcome(job_name: str, cluster_name: str, sets: list[str]) -> str:
    job, cluster = load(job_name, cluster_name, sets)
    try:
        plan = make_plan(job, cluster)
    except CannotPlan as refused:
        return "refused: " + " ".join(reason.name for reason in refused.reasons)
    assert script(job, cluster).startswith(b"#!")
    try:
        check_engine(plan)
    except UsageError as refused:
        return "planned, not submitted: " + refused.message.partition(": ")[2].partition(":")[0]
    return "planned"


def test_every_job_on_every_cluster() -> None:
    jobs = {path.stem: (path.stem, list[str]()) for path in sorted((ROOT / "jobs").glob("*.yaml"))}
    clusters = ["dgx2-25", "laptop", "slurm-pools", "slurm-site", "ssh-lab"]  # beside them lie one's own
    assert len(jobs) >= 6
    lines = [
        f"{name} on {cluster}: {outcome(job, cluster, sets)}\n"
        for name, (job, sets) in (jobs | VARIANTS).items()
        for cluster in clusters
    ]
    if os.environ.get("ZERUN_UPDATE_GOLDEN"):
        MATRIX.write_text(HEADER + "".join(lines), encoding="utf-8")
    assert HEADER + "".join(lines) == MATRIX.read_text(encoding="utf-8")
