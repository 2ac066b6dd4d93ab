"""The optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from . import values
from .description import Description
from .mistakes import Mistake, wrong
from .values import (
    Positive,
    Whole,
    choice,
)


def _pair(value: Any) -> Any:
    if len(values.listed(value)) != 2:
        raise wrong(f"a list of {len(value)} was given; accepted: two numbers, [0.9, 0.95]")
    return tuple(value)


_Beta = Annotated[float, BeforeValidator(values.number), values.between(0, 1)]


def _numbers(value: Any) -> Any:
    """The value with numbers and booleans for their words, to be compared with a default."""
    if isinstance(value, (list, tuple)):
        return [_numbers(v) for v in value]
    try:
        return float({"true": "1", "false": "0"}.get(str(value).lower(), value))
    except (TypeError, ValueError):
        return value


class Optimizer(Description):
    """``clip`` is the global gradient norm, ``warmup`` steps of a linear rise; cosine falls to a tenth of ``lr``."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"groups": ""}

    kind: Annotated[Literal["adamw", "sgd"], choice("adamw", "sgd")] = "adamw"
    lr: Positive
    weight_decay: values.NotNegative = 0.0
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: _Beta = 0.0
    nesterov: values.Flag = False
    clip: Positive | None = None
    warmup: Whole = 0
    schedule: Annotated[Literal["cosine", "constant"], choice("cosine", "constant")] = "cosine"

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        kind = given.get("kind", "adamw")
        for other, keys in (("adamw", ("betas", "eps")), ("sgd", ("momentum", "nesterov"))):
            for key in keys if kind in ("adamw", "sgd") and kind != other else ():
                # A description written out by us names every key: the default is no mistake.
                if key in given and _numbers(given[key]) != _numbers(cls.model_fields[key].default):
                    yield Mistake((key,), f"{key} goes with kind: {other}; this is {kind}", True)
        if kind == "sgd" and _numbers(given.get("nesterov")) == 1 and _numbers(given.get("momentum", 0)) == 0:
            yield Mistake(("nesterov",), "nesterov needs a momentum above 0")
