"""What ranks agree on before they write, and what all of them do or none: an error of one rank is told to all at the
next small message, so that nobody waits for it in another one."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...contract.errors import JobFailed, NoSpace, UsageError, VerificationFailed, ZerunError
from ..comm import Comm, CommError, gather_bytes


@dataclass
class Told:
    """What this rank tells, as JSON, and what everyone told, in rank order."""

    own: Any = None
    everyone: list[Any] = field(default_factory=list)


@contextmanager
def by_all(comm: Comm, what: str, device: torch.device | None, told: Told | None = None) -> Iterator[Told]:
    """What is inside sends no message. After it every rank hears how it went: where one failed, it raises its own error
    and the others one of the same kind that names it."""
    told, failed = told or Told(), None
    try:
        yield told
    except CommError:
        raise  # the others are at another message
    except ZerunError as error:
        failed = error
    row = [told.own, failed and [int(failed.exit_code), failed.message, failed.hint]]
    rows = [json.loads(r) for r in gather_bytes(comm, json.dumps(row).encode(), what, device)]
    told.everyone = [own for own, _ in rows]
    if failed is not None:
        raise failed
    for rank, (_, said) in enumerate(rows):
        if said:
            code, message, hint = said
            kinds: tuple[type[ZerunError], ...] = (UsageError, VerificationFailed, NoSpace)
            kind = next((k for k in kinds if k.exit_code == code), JobFailed)
            raise kind(f"rank {rank} says: {message}", hint=hint)


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
        json.dumps(value)
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
