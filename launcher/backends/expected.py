"""Asks Slurm before a job is queued: would it take it, and when would it start? (``sbatch --test-only``)"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..agent.slurm import is_deaf
from ..contract.errors import Unreachable, UsageError
from .outside import ask

if TYPE_CHECKING:
    from ..specs.models import Cluster
    from ..transports.protocol import Transport

_TOLD = re.compile(r"Job \d+ (to start at (\S+) using \d+ processors on (?:nodes )?(\S+).*)")
_NO_SUCH_NODES = "Requested node configuration is not available"  # never, or not while nodes are down: it does not say
_AWAY = ("down", "drain", "fail", "maint", "unk", "no_respond", "reboot", "power", "future")


def would_start(cluster: Cluster, login: Transport, script: bytes) -> str:
    """When and where Slurm would start ``script``, in a sentence that ends with its own words.

    Raises UsageError with its words when it refuses the job, Unreachable when it does not answer.
    """
    done = ask(login, "sbatch", "--test-only", stdin=script)
    lines = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    plain = [re.sub(r"^(sbatch: )?((error|fatal): )?", "", line) for line in lines]
    if done.returncode == 0:
        told = next((match for line in plain if (match := _TOLD.search(line))), None)
        if told is None:
            return f"Slurm takes it: {'; '.join(plain) or 'it says no more'}"
        return f"would start {told[2].replace('T', ' ')} on {told[3]} (Slurm: {told[1]})"
    said = "; ".join(plain) or "without a word"
    if is_deaf(said):
        raise Unreachable(f"{login.name}: sbatch --test-only: {said}")
    if _NO_SUCH_NODES in said:
        away = _nodes_away(cluster, login)
        if away:
            return f"Slurm says: {said}; down or drained now: {away}. The job is queued, and may wait for them"
    raise UsageError(
        f"Slurm refuses the job: {said}", hint="nothing was sent; mend the cluster's slurm: or pools:, or the job"
    )


def _nodes_away(cluster: Cluster, login: Transport) -> str:
    partition = ["-p", cluster.slurm.partition] if cluster.slurm.partition else []
    done = ask(login, "sinfo", "-h", "-N", *partition, "-o", "%N %T")  # which words -t knows differs by version
    rows = [line.split() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    away = [row[0] for row in rows if len(row) == 2 and (row[1].endswith("*") or row[1].startswith(_AWAY))]
    return ", ".join(dict.fromkeys(away))
