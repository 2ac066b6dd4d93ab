"""That all ranks were given the same: settings before anything is built by them, then what was built.

Ranks that differ would answer each other's messages crosswise, which ends in a timeout at best. So a digest is compared
first, by one small message; only where it differs do ranks send the whole, and all of them say what the first
difference is, with both values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..contract.errors import UsageError
from ..contract.partition import Layout
from ..contract.plain import to_plain
from .comm import Comm, gather_bytes
from .config import EngineConfig
from .model.groups import Group
from .update.elementwise import Chosen

_ABSENT = "left out"


def agree_on_settings(comm: Comm, settings: Mapping[str, Any], device: torch.device) -> None:
    """Raises :class:`UsageError` on all ranks that names the first key whose value differs, and both values."""
    found = _compare(comm, flatten(settings), device, "comparing settings")
    if found is None:
        return
    rank, ours, theirs = found
    key = next(k for k in [*ours, *theirs] if ours.get(k, _ABSENT) != theirs.get(k, _ABSENT))
    there, here = (repr(side[key]) if key in side else _ABSENT for side in (theirs, ours))
    raise UsageError(
        f"rank {rank} was given other settings than rank 0: {key} is {there} on rank {rank}, {here} on rank 0",
        hint="every rank must be given the same; check what depends on the rank, or on its node's files",
    )


def agree_on_model(comm: Comm, layout: Layout, model: nn.Module, groups: Sequence[Group], device: torch.device) -> None:
    """Raises :class:`UsageError` on all ranks that names the first parameter, buffer or group that differs."""
    buffers = {
        name: {"shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch.")}
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    built = {"layout": to_plain(layout), "buffers": buffers, "groups": [flatten(group) for group in groups]}
    found = _compare(comm, built, device, "comparing models")
    if found is None:
        return
    rank, ours, theirs = found
    raise UsageError(
        f"rank {rank} has another model than rank 0: {_difference(ours, theirs)}",
        hint="every rank must build the same model; check what depends on the rank or on chance",
    )


def agree_on_recording(comm: Comm, why: str | None, device: torch.device) -> None:
    """Raises :class:`UsageError` on all ranks where some cannot record the function that builds the model and others
    can; ``why`` is the reason of one that cannot."""
    flag = torch.tensor([int(why is not None)], dtype=torch.uint8, device=device)
    cannot = comm.gather_small(flag, "how the model is built")[:, 0].tolist()
    if len(set(cannot)) == 1:
        return
    reasons = gather_bytes(comm, (why or "").encode(), "how the model is built", device)
    rank, other = cannot.index(1), cannot.index(0)
    raise UsageError(
        f"rank {rank} cannot record the function that builds the model, rank {other} can: {reasons[rank].decode()}",
        hint="every rank must build alike: what looks at values (a print, a norm) has to do so on all ranks, or after "
        "ZeroEngine is made",
    )


def settings_of(config: EngineConfig, chosen: Chosen, model: object, degree: int) -> dict[str, Any]:
    """All that an engine is told, but for the model itself."""
    return {
        "model": "a module" if isinstance(model, nn.Module) else "a function that builds it",
        "parallel.tensor": degree,
        "optimizer.name": chosen.name,
        "optimizer.moments": chosen.moments,
        **flatten(config),
    }


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """``{"zero.stage": 2, …}``: the leaves of dataclasses and mappings by the keys that lead to them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        found = {}
        for key, inner in value.items():
            found.update(flatten(inner, f"{prefix}.{key}" if prefix else str(key)))
        return found
    if isinstance(value, (list, tuple)):
        return {prefix: [item if isinstance(item, (str, int, float)) else repr(item) for item in value]}
    return {prefix: value if value is None or isinstance(value, (str, int, float)) else repr(value)}


def _compare(comm: Comm, mine: Any, device: torch.device, what: str) -> tuple[int, Any, Any] | None:
    """The first rank that says something else than rank 0, with what rank 0 says and what it says."""
    text = json.dumps(mine).encode()
    digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8, device=device)
    digests = comm.gather_small(digest, what)
    different = (digests != digests[0]).any(1)
    if not bool(different.any()):
        return None
    everyone = gather_bytes(comm, text, what, device)
    other = int(different.nonzero()[0])
    return other, json.loads(everyone[0]), json.loads(everyone[other])


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    return (
        _of_parameters(ours["layout"], theirs["layout"])
        or _of_named("buffer", ours["buffers"], theirs["buffers"])
        or _of_named("group", *({str(n): g for n, g in enumerate(side["groups"])} for side in (ours, theirs)))
        or "the number of ranks"
    )


def _of_parameters(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    first = [(u["name"], p) for u in ours["units"] for p in u["parameters"]]
    second = [(u["name"], p) for u in theirs["units"] for p in u["parameters"]]
    for index in range(max(len(first), len(second))):
        if index >= len(first):
            return f"parameter {second[index][1]['name']} is only there"
        if index >= len(second):
            return f"parameter {first[index][1]['name']} is missing there"
        if first[index] != second[index]:
            (unit, a), (other_unit, b) = first[index], second[index]
            keys = [k for k in a if a[k] != b[k]]
            if not keys:
                return f"parameter {a['name']} is in unit {other_unit}, not {unit}"
            return f"parameter {index}: {keys[0]} is {b[keys[0]]!r} there, {a[keys[0]]!r} on rank 0 ({a['name']})"
    return ""


def _of_named(kind: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    for name in [*ours, *theirs]:
        if name not in theirs:
            return f"{kind} {name} is missing there"
        if name not in ours:
            return f"{kind} {name} is only there"
        a, b = ours[name], theirs[name]
        for key in a:
            if a[key] != b.get(key, _ABSENT):
                return f"{kind} {name}: {key} is {b.get(key, _ABSENT)!r} there, {a[key]!r} on rank 0"
    if list(ours) != list(theirs):
        return f"{kind}s stand in another order: {', '.join(list(theirs)[:4])} … there"
    return ""
