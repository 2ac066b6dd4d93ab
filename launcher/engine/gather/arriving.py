"""Stages 1 and 2: updated parameters that arrive while the next forward runs.

``step()`` sends every unit's new parameters off and returns. What no module uses alone (embeddings, the last norm)
comes first and is waited for before the model's forward or that of the module which holds it; a unit before its
modules' forward; whatever is left after the model's forward. So messages hide behind the next batch and the first
blocks, and nothing but time changes: the same bytes, the same sums.

Between ``step()`` and the next forward, parameters that are read by hand may not be there yet. What the engine and
``state_dict()`` hand out waits by itself; for the rest there is ``ZeroEngine.gathered()``. So this is done where
``zero.overlap_gather`` asks for it, or where the model's class says ``zero_read_by_forward = True``: nothing but its
own forward reads its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..model.flat import FlatUnit


class Arriving:
    """Hooks on a module that wait for each unit in time."""

    def __init__(self, module: nn.Module, units: Sequence[FlatUnit]) -> None:
        self._units = units
        self._under_way = False
        together = [flat for flat in units if not flat.unit.modules]
        module.register_forward_pre_hook(self._before(together), prepend=True)
        module.register_forward_hook(self._after_model, always_call=True)
        module.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
        for flat in units:
            for name in flat.unit.modules:
                module.get_submodule(name).register_forward_pre_hook(self._before([flat]))
        shared = {id(tensor) for flat in together for tensor in flat.tensors}
        for member in module.modules():  # a module may be called without the model's own forward
            if member is not module and any(id(p) in shared for p in member._parameters.values()):
                member.register_forward_pre_hook(self._before(together))

    def begin(self) -> None:
        """Some units are on their way."""
        self._under_way = True

    def arrive(self) -> None:
        """Returns when every unit may be read; one rank alone may call it, wherever the others are."""
        if self._under_way:
            for flat in self._units:
                flat.arrive()

    def wait(self) -> None:
        """Returns when every unit is there, and the other ranks have theirs from here."""
        if self._under_way:
            _wait(self._units)
            self._under_way = False

    def _before(self, needed: Sequence[FlatUnit]) -> Any:
        def hook(*_: Any) -> None:
            if self._under_way:
                _wait(needed)

        return hook

    def _after_model(self, *_: Any) -> None:
        self.wait()

    def _before_state_dict(self, *_: Any) -> None:
        self.arrive()


def read_by_forward(module: nn.Module) -> bool:
    """Whether the model says that nothing but its forward reads its parameters."""
    return bool(getattr(module, "zero_read_by_forward", False))


def may_outlive_a_step() -> bool:
    """Not under torch's profiler: one that ends while a message of gloo is under way ends the process (SIGSEGV)."""
    return not torch._C._autograd._profiler_enabled()


def _wait(units: Iterable[FlatUnit]) -> None:
    for flat in units:
        flat.wait()
