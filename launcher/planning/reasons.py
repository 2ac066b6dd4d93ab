"""Why a job cannot be planned on a cluster: every reason at once, each under a name that tests can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..contract.errors import UsageError


class Reason(NamedTuple):
    """``name`` is one word that stays the same: nodes · slots · time · precision · batch · model · tensor ·
    zero · extra · missing."""

    name: str
    message: str
    hint: str = ""


class CannotPlan(UsageError):
    """The job makes no sense on this cluster. ``reasons`` in the order they were found; never empty."""

    def __init__(self, job: str, cluster: str, reasons: Sequence[Reason]) -> None:
        self.reasons = tuple(reasons)
        place = f"job {job} on cluster {cluster}"
        hints = [r.hint for r in self.reasons if r.hint]
        super().__init__("\n".join(f"{place}: {r.message}" for r in self.reasons), hint="; ".join(hints) or None)
