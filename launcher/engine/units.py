"""From a module to a partition: which parameters form a unit, in which order, tied to what.

A unit is what ZeRO stage 3 gathers together. By default each child of an outermost ``nn.ModuleList`` or
``nn.Sequential`` is one (a transformer's blocks); the parameters between them, in module order, form
further units (embeddings before, the last norm after) that stay gathered from forward to backward.
A parameter that two units share (a tied weight) belongs to a unit of its own kind, kept likewise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..contract import partition
from ..contract.errors import UsageError
from ..contract.partition import Layout, Parameter
from ..contract.plain import to_plain
from .comm import Comm, gather_bytes
from .groups import Group, Groups, settle
from .precision import working_dtype
from .tensor_parallel import split_of


@dataclass
class Model:
    """A module seen as a partition."""

    layout: Layout
    tensors: dict[str, nn.Parameter]
    """By the name under which the layout knows it: the first of tied names."""
    modules: list[nn.Module | None]
    """Of each unit of the layout: the module whose forward uses it, or None for a kept one."""
    groups: list[Group]


def describe(
    module: nn.Module,
    *,
    ranks: int,
    bucket_bytes: int,
    groups: Groups = None,
    lr: float = 1.0,
    precision: str = "fp32",
    tensor: int = 1,
) -> Model:
    """The partition of ``module`` over ``ranks``, held in ``precision``; ``groups`` as ``ZeroEngine`` takes them,
    whose rates are held against ``lr``.

    ``tensor`` is the degree at which the module's layers were cut (``engine.tensor_parallel``).

    Raises :class:`UsageError` for a parameter in two groups, or a group entry that is no parameter.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    if not names:
        raise UsageError("the model has no parameters")
    group_of, settings = settle(groups, module, names, lr)
    homes = {prefix: child for prefix, child in blocks(module)}
    named: list[tuple[str, list[Parameter], nn.Module | None]] = []
    run: str | None = None
    for key, aliases in names.items():
        value = tensors[key]
        owners = {_home(alias, homes) for alias in aliases}
        home = owners.pop() if len(owners) == 1 else None
        split = split_of(value)
        parameter = Parameter(
            name=aliases[0],
            shape=tuple(value.shape) if split is None else split.shape,
            dtype=str(working_dtype(precision, value.dtype)).removeprefix("torch."),
            trainable=value.requires_grad,
            group=group_of.get(key, 0),
            tied=tuple(aliases[1:]),
            tensor_axis=None if split is None else split.axis,
            tensor_parts=1 if split is None else split.parts,
            tensor_padded=split is not None and split.padded,
        )
        unit = home if home is not None else run or _run_name(aliases[0], named)
        run = unit if home is None else None
        if named and named[-1][0] == unit:
            named[-1][1].append(parameter)
        else:
            previous = [entry for entry in named if entry[0] == unit]
            if previous:
                previous[0][1].append(parameter)
            else:
                named.append((unit, [parameter], homes.get(home) if home is not None else None))
    layout = partition.build([(n, p) for n, p, _ in named], ranks=ranks, bucket_bytes=bucket_bytes, tensor=tensor)
    by_unit = {name: owner for name, _, owner in named}
    modules = [by_unit[unit.name.split("#")[0]] for unit in layout.units]
    return Model(layout, {aliases[0]: tensors[key] for key, aliases in names.items()}, modules, settings)


def blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The children of outermost lists of modules, with their names, that hold parameters."""
    found: list[tuple[str, nn.Module]] = []
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for name, child in module.named_children():
            if next(child.parameters(), None) is not None:
                found.append((f"{prefix}{name}", child))
        return found
    for name, child in module.named_children():
        found += blocks(child, f"{prefix}{name}.")
    return found


def _home(name: str, homes: Mapping[str, nn.Module]) -> str | None:
    parts = name.split(".")
    for length in range(1, len(parts)):
        prefix = ".".join(parts[:length])
        if prefix in homes:
            return prefix
    return None


def _run_name(parameter: str, named: Sequence[tuple[str, list[Parameter], nn.Module | None]]) -> str:
    """A name for a run of parameters outside blocks: its first module's, made unlike the others'."""
    base = parameter.rsplit(".", 1)[0] if "." in parameter else parameter
    taken = {name for name, _, _ in named}
    name, count = base, 2
    while name in taken:
        name, count = f"{base}-{count}", count + 1
    return name


def agree(comm: Comm, layout: Layout, device: torch.device) -> None:
    """Compares every rank's layout; raises :class:`UsageError` on all of them that names a difference."""
    text = json.dumps(to_plain(layout), sort_keys=True).encode()
    digest = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8, device=device)
    digests = comm.gather_small(digest, "comparing models")
    different = (digests != digests[0]).any(1)
    if not bool(different.any()):
        return
    everyone = [json.loads(t) for t in gather_bytes(comm, text, "comparing models", device)]
    other = int(different.nonzero()[0])
    raise UsageError(
        f"rank {other} has another model than rank 0: {_difference(everyone[0], everyone[other])}",
        hint="every rank must build the same model; check what depends on the rank or on chance",
    )


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
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
    return "the bucket size or the number of ranks"
