"""Why a job cannot be planned on a cluster: every reason at once, each under a name that tests can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..contract.errors import UsageError

# Where a reason of each name is said, as ``--set`` writes keys; of those that stand in a file the first.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "nodes": ("nodes", "cluster.nodes"),
    "slots": ("slots_per_node", "cluster.nodes"),
    "time": ("time",),
    "precision": ("precision", "cluster.device.precisions", "cluster.device"),
    "batch": ("batch.global", "batch"),
    "tensor": ("parallel.tensor",),
    "zero": ("zero",),
    "device": ("cluster.nodes",),
    "model": ("model", "program"),
    "memory": ("cluster.device", "cluster.nodes"),
}


class Reason(NamedTuple):
    """``name`` is one word that stays the same: nodes · slots · time · precision · batch · tensor · zero · device ·
    model · memory · not_built. ``key``: which one is at fault, where the name alone does not say it."""

    name: str
    message: str
    hint: str = ""
    key: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the job (``zero.stage``) and of the cluster (``cluster.nodes``) that may be at fault, likeliest
        first."""
        return (self.key,) if self.key else _KEYS.get(self.name, ("name",))


class CannotPlan(UsageError):
    """The job makes no sense on this cluster. ``reasons`` in the order they were found; never empty."""

    def __init__(self, job: str, cluster: str, reasons: Sequence[Reason]) -> None:
        self.job, self.cluster = job, cluster
        self.reasons = tuple(reasons)
        place = f"job {job} on cluster {cluster}"
        hints = [r.hint for r in self.reasons if r.hint]
        super().__init__("\n".join(f"{place}: {r.message}" for r in self.reasons), hint="; ".join(hints) or None)
