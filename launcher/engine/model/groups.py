"""Groups of parameters with settings of their own, as users give them and as the optimizers read them.

``ZeroEngine(model, config, groups=…)`` takes a list of mappings (or a mapping of names to them, or a function of the
model that returns either)::

    [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}, {"params": [model.head.weight], "lr": 1e-4}]

``match`` holds patterns of names (``contract.groups``: the first group that matches wins), ``params`` names or tensors,
each of which is in one group only. ``lr`` is the group's own rate while the engine's is the config's: the engine's
``lr`` moves all groups in proportion. ``lr_scale`` says the same as a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

from torch import nn

from ...contract.bounds import GROUP
from ...contract.errors import UsageError
from ...contract.groups import assign
from ...contract.train import TrainConfig
from ..resolve import resolve

_KEYS = {"params", "match", "lr", "lr_scale", "weight_decay"}
_FORM = "a group is {match: [patterns of names] or params: [names or tensors], lr: … or lr_scale: …, weight_decay: …}"

Given = Union[Sequence[Mapping[str, Any]], Mapping[str, Mapping[str, Any]]]
Groups = Union[Given, Callable[[nn.Module], Given], None]


@dataclass(frozen=True)
class Group:
    """What a group of parameters trains with; ``lr_scale`` multiplies the engine's learning rate."""

    lr_scale: float = 1.0
    weight_decay: float | None = None


def of_config(config: object) -> Groups:
    """The groups that a job's description gives."""
    if not isinstance(config, TrainConfig):
        return None
    if config.group_function:
        function: Callable[[nn.Module], Given] = resolve(config.group_function, "groups")
        return function
    return [{"match": g.match, "lr": g.lr, "weight_decay": g.weight_decay} for g in config.groups]


def settle(
    groups: Groups, module: nn.Module, names: Mapping[int, Sequence[str]], lr: float
) -> tuple[dict[int, int], list[Group]]:
    """Which group each parameter of ``names`` (by ``id``) is in (left out: 0), and every group's settings.

    Raises :class:`UsageError` for what is no group, names no parameter, or gives one to two groups.
    """
    entries = _entries(groups(module) if callable(groups) else groups)
    order = list(names)
    by_name = {alias: key for key, aliases in names.items() for alias in aliases}
    settings = [Group()]
    patterns: list[Sequence[str]] = []
    for label, entry in entries:
        unknown = sorted(set(entry) - _KEYS)
        if unknown or ("params" in entry) == ("match" in entry):
            what = f"has the key {unknown[0]!r}" if unknown else "needs one of 'match' and 'params'"
            raise UsageError(f"{label} {what}", hint=_FORM)
        for setting, bounds in GROUP.items():
            problem = None if entry.get(setting) is None else bounds.problem(entry[setting])
            if problem:
                raise UsageError(f"{label}: {setting}: {problem}", hint=_FORM)
        settings.append(Group(_scale(label, entry, lr), entry.get("weight_decay")))
        patterns.append(entry.get("match", ()))
    try:
        matched = assign([names[key] for key in order], patterns)
    except ValueError as error:
        raise UsageError(f"parameter groups: {error}", hint=_FORM) from error
    group_of = {key: number for key, number in zip(order, matched) if number}  # noqa: B905 (Python 3.9 on the nodes)
    listed: set[int] = set()
    for number, (label, entry) in enumerate(entries, 1):
        for item in entry.get("params", ()):
            key = by_name.get(item) if isinstance(item, str) else id(item)
            if key is None or key not in names:
                raise UsageError(f"{label} names {item!r:.80}, which is no parameter of the model")
            if key in listed:
                raise UsageError(f"parameter {names[key][0]} is in two groups")
            listed.add(key)
            group_of[key] = min(number, group_of.get(key, number))  # beside patterns too, the first wins
    return group_of, settings


def _entries(given: Given | None) -> list[tuple[str, Mapping[str, Any]]]:
    """Every group with what to call it in a message."""
    if isinstance(given, Mapping):
        found = [(f"parameter group {name}", entry) for name, entry in given.items()]
    else:
        found = [(f"parameter group {number}", entry) for number, entry in enumerate(given or (), 1)]
    for label, entry in found:
        if not isinstance(entry, Mapping):
            raise UsageError(f"{label} is {type(entry).__name__}, not a mapping", hint=_FORM)
    return found


def _scale(label: str, entry: Mapping[str, Any], lr: float) -> float:
    own = entry.get("lr")
    if own is None:
        return float(entry.get("lr_scale", 1.0))
    if "lr_scale" in entry:
        raise UsageError(f"{label} has both lr and lr_scale", hint=_FORM)
    if lr <= 0:
        raise UsageError(f"{label} has an lr, but the optimizer's is {lr}: a group's is kept in proportion to it")
    return float(own) / lr
