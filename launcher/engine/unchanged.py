"""Whether the model still trains what it uses: its parameters must be the engine's views, all of them, to the end.

Whoever gives a parameter other memory (``.to()``, ``.data =``), puts another one in its place (``load_state_dict`` by
assignment, ``module.weight = …``) or adds one would train one thing and use another, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..contract.errors import UsageError
from .model.flat import FlatUnit

_HINT = "move, convert, extend and load the model before ZeroEngine; copy_() into a parameter inside gathered()"
_POINTER = attrgetter("_cdata")


class Unchanged:
    """Every place of ``model`` that holds a parameter, as it is now."""

    def __init__(self, model: nn.Module, units: Sequence[FlatUnit]) -> None:
        full_of = {id(tensor): flat.full for flat in units for tensor in flat.tensors}
        self._modules = [(name, module._parameters) for name, module in model.named_modules() if module._parameters]
        self._counts = [len(parameters) for _, parameters in self._modules]
        self._places = [
            (parameters, key, tensor, full_of[id(tensor)])
            for _, parameters in self._modules
            for key, tensor in parameters.items()
            if tensor is not None
        ]
        self._dicts = [parameters for _, parameters in self._modules]
        self._tensors = [tensor for _, _, tensor, _ in self._places]
        self._were = self._are()

    def _are(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which parameters stand in the modules, and which memory the engine's have: read by C alone."""
        there = tuple(map(id, chain.from_iterable(map(dict.values, self._dicts))))
        with torch._C.DisableTorchFunctionSubclass():  # released parameters are asked too, without a line for each
            return there, tuple(map(_POINTER, map(Tensor.untyped_storage, self._tensors)))

    def check(self) -> None:
        """Raises :class:`UsageError` naming the first parameter that is not what it was."""
        are = self._are()
        if are == self._were:
            return
        for place, (parameters, key, tensor, full) in enumerate(self._places):
            if parameters.get(key) is not tensor:
                raise UsageError(f"parameter {self._name(place)} was replaced after ZeroEngine was made", hint=_HINT)
            if not _shares(tensor, full):
                raise UsageError(
                    f"parameter {self._name(place)} was given other memory after ZeroEngine was made", hint=_HINT
                )
        for (name, parameters), count in zip(self._modules, self._counts):  # noqa: B905 (Python 3.9 on the nodes)
            if len(parameters) != count:
                added = list(parameters)[count:]
                raise UsageError(f"parameter {_joined(name, added[0])} was added after ZeroEngine was made", hint=_HINT)
        self._were = are  # the same ones in another order

    def _name(self, place: int) -> str:
        wanted, key = self._places[place][:2]
        return next(_joined(name, key) for name, parameters in self._modules if parameters is wanted)


def _shares(tensor: Tensor, full: Tensor) -> bool:
    return bool(tensor.untyped_storage()._cdata == full.untyped_storage()._cdata)


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
