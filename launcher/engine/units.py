"""From a module to a partition: which parameters form a unit, in which order, tied to what.

A unit is what ZeRO stage 3 gathers together; ``contract.units`` says which parameters form one. By default each
child of an outermost ``nn.ModuleList`` or ``nn.Sequential`` is one (a transformer's blocks). A module whose
parameters others use too names them in ``zero_kept``: they stay gathered from forward to backward.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..contract import partition
from ..contract.errors import UsageError
from ..contract.partition import Layout, Parameter
from ..contract.plain import to_plain
from ..contract.train import Units
from ..contract.units import Module, Tree, group
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
    replicas: int = 1,
    rule: Units | None = None,
) -> Model:
    """The partition of ``module`` over ``ranks``, held in ``precision``; ``groups`` as ``ZeroEngine`` takes them,
    whose rates are held against ``lr``.

    ``tensor`` is the degree at which the module's layers were cut (``engine.tensor_parallel``), ``rule`` makes the
    units, ``replicas`` groups of ``ranks`` hold each of them.

    Raises :class:`UsageError` for a parameter in two groups, a group entry that is no parameter, or a rule that
    chooses nothing.
    """
    names: dict[int, list[str]] = {}
    tensors: dict[int, nn.Parameter] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
        tensors[id(value)] = value
    if not names:
        raise UsageError("the model has no parameters")
    group_of, settings = settle(groups, module, names, lr)
    parameters: list[Parameter] = []
    for key, aliases in names.items():
        value = tensors[key]
        split = split_of(value)
        parameters.append(
            Parameter(
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
        )
    try:
        grouped = group(parameters, tree_of(module), rule, tensor=tensor)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem
    layout = partition.build(
        [(unit.name, unit.parameters) for unit in grouped],
        ranks=ranks,
        bucket_bytes=bucket_bytes,
        tensor=tensor,
        replicas=replicas,
        rule=rule,
        modules={unit.name: unit.modules for unit in grouped},
    )
    return Model(layout, {aliases[0]: tensors[key] for key, aliases in names.items()}, settings)


def tree_of(module: nn.Module) -> Tree:
    """The model as a rule sees it."""
    modules, kept = [], []
    for name, child in module.named_modules():
        kinds = tuple(c.__name__ for c in type(child).__mro__ if c not in (nn.Module, object))
        modules.append(Module(name, kinds))
        kept += [f"{name}.{own}" if name else own for own in getattr(child, "zero_kept", ())]
    return Tree(modules, [name for name, _ in blocks(module)], kept)


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
