"""What stands behind a slot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from . import units, values
from .description import Description
from .mistakes import Mistake, did_you_mean, raise_together
from .values import FREEZE, LIST, Bytes, Line, choice

PRECISIONS = ("fp32", "bf16", "fp16")
_PEAKS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


def _peaks(value: Any) -> Any:
    given = values.mapped(value)
    unknown = [key for key in given if key not in _PEAKS]
    raise_together(
        Mistake((k,), f"unknown precision {k!r}{did_you_mean(k, _PEAKS)}; accepted: {', '.join(_PEAKS)}", True)
        for k in unknown
    )
    return given


class Device(Description):
    """What stands behind a slot. ``precisions`` left out: every one is taken to work."""

    kind: Annotated[Literal["cpu", "gpu"], choice("cpu", "gpu")] = "cpu"
    model: Line | None = None
    memory: Bytes | None = None
    reserve: Bytes = 0
    peak_flops: Annotated[dict[str, values.Flops], BeforeValidator(_peaks), FREEZE] = Field(
        default_factory=lambda: values.freeze({}), description="FLOP/s by precision"
    )
    precisions: Annotated[tuple[Annotated[Literal["fp32", "bf16", "fp16"], choice(*PRECISIONS)], ...], LIST] | None = (
        None
    )

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        memory, reserve = _bytes_of(given.get("memory")), _bytes_of(given.get("reserve"))
        if memory is not None and reserve is not None and reserve >= memory:
            yield Mistake(("reserve",), f"reserve {given['reserve']} leaves nothing of memory {given['memory']}")

    def computes(self, precision: str) -> bool:
        """Whether the device computes in ``precision``, as far as its description says."""
        return self.precisions is None or precision in self.precisions


def _bytes_of(value: Any) -> int | None:
    try:
        return units.parse_bytes(str(value))
    except ValueError:
        return None
