"""The shipped jobs on the shipped clusters, with names and paths that stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.contract.launch import LaunchSpec
from launcher.planning import Begun, launch_spec, make_plan
from launcher.planning.plan import Plan
from launcher.render import render
from launcher.specs import in_pool
from launcher.specs.load import load_cluster, load_job
from launcher.specs.models import Cluster, Job

ROOT = Path(__file__).resolve().parents[2]
# The laptop's Python is the one that runs zerun: another one on every machine.
_FIXED = {"laptop": ["python=python3", "agent_python=python3"]}


def load(job: str, cluster: str, sets: Sequence[str] = ()) -> tuple[Job, Cluster]:
    loaded = load_job(ROOT / "jobs" / f"{job}.yaml", sets)
    return loaded, in_pool(load_cluster(ROOT / "clusters" / f"{cluster}.yaml", _FIXED.get(cluster, [])), loaded.pool)


def launched(
    job: Job, cluster: Cluster, *, run_dir: str, run: str = "run-1", attempt: int = 1
) -> tuple[Plan, LaunchSpec]:
    plan = make_plan(job, cluster)
    runtime = f"{run_dir.rpartition('/')[0]}/.blobs/0123abcd.zip"
    return plan, launch_spec(plan, job, cluster, Begun(run, attempt, run_dir, runtime, None, "TOKEN"))


def script(job: Job, cluster: Cluster, *, run_dir: str = "/runs/run-1", **options: Path) -> bytes:
    plan, launch = launched(job, cluster, run_dir=run_dir)
    return render(plan, cluster, launch, **options)
