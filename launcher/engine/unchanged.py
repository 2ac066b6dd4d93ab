"""Whether the model still trains what it uses: its parameters must be the engine's views, all of them, to the end.

Whoever gives a parameter other memory (``.to()``, ``.data =``), puts another one in its place (``load_state_dict`` by
assignment, ``module.weight = …``), adds one, or a module that holds some (a new head, ``layers.append``), or unfreezes
one, would train one thing and use another, without a word. Modules that are taken out or stand in another order are
parameters that are not used, or used in another order.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

from ..contract.errors import UsageError
from .model.flat import FlatUnit
from .model.released import Released

_FIRST = "move, convert, extend and load the model before ZeroEngine"
_PARAMETERS, _CHILDREN = attrgetter("_parameters"), attrgetter("_modules")
_POINTER, _WANTS_GRADIENT = attrgetter("_cdata"), attrgetter("requires_grad")


class Unchanged:
    """Every place of ``model`` that holds a parameter, and every module, as they are now."""

    def __init__(self, model: nn.Module, units: Sequence[FlatUnit]) -> None:
        self._model = model
        self._tensors = [tensor for flat in units for tensor in flat.tensors]
        self._full_of = {id(tensor): flat.full for flat in units for tensor in flat.tensors}
        self._frozen = [tensor for tensor in self._tensors if not tensor.requires_grad]
        later = "later zero.load_weights(FILE) or zero.load(FOLDER) gives parameters other values"
        if all(flat.shard is None and flat.master is None for flat in units):
            later += ", or copy_() into them inside gathered(), on all ranks alike"
        self._hint = f"{_FIRST}; {later}"
        self._look()
        _LIVING.add(self)

    def _look(self) -> None:
        named = list(self._model.named_modules())
        self._modules = [module for _, module in named]  # held, so that nothing new gets the address of an old one
        self._names = [name for name, _ in named]
        self._held = [dict(module._parameters) for module in self._modules]
        self._used = [t for parameters in self._held for t in parameters.values() if t is not None]
        self._were = self._are()

    def _are(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Which modules and parameters stand in the modules, and which memory the engine's have: read by C alone."""
        children = tuple(map(id, chain.from_iterable(map(dict.values, map(_CHILDREN, self._modules)))))
        there = tuple(map(id, chain.from_iterable(map(dict.values, map(_PARAMETERS, self._modules)))))
        with torch._C.DisableTorchFunctionSubclass():  # released parameters are asked too, without a line for each
            return children, there, tuple(map(_POINTER, map(Tensor.untyped_storage, self._used)))

    def check(self) -> None:
        """Raises :class:`UsageError` naming the first parameter that is not what it was, or that was not there."""
        with torch._C.DisableTorchFunctionSubclass():
            unfrozen = any(map(_WANTS_GRADIENT, self._frozen))
        if unfrozen:
            raise self._unfrozen()
        if self._are() != self._were:
            self._compare()
            self._look()  # some were taken out, or stand in another order

    def _unfrozen(self) -> UsageError:
        tensor = next(tensor for tensor in self._frozen if tensor.requires_grad)
        name = next((n for n, p in self._model.named_parameters() if p is tensor), "that was taken out of the model")
        return UsageError(
            f"parameter {name} was frozen when ZeroEngine was made and wants gradients now: it would not be trained",
            hint="make it trainable before ZeroEngine and freeze it then: requires_grad_(False), and (True) when it is "
            "to train; what has no gradient in a step is not changed by it",
        )

    def _compare(self) -> None:
        before = {id(module): parameters for module, parameters in zip(self._modules, self._held)}  # noqa: B905
        for name, module in self._model.named_modules():
            old = before.get(id(module))
            for key, tensor in module._parameters.items():
                if tensor is not None and (old is None or key not in old):
                    self._refuse_foreign(name, key, tensor, new_module=old is None)
            for key, tensor in (module._parameters if old is None else old).items():
                now = module._parameters.get(key)
                if now is not tensor:
                    what = "taken away" if now is None else "added" if tensor is None else "replaced"
                    raise self._refusal(name, key, what)
                if tensor is not None and not _shares(tensor, self._full_of[id(tensor)]):
                    raise self._refusal(name, key, "given other memory")

    def _refuse_foreign(self, name: str, key: str, tensor: Tensor, *, new_module: bool) -> None:
        if not new_module:
            raise self._refusal(name, key, "added")
        if id(tensor) not in self._full_of:
            raise UsageError(
                f"module {name} came after ZeroEngine was made: its parameter {_joined(name, key)} is not trained",
                hint=f"{_FIRST}; to go on with what was trained: zero.save, the new model, a new ZeroEngine for it",
            )

    def _refusal(self, module: str, key: str, what: str) -> UsageError:
        return UsageError(f"parameter {_joined(module, key)} was {what} after ZeroEngine was made", hint=self._hint)

    def holds(self, tensor: Tensor) -> bool:
        return id(tensor) in self._full_of


_LIVING: weakref.WeakSet[Unchanged] = weakref.WeakSet()
"""One of each engine that has not gone."""


def not_free(model: nn.Module) -> UsageError | None:
    """Why ``model`` cannot be given to an engine: one that lives holds it, or one at stage 3 held it; None: it can."""
    named = list(model.named_parameters())
    found = _first_held(named)
    if found is not None:
        gc.collect()  # who lets go of an engine has not collected it yet, where something of it refers to it
        found = _first_held(named)
    if found is not None:
        return UsageError(
            f"parameter {found} belongs to a ZeroEngine already",
            hint="train by that one, or let go of it first (del): below stage 3 the model stays whole, with its values",
        )
    gone = next((name for name, tensor in named if type(tensor) is Released), None)
    if gone is not None:
        return UsageError(
            f"parameter {gone} has no values: it was partitioned by a ZeroEngine (stage 3) that is gone",
            hint="build the model anew, and read the values with zero.load(FOLDER) or zero.load_weights(FILE)",
        )
    return None


def _first_held(named: Sequence[tuple[str, Tensor]]) -> str | None:
    living = list(_LIVING)
    return next((name for name, tensor in named if any(one.holds(tensor) for one in living)), None)


def _shares(tensor: Tensor, full: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.untyped_storage()._cdata == full.untyped_storage()._cdata)


def _joined(module: str, key: str) -> str:
    return f"{module}.{key}" if module else key
