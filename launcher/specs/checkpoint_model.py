"""When a checkpoint is written, and how many stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import model_serializer

from . import units
from .description import Description
from .mistakes import Mistake
from .values import (
    Count,
    Flag,
    Seconds,
    whole_or_none,
)


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
    """Written ``every: 50`` (steps) or ``every: 30min``; the newest ``keep`` stay (left out: all)."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"foreign": ""}
    LOADER_ONLY: ClassVar[frozenset[str]] = frozenset({"every_steps", "every_s"})

    every_steps: Count | None = None
    every_s: Seconds | None = None
    keep: Count | None = None
    background: Flag = False

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

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        every = self.every_steps if self.every_s is None else f"{self.every_s}s"
        return {"every": every, "keep": self.keep, "background": self.background}
