"""Which of many runs are meant: by state, age, job and tags."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..contract.errors import UsageError
from ..contract.folder import is_safe_name
from . import Run, RunState

_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


@dataclass(frozen=True)
class Choice:
    """Empty: all of them. ``since`` is seconds since the epoch, held against when the run was submitted."""

    states: frozenset[str] = frozenset()
    since: float | None = None
    job: str | None = None
    tags: frozenset[str] = frozenset()

    def may_be(self, run: Run) -> bool:
        """Whether a run of a state not known yet may be meant: the others need not be asked after."""
        if self.job is not None and run.about.get("job_name") != self.job:
            return False
        return self.tags <= set(run.tags) and (self.since is None or submitted_at(run.name) >= self.since)

    def takes(self, state: RunState) -> bool:
        if self.states and state.state not in self.states:
            return False
        if self.job is not None and state.job != self.job:
            return False
        return self.tags <= set(state.tags) and (self.since is None or submitted_at(state.run) >= self.since)


def submitted_at(run: str) -> float:
    """As the name of the run says; for ever ago where it says nothing."""
    found = _STAMP.search(run)
    return datetime.datetime.strptime(found[1], "%Y%m%d-%H%M%S").timestamp() if found else float("-inf")


def tag_names(tags: Sequence[str]) -> Sequence[str]:
    """Raises UsageError for what a job's description would not take as a tag either."""
    for tag in tags:
        if not is_safe_name(tag):
            raise UsageError(
                f"--tag {tag!r} is not accepted",
                hint="up to 128 letters, digits, '.', '_', '-', first a letter or digit",
            )
    return tags
