"""A plan → the launch specification of one attempt."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract.container import Container
from ..contract.data_files import DataFile
from ..contract.kept import Foreign
from ..contract.launch import LaunchSpec, SetupPart
from ..specs.models import Cluster, Job
from ..specs.setup_text import SetupText
from .plan import Plan

WARN_S = 120


def job_name(run: str, attempt: int) -> str:
    """By it a submit that lost its answer finds its own job: unique, because run names are."""
    return f"zerun-{run}" + (f"-{attempt}" if attempt > 1 else "")


@dataclass(frozen=True)
class Begun:
    """What of an attempt no description says. Paths are those of the cluster; ``resume_from`` is below ``run_dir``."""

    run: str
    attempt: int
    run_dir: str
    runtime: str
    code: str | None
    token: str
    secrets_file: str | None = None
    resume_step: int | None = None
    resume_from: str | None = None
    here: str | None = None
    data: tuple[DataFile, ...] = ()  # its token files, as they were found


def launch_spec(plan: Plan, job: Job, cluster: Cluster, begun: Begun) -> LaunchSpec:
    """What an attempt starts from; nothing is looked at.

    The job's ``env`` overlays the cluster's. A program's ``stop_grace`` is the time between the warning
    and the limit; under Slurm the limit itself is Slurm's to enforce, so ``time_s`` is for direct alone.
    """
    program, saved = job.program, job.checkpoint
    wish = WARN_S if program is None else program.stop_grace
    setup, parts = joined_setup(cluster.setup, job.setup)
    return LaunchSpec(
        run=begun.run,
        attempt=begun.attempt,
        run_dir=begun.run_dir,
        runtime=begun.runtime,
        nodes=plan.nodes,
        shared=cluster.paths.shared,
        token=begun.token,
        python=cluster.python,
        agent_python=cluster.agent_python,
        train=plan.train,
        program=plan.program,
        code=begun.code,
        tensor=plan.topology.tensor,
        device_kind=cluster.device_of(plan.nodes[0].name).kind,
        cpus_per_slot=cluster.cpus_per_slot,
        setup=setup,
        setup_parts=parts,
        env={**cluster.env, **job.env},
        secrets=job.secrets,
        secrets_file=begun.secrets_file,
        interface=cluster.network.interface,
        ports=cluster.network.ports,
        time_s=plan.time_s if cluster.backend == "direct" else None,
        warn_s=warn_seconds(plan.time_s, wish),
        stop_signal="USR2" if program is None else program.stop_signal,
        resume_step=begun.resume_step,
        resume_from=begun.resume_from,
        here=begun.here,
        stage=begun.data if job.data is not None and job.data.stage_to is not None else (),
        replicas=0 if cluster.paths.shared else job.checkpoint.replicas,
        node_local=cluster.paths.node_local,
        container=container_of(cluster),
        outputs=job.outputs,
        foreign=Foreign(saved.foreign, saved.whole_when) if saved.foreign is not None else None,
    )


def container_of(cluster: Cluster) -> Container | None:
    from ..specs.container_model import mount_of

    said = cluster.container
    if said is None:
        return None
    return Container(said.runtime, said.image, tuple(mount_of(mount) for mount in said.mounts), said.arguments)


def joined_setup(cluster: str, job: str) -> tuple[str, tuple[SetupPart, ...]]:
    """The cluster's setup, then the job's, as the one text that the node's shell reads; and whose its lines are."""
    text, parts, first = "", [], 1
    for of, part in (("cluster", cluster), ("job", job)):
        if not part.strip():
            continue
        lines = len(part.splitlines())
        file = part.file if isinstance(part, SetupText) else ""
        line = part.line if isinstance(part, SetupText) else None
        parts.append(SetupPart(of, first, lines, file, line))
        text += part if part.endswith("\n") else part + "\n"
        first += lines
    return text, tuple(parts)


def warn_seconds(time_s: int | None, wish: int) -> int:
    """How long before the limit the warning comes: never more than half of a short job, never nothing."""
    return wish if time_s is None else max(1, min(wish, time_s // 2))
