"""What an engine hangs onto a model: it goes when the engine does, and copies of the model come without it.

Hooks of modules and parameters, and the forward of recomputed blocks. They know the engine weakly, or not at all: a
parameter's hooks stand where Python's collector does not see them, so one that held the engine would hold it for ever.

``copy.deepcopy(model)``, ``pickle`` and ``torch.save(model)`` ask each module for its state. What stands in a module's
``__getstate__`` here leaves out what is the engine's: the copy is a plain model, and needs no engine to be read.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .activations.recompute import forward_without
from .gather.arriving import Arriving

_STATE = "__getstate__"


class Attached:
    """Made before the engine's hooks are; ``model`` has no others until :meth:`complete` is called."""

    def __init__(self, model: nn.Module) -> None:
        self.handles: list[RemovableHandle] = []
        """Hooks of parameters."""
        self.under_way: Arriving | None = None
        """Whose parameters may be on their way still, for which the model's next forward would have waited."""
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._first = RemovableHandle.next_id
        self._end: int | None = None

    def complete(self) -> None:
        """All hooks are there: copies leave them out from now on."""
        self._end = RemovableHandle.next_id
        ours = self._ours()
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module)[_STATE] = _state_of(reference, ours, self.under_way)

    def remove(self) -> None:
        """Everything from everywhere; the model is plain again."""
        if self.under_way is not None:
            self.under_way.arrive()
        ours = self._ours()
        for handle in self.handles:
            handle.remove()
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop(_STATE, None)
                forward_without(vars(module))
                for hooks in _hooks_in(vars(module), ours).values():
                    for number in [number for number in hooks if number in ours]:
                        del hooks[number]

    def _ours(self) -> range:
        end = RemovableHandle.next_id if self._end is None else self._end
        return range(self._first, end)  # torch numbers all hooks of a process in one row


def _state_of(reference: weakref.ref[nn.Module], ours: range, under_way: Arriving | None) -> Callable[[], Any]:
    """What copies and files take over of a module; its parameters arrive before."""

    def state() -> Any:
        if under_way is not None:
            under_way.arrive()
        module = reference()
        own = getattr(type(module), _STATE, None)  # its author's; from Python 3.11 on every class has one
        found = vars(module) if own is None else own(module)
        if isinstance(found, tuple) and found and isinstance(found[0], dict):  # beside __slots__
            return (_plain(found[0], ours), *found[1:])
        return _plain(found, ours) if isinstance(found, dict) else found

    return state


def _plain(state: Mapping[str, Any], ours: range) -> dict[str, Any]:
    plain = {key: value for key, value in state.items() if key != _STATE}
    forward_without(plain)
    for key, hooks in _hooks_in(plain, ours).items():
        plain[key] = OrderedDict((number, hook) for number, hook in hooks.items() if number not in ours)
    return plain


def _hooks_in(state: Mapping[str, Any], ours: range) -> dict[str, Any]:
    """A module's collections of hooks, by the attribute, that hold some of ``ours``."""
    found = {key: value for key, value in state.items() if "hooks" in key and isinstance(value, OrderedDict)}
    return {key: value for key, value in found.items() if any(number in ours for number in value)}
