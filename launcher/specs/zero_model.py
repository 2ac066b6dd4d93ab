"""How ZeRO partitions, what it gathers and when, and over which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from . import values
from .description import Description
from .device_model import PRECISIONS
from .mistakes import Mistake, shown, wrong
from .values import Bytes, Flag, Line, Whole, choice, whole_or_none


def _names(value: Any) -> tuple[Any, ...]:
    """One name, or a list of them."""
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _some(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise wrong("the list is empty; accepted: [Block, Expert]")
    return names


_Names = Annotated[tuple[Line, ...], BeforeValidator(_names), AfterValidator(_some)]


class Units(Description):
    """Which modules stage 3 gathers together: those of a class, of some names, or as many as fill ``size``."""

    class_: Annotated[_Names | None, Field(alias="class")] = None
    names: _Names | None = None
    size: Annotated[Bytes | None, values.at_least(1)] = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        said = [key for key in ("class", "names", "size") if key in given]
        if len(said) != 1:
            what = " and ".join(said) or "none of them"
            yield Mistake((), f"unit takes exactly one of class, names, size, not {what}; or write unit: block")


def _unit(value: Any) -> Any:
    if isinstance(value, str):
        if value == "block":
            return None
        accepted = "block, {class: Block}, {names: [layers.*.mlp]}, {size: 25MB}"
        raise wrong(f"{shown(value)} is not accepted; accepted: {accepted}")
    return value


def _replicas(value: Any) -> int | Literal["nodes"]:
    if value == "nodes":
        return "nodes"
    found = whole_or_none(value)
    if found is None or found < 1:
        raise wrong(f"{shown(value)} is not accepted; accepted: nodes, or a number from 1")
    return found


class Zero(Description):
    stage: Annotated[Literal[0, 1, 2, 3], choice(0, 1, 2, 3)]
    bucket: Annotated[Bytes, values.at_least(1)] = 25_000_000
    gradient_dtype: Annotated[Literal["fp32", "bf16", "fp16"], choice(*PRECISIONS)] = "fp32"
    reduce_every: Annotated[Literal["micro_step", "step"] | None, choice("micro_step", "step")] = None
    unit: Annotated[Units | None, BeforeValidator(_unit)] = None
    reshard: Annotated[Literal["keep_last", "after_forward", "keep"], choice("keep_last", "after_forward", "keep")] = (
        "keep_last"
    )
    prefetch: Annotated[Whole, values.at_least(0, 64)] = 1
    replicas: Annotated[int | Literal["nodes"], BeforeValidator(_replicas)] = 1
    reduce_with: Annotated[Literal["ordered", "native"], choice("ordered", "native")] = "ordered"
    overlap_gather: Flag | None = None
    same_host: Annotated[Literal["read", "send"], choice("read", "send")] = "read"

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if given.get("reduce_with") == "native":
            stage, replicas = whole_or_none(given.get("stage")), given.get("replicas", 1)
            if stage:
                said = "native is the library's all-reduce of whole gradients: it goes with stage 0 alone"
                yield Mistake(("reduce_with",), f"{said}, not with {stage}")
            elif whole_or_none(replicas) != 1:
                yield Mistake(("reduce_with",), "native does not go with replicas: its sum is over all ranks at once")
            elif given.get("reduce_every") == "micro_step":
                yield Mistake(("reduce_every",), "native sums whole gradients, once a step: reduce_every: step")
