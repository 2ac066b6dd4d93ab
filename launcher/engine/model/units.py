"""From a module to a partition: which parameters form a unit, in which order, tied to what.

A unit is what ZeRO stage 3 gathers together; ``contract.units`` says which parameters form one. By default each
child of an outermost ``nn.ModuleList`` or ``nn.Sequential`` is one (a transformer's blocks). A module whose
parameters others use too names them in ``zero_kept``: they stay gathered from forward to backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...contract import partition
from ...contract.errors import UsageError
from ...contract.partition import Layout, Parameter
from ...contract.train import Units
from ...contract.units import Module, Tree, group
from ..tensor.layers import split_of
from .groups import Group, Groups, settle
from .precision import working_dtype


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

    ``tensor`` is the degree at which the module's layers were cut (``engine.tensor.layers``), ``rule`` makes the
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
    modules = []
    for name, child in module.named_modules():
        kinds = tuple(c.__name__ for c in type(child).__mro__ if c not in (nn.Module, object))
        modules.append(Module(name, kinds))
    return Tree(modules, [name for name, _ in blocks(module)], names_in(module, "zero_kept"))


def names_in(module: nn.Module, attribute: str) -> list[str]:
    """What modules name in an attribute of theirs, relative to themselves, as names of the whole."""
    told = [(name, own) for name, child in module.named_modules() for own in getattr(child, attribute, ())]
    return [f"{name}.{own}" if name else own for name, own in told]


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
