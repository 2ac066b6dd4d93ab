"""When a checkpoint is written, and how many stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_serializer

from ..contract.kept import pattern_problem, whole_when_problem
from . import units, values
from .description import Description
from .mistakes import Mistake
from .values import (
    Count,
    Flag,
    Seconds,
    Whole,
    choice,
    whole_or_none,
)

Pattern = Annotated[str, BeforeValidator(values.checked(pattern_problem))]
WholeWhen = Annotated[str, BeforeValidator(values.checked(whole_when_problem))]


def _every(value: Any) -> tuple[str, int]:
    """``50`` → every_steps, ``30min`` → every_s; ValueError in plain words."""
    steps = whole_or_none(value)
    if steps is None:
        try:
            seconds = units.duration(str(value))
        except ValueError:
            raise ValueError(
                f"{str(value)!r} is not accepted; accepted: a number of steps, or 90s, 30min, 2h"
            ) from None
        field, found = "every_s", seconds
    else:
        field, found = "every_steps", steps
    if found < 1:
        raise ValueError(f"{str(value)!r} is out of range; accepted: 1 step or 1 second, or more")
    return field, found


class Checkpoint(Description):
    """Written ``every: 50`` (steps) or ``every: 30min``; the newest ``keep`` stay (left out: all).

    A program's own: ``foreign`` is a pattern of which each match is one, ``whole_when`` the file that makes it whole;
    ``hand_back`` says whether every node gets all of it at a resume where each keeps its own disk.
    """

    LOADER_ONLY: ClassVar[frozenset[str]] = frozenset({"every_steps", "every_s"})

    every_steps: Count | None = None
    every_s: Seconds | None = None
    keep: Count | None = None
    background: Flag = False
    replicas: Annotated[Whole, Field(le=8)] = 0  # without a shared filesystem: copies on the nodes after a shard's own
    foreign: Pattern | None = None
    whole_when: WholeWhen | None = None
    hand_back: Annotated[Literal["everywhere", "in_place"], choice("everywhere", "in_place")] = "everywhere"

    @classmethod
    def keys(cls, *, written: bool) -> list[str]:
        return ["every", *super().keys(written=written)]

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "every" not in given:
            return given
        rest = {k: v for k, v in given.items() if k != "every"}
        try:
            field, found = _every(given["every"])
        except ValueError:
            return rest  # mistakes() has said so
        return {**rest, field: found}

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "every" in given:
            try:
                _every(given["every"])
            except ValueError as problem:
                yield Mistake(("every",), str(problem))
        if len({"every", "every_steps", "every_s"} & set(given)) > 1:
            yield Mistake((), "every is given twice")
        for key in ("whole_when", "hand_back"):
            if key in given and "foreign" not in given:
                yield Mistake((key,), f"{key} goes with foreign", at_key=True)

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        every = self.every_steps if self.every_s is None else f"{self.every_s}s"
        own = {"foreign": self.foreign, "whole_when": self.whole_when, "hand_back": self.hand_back}
        if self.foreign is not None:
            return own
        return {"every": every, "keep": self.keep, "background": self.background, "replicas": self.replicas}
