"""What ranks agree on before they write a checkpoint."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...contract.errors import UsageError
from ...contract.plain import to_plain
from ..together import Told


def agree_on_place(told: Told, folder: Path, step: int, node: str) -> None:
    """What :func:`check_place` compares: ``node`` is empty where all nodes share a filesystem."""
    try:
        told.own = {"step": operator.index(step), "folder": os.path.abspath(folder), "node": node}
    except TypeError as error:
        raise UsageError(f"step is {step!r}: a whole number is expected") from error


def check_place(told: Told) -> None:
    """Raises :class:`UsageError` on all ranks where one would write another step, or into another folder than the first
    rank that has the same disk."""
    firsts: dict[str, tuple[int, str]] = {}
    for rank, row in enumerate(told.everyone):
        if row["step"] != told.everyone[0]["step"]:
            raise UsageError(
                f"rank {rank} would save step {row['step']}, rank 0 step {told.everyone[0]['step']}",
                hint="all ranks save together: give them the same step",
            )
        first, folder = firsts.setdefault(row["node"], (rank, row["folder"]))
        if row["folder"] != folder:
            raise UsageError(
                f"rank {rank} would save into {row['folder']}, rank {first} into {folder}",
                hint="all ranks save together: give them the same folder, absolute if their working directories differ",
            )


def check_extra(value: Any, where: str = "extra") -> None:
    """Raises :class:`UsageError` naming the key of ``extra`` that JSON would not give back: other values than mappings
    with strings as keys, lists, strings, finite numbers, booleans and None. Tuples come back as lists."""
    try:
        _check(value, where)
        json.dumps(to_plain(value))
    except (RecursionError, ValueError) as error:  # without end, or a number of more digits than Python reads
        raise UsageError(f"{where} cannot be kept in a manifest: {error}", hint=_HINT) from error


_HINT = "mappings with strings as keys, lists, strings, finite numbers, booleans and None; tensor.item(), .tolist()"


def _check(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{where} is {value}: JSON has finite numbers alone", hint="None, or str(value)")
    if value is None or isinstance(value, (str, int, float)):
        return
    if isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check(inner, f"{where}[{index}]")
        return
    if not isinstance(value, Mapping):
        name = f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")
        raise UsageError(f"{where} is a {name}, which a manifest cannot keep", hint=_HINT)
    for key, inner in value.items():
        if not isinstance(key, str):
            raise UsageError(
                f"{where} has the key {key!r}, a {type(key).__name__}: JSON would give it back as a string",
                hint="str(key)",
            )
        _check(inner, f"{where}[{key!r}]")
