"""The optimizer, its schedule, and parameters that train with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from ..contract import partition
from ..contract.groups import unmatched
from . import values
from .description import Description
from .mistakes import Mistake, wrong
from .values import LIST, Line, Positive, Whole, choice, whole_or_none


def _pair(value: Any) -> Any:
    if len(values.listed(value)) != 2:
        raise wrong(f"a list of {len(value)} was given; accepted: two numbers, [0.9, 0.95]")
    return tuple(value)


def _numbers(value: Any) -> Any:
    """The value with numbers and booleans for their words, to be compared with a default."""
    if isinstance(value, (list, tuple)):
        return [_numbers(v) for v in value]
    try:
        return float({"true": "1", "false": "0"}.get(str(value).lower(), value))
    except (TypeError, ValueError):
        return value


def _some(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise wrong('match is empty; accepted: patterns of parameters\' names, ["*.bias", "*norm*"]')
    return patterns


class OptimizerGroup(Description):
    """Parameters whose name matches one of ``match`` train with these instead; the first group that matches wins."""

    match: Annotated[tuple[Line, ...], LIST, AfterValidator(_some)]
    lr: Positive | None = None
    weight_decay: values.NotNegative | None = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if not {"lr", "weight_decay"} & set(given):
            yield Mistake((), "a group changes nothing; write lr, weight_decay or both beside match")


class Optimizer(Description):
    """``clip`` is the global gradient norm, ``warmup`` steps of a linear rise; cosine falls to a tenth of ``lr``."""

    kind: Annotated[Literal["adamw", "sgd"], choice("adamw", "sgd")] = "adamw"
    lr: Positive
    weight_decay: values.NotNegative = 0.0
    betas: Annotated[tuple[values.Fraction, values.Fraction], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: values.Fraction = 0.0
    nesterov: values.Flag = False
    clip: Positive | None = None
    warmup: Whole = 0
    schedule: Annotated[Literal["cosine", "constant"], choice("cosine", "constant")] = "cosine"
    groups: Annotated[tuple[OptimizerGroup, ...], LIST] = ()

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


def group_mistakes(optimizer: Mapping[str, Any], model: Mapping[str, Any], function: object) -> Iterator[Mistake]:
    """What of ``optimizer.groups`` does not go with the job's model or with the function that gives groups."""
    groups = optimizer.get("groups")
    if function is not None:
        if groups:
            yield Mistake(("groups",), "write groups or optimizer.groups, not both", True)
        if model.get("kind") is not None:
            yield Mistake(
                ("groups",), "groups goes with a model of your own; write optimizer.groups: [{match: …}]", True
            )
    if not isinstance(groups, (list, tuple)) or model.get("kind") != "gpt":
        return
    given = [whole_or_none(model.get(key, 256 if key == "vocab" else None)) for key in _SIZES]
    sizes = [size for size in given if size is not None and size > 0]
    patterns = [_patterns(group) for group in groups]
    if len(sizes) < len(_SIZES) or sizes[0] > 10_000 or not all(patterns):
        return  # said by the field's own type
    names = [[p.name] for _, row in partition.gpt_parameters(*sizes) for p in row]
    for wrong_one in unmatched(names, patterns):
        yield Mistake(("optimizer", "groups", wrong_one.group, "match", wrong_one.pattern), wrong_one.message)


_SIZES = ("layers", "hidden", "seq_len", "vocab")


def _patterns(group: Any) -> list[str]:
    """A group's patterns as they were written; none where they are wrong in themselves."""
    match = group.get("match") if isinstance(group, Mapping) else getattr(group, "match", None)
    if not isinstance(match, (list, tuple)) or not all(isinstance(pattern, str) for pattern in match):
        return []
    return [str(pattern) for pattern in match]
