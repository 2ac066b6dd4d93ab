"""How ZeRO partitions."""

from __future__ import annotations

from typing import Annotated, Literal

from . import values
from .description import Description
from .device_model import PRECISIONS
from .values import (
    Bytes,
    choice,
)


class Zero(Description):
    stage: Annotated[Literal[0, 1, 2, 3], choice(0, 1, 2, 3)]
    bucket: Annotated[Bytes, values.at_least(1)] = 25_000_000
    gradient_dtype: Annotated[Literal["fp32", "bf16", "fp16"], choice(*PRECISIONS)] = "fp32"
