"""``zerun plan --parameters N --ranks N``: the state memory of every ZeRO stage, without a job."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.errors import UsageError
from . import show
from .plan_text import count_lines, table_lines

if TYPE_CHECKING:
    from ..planning.memory import Count

_SCALES = {"k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}

Parameters = Annotated[str | None, typer.Option("--parameters", metavar="N", help="Without a job: 7.5e9, 7.5B, 1T.")]
Ranks = Annotated[int | None, typer.Option("--ranks", metavar="N", min=1, help="Ranks in all, with --parameters.")]
Tensor = Annotated[
    int | None, typer.Option("--tensor", metavar="T", min=1, help="Tensor-parallel degree, with --parameters.")
]
Precision = Annotated[
    str | None, typer.Option("--precision", metavar="P", help="bf16 (default), fp16 or fp32, with --parameters.")
]
GradientDtype = Annotated[
    str | None,
    typer.Option("--gradient-dtype", metavar="P", help="Of gradients, with --parameters. Default: the precision."),
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", metavar="O", help="adamw (default), momentum or sgd, with --parameters.")
]
Frozen = Annotated[
    str | None, typer.Option("--frozen", metavar="N", help="Parameters that are not trained, beside --parameters.")
]
DeviceMemory = Annotated[
    str | None, typer.Option("--device-memory", metavar="BYTES", help="32GB, 80GiB, with --parameters.")
]


def plan(given: Mapping[str, str | int], *, as_json: bool, table: bool) -> None:
    """``given``: options as they were typed, by their names, ``--parameters`` among them."""
    from ..planning.memory import plan_state, state_table
    from ..planning.told import WORLDS, told_count, told_table

    if "--ranks" not in given and not table:
        raise UsageError("--parameters needs --ranks too", hint="--ranks 64, or --table for many numbers of ranks")
    count, device_bytes = _count_of(given), _bytes(given.get("--device-memory"))
    total = count.parameters + count.frozen
    state = plan_state(
        count.elements, count.each, chosen=None, world_size=count.ranks, device_bytes=device_bytes, parameters=total
    )
    told = told_count(count, state)
    lines = count_lines(count, state)
    if table:
        rows = state_table(count.elements, count.each, {*WORLDS, count.ranks}, device_bytes)
        told["table"] = told_table(rows)
        lines += ["", *table_lines(rows)]
    if as_json:
        show.data_json(told)
        return
    for line in lines:
        show.data(line)


def _count_of(given: Mapping[str, str | int]) -> Count:
    from ..planning.memory import Count

    tensor = int(given.get("--tensor", 1))
    dtype = given.get("--gradient-dtype")
    return Count(
        parameters=_count(str(given["--parameters"]), "--parameters"),
        frozen=_count(str(given.get("--frozen", 0)), "--frozen"),
        ranks=int(given.get("--ranks", tensor)),
        tensor=tensor,
        precision=str(given.get("--precision", "bf16")),
        gradient_dtype=None if dtype is None else str(dtype),
        optimizer=str(given.get("--optimizer", "adamw")),
    )


def _count(text: str, option: str) -> int:
    """``7.5e9``, ``7.5B``, ``1T`` or plain digits → a whole number."""
    scale = _SCALES.get(text[-1:], 1)
    try:
        value = Decimal(text[:-1] if scale > 1 else text.replace("_", "")) * scale
        if value.is_finite() and value == value.to_integral_value() and value >= 0:
            return int(value)
    except InvalidOperation:
        pass
    raise UsageError(f"{option} {text!r} is not a whole number of parameters; accepted: 7500000000, 7.5e9, 7.5B, 1T")


def _bytes(text: str | int | None) -> int | None:
    if text is None:
        return None
    from ..specs.units import parse_bytes

    try:
        return parse_bytes(str(text))
    except ValueError as problem:
        raise UsageError(f"--device-memory: {problem}") from None
