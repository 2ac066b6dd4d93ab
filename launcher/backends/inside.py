"""An attempt inside an allocation that was there before it: a step among others of one Slurm job.

The job is not the attempt's: it goes on when the attempt has ended, and a cancel must end the step alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract.errors import Unreachable, UsageError
from ..transports.protocol import Transport
from .outside import ask, queue
from .protocol import Handle, Poll

if TYPE_CHECKING:
    from ..specs.models import Cluster

_GONE_S = 60.0


@dataclass(frozen=True)
class Allocation:
    """What ``salloc`` (or an interactive ``srun``) says of itself in its shell."""

    job: str
    nodes: int
    environment: Mapping[str, str]


def allocation(environment: Mapping[str, str], kept: Mapping[str, str]) -> Allocation:
    """``kept`` is what a login would find beside it. Raises UsageError outside of an allocation."""
    job, nodes = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NUM_NODES", "")
    if not job.isdigit() or not nodes.isdigit():
        raise UsageError(
            "--here runs a job inside an allocation, and this shell is in none: SLURM_JOB_ID is not set",
            hint="salloc --nodes=N … first, or leave --here away: then the job is queued",
        )
    slurm = {name: value for name, value in environment.items() if name.startswith("SLURM")}
    return Allocation(job, int(nodes), {**kept, **slurm})


def job_here(cluster: Cluster, num_nodes: int, environment: Mapping[str, str]) -> str:
    """The id of this shell's allocation. Raises UsageError where there is none, or not one that holds the job."""
    if cluster.backend != "slurm" or cluster.login is not None:
        raise UsageError(
            f"--here: cluster {cluster.name} is not the one whose allocation this shell is in",
            hint="on the cluster itself, its description has backend: slurm and no login",
        )
    found = allocation(environment, {})
    if num_nodes > found.nodes:
        raise UsageError(f"--here: the job wants {num_nodes} nodes, the allocation {found.job} has {found.nodes}")
    return found.job


def is_inside(handle: Handle) -> bool:
    return bool(handle.data.get("inside"))


def poll(handle: Handle, login: Transport, alive: bool) -> Poll:
    """``alive``: whether the script's shell is seen to live; where it is not seen, its step tells."""
    job, name = str(handle.data["job"]), str(handle.data["name"])
    if alive:
        return Poll("running", word="RUNNING")
    found = steps(job, name, login)
    return Poll("running", word="RUNNING") if found else Poll("ended", word="")


def steps(job: str, name: str, login: Transport) -> list[str]:
    """The ids of the allocation's living steps of this name. Raises Unreachable."""
    rows = queue(login, "-s", "-j", job, fields=("%i", "%j"))
    return [step for step, called in rows if called == name]


def cancel(handle: Handle, login: Transport, ended: Callable[[], bool]) -> None:
    """Ends the step, and waits until it is gone."""
    job, name = str(handle.data["job"]), str(handle.data["name"])
    for step in steps(job, name, login):
        ask(login, "scancel", step)
    end = time.monotonic() + _GONE_S
    while steps(job, name, login) or not ended():
        if time.monotonic() > end:
            raise Unreachable(f"the step {name} of job {job} was cancelled, but is still there after {_GONE_S:.0f} s")
        time.sleep(0.3)


def request_of(found: Allocation, attempt_files: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**attempt_files, "job": found.job, "name": name, "environment": dict(found.environment)}
