"""Every parameter's own count of updates, as torch has it in ``state["step"]``.

An optimizer that corrects its moments' bias asks how many updates a parameter has had, which is not how many steps the
run has: one that first gets a gradient in step 3 has its first update there. Usually all counts are equal, and one
optimizer runs over whole flat runs. Once a step leaves parameters out, those that it does update go on apart: what has
been updated in the same steps is a *cohort*, updated together by its stretches of the flat storages, whose bits do not
depend on where they are cut (``optim.Pieces``). There are as many cohorts as ways in which parameters have been used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..model.flat import FlatUnit, Run
from ..model.groups import Group
from .elementwise import Chosen
from .optim import Done, FlatOptimizer, nothing

Key = tuple[int, int]
"""A trainable parameter: the number of its unit, and its own in that."""

_BEHIND = "behind"


@dataclass
class _Cohort:
    """Parameters with one count; ``optimizer`` is made when they are first updated."""

    members: frozenset[Key]
    updates: int = 0
    scalars: dict[str, Any] = field(default_factory=dict)
    optimizer: FlatOptimizer | None = None

    def take_back(self) -> None:
        """What the optimizer knows of itself becomes the cohort's: before that goes."""
        if self.optimizer is not None:
            self.updates, self.scalars = self.optimizer.updates, self.optimizer.scalars()


class Counted:
    """The optimizer of all that this rank updates; in ``units`` what is needed first is updated first."""

    def __init__(self, chosen: Chosen, units: Sequence[FlatUnit], groups: Sequence[Group]) -> None:
        self.updates = 0  # steps taken; skipped ones do not count
        self.moments = chosen.moments
        self._chosen, self._units, self._groups = chosen, units, groups
        # What no module uses alone is needed first, so it is updated and handed out first.
        first = sorted(range(len(units)), key=lambda number: bool(units[number].unit.modules))
        self._order = [number for number in first if units[number].unit.trainable]
        runs = [run._replace(unit=number) for number in self._order for run in units[number].runs()]
        self._whole = chosen.on(runs, groups)
        self.name = self._whole.name
        self._every = frozenset((n, i) for n in self._order for i in range(len(units[n].unit.placed)))
        self._cohorts = [_Cohort(self._every, optimizer=self._whole)]

    def step(self, lr: float, factor: float, done: Done = nothing, unused: Collection[Key] = ()) -> None:
        """One update with ``factor`` × the gradient (which is clobbered) of all but the ``unused``, which stay as they
        are. ``done`` hears the number of each unit once it is updated, in the same order on every rank."""
        if unused or len(self._cohorts) > 1:
            self._divide(frozenset(unused))
        self.updates += 1
        if not unused and len(self._cohorts) == 1:
            self._whole.step(lr, factor, done)
            return
        for cohort in self._cohorts:
            if not cohort.members.issubset(unused):
                self._optimizer_of(cohort).step(lr, factor)
        for number in self._order:
            done(number)

    def _divide(self, unused: frozenset[Key]) -> None:
        """Cohorts that are updated whole or not at all. Where no update depends on those before, what was apart joins
        again as soon as other parameters are used."""
        if not self._whole.counts and all(c.members != self._every - unused for c in self._cohorts):
            self._whole.updates = self.updates
            self._cohorts = [_Cohort(self._every, optimizer=self._whole)]
        self._cohorts = [part for cohort in self._cohorts for part in _divided(cohort, unused)]

    def _optimizer_of(self, cohort: _Cohort) -> FlatOptimizer:
        if cohort.optimizer is None:
            whole = cohort.members == self._every
            cohort.optimizer = self._whole if whole else self._chosen.on(list(self._runs(cohort.members)), self._groups)
            cohort.optimizer.updates = cohort.updates
            cohort.optimizer.restore(cohort.scalars)
        return cohort.optimizer

    def _runs(self, members: Collection[Key]) -> Iterator[Run]:
        """Neighbours are one stretch."""
        for number in self._order:
            flat = self._units[number]
            stretches: list[tuple[int, int]] = []
            for index, placed in enumerate(flat.unit.placed):
                if (number, index) in members:
                    joined = bool(stretches) and stretches[-1][1] == placed.start
                    start = stretches.pop()[0] if joined else placed.start
                    stretches.append((start, placed.stop))
            for start, stop in stretches:
                for run in flat.runs_of(start, stop):
                    yield run._replace(unit=number)

    def storages(self) -> list[Tensor]:
        """Every tensor that is kept here beside the moments."""
        others = [c.optimizer for c in self._cohorts if c.optimizer not in (None, self._whole)]
        return [t for optimizer in (self._whole, *others) if optimizer is not None for t in optimizer.storages()]

    # --- in a checkpoint: the same on every rank -----------------------------------------------------------

    def scalars(self) -> dict[str, Any]:
        """All state that is neither a moment nor ``updates``: of what every step has updated, and under ``behind`` of
        the parameters (by name) that have had fewer updates, with their own count."""
        level = next((c.scalars for c in self._told() if c.updates == self.updates), {})
        behind = [
            {
                "parameters": sorted(map(self._name, cohort.members)),
                "updates": cohort.updates,
                "scalars": cohort.scalars if cohort.updates else {},
            }
            for cohort in (self._told() if self._whole.counts else ())
            if cohort.updates != self.updates
        ]
        return {**level, _BEHIND: behind} if behind else level

    def restore(self, scalars: Mapping[str, Any], never: Iterable[str] = ()) -> None:
        """Takes back ``scalars()``, whatever of its parameters is trained here, with ``updates`` as it is; parameters
        that were ``never`` updated (frozen until then) have a count of 0."""
        keys = {self._name(key): key for key in self._every}
        level = {name: value for name, value in scalars.items() if name != _BEHIND}
        told = [*scalars.get(_BEHIND, ()), {"parameters": never, "updates": 0, "scalars": {}}]
        lagging = [_Cohort(_known(keys, c["parameters"]), int(c["updates"]), dict(c["scalars"])) for c in told]
        others = self._every.difference(*(c.members for c in lagging))
        self._cohorts = [c for c in (_Cohort(others, self.updates, level), *lagging) if c.members]
        if not self._whole.counts or not self._cohorts:
            self._cohorts = [_Cohort(self._every, self.updates, level)]
        if len(self._cohorts) == 1:
            self._optimizer_of(self._cohorts[0])

    def _told(self) -> list[_Cohort]:
        for cohort in self._cohorts:
            cohort.take_back()
        return self._cohorts

    def _name(self, key: Key) -> str:
        return self._units[key[0]].unit.placed[key[1]].parameter.name


def _divided(cohort: _Cohort, unused: frozenset[Key]) -> list[_Cohort]:
    """Those of the cohort that are updated now and those that are not, if it has both."""
    used, rest = cohort.members - unused, cohort.members & unused
    if not used or not rest:
        return [cohort]
    cohort.take_back()
    return [_Cohort(members, cohort.updates, dict(cohort.scalars)) for members in (used, rest)]


def _known(keys: Mapping[str, Key], names: Iterable[str]) -> frozenset[Key]:
    return frozenset(keys[name] for name in names if name in keys)
