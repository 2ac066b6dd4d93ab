"""When the units of stage 3 are gathered and released.

A block is gathered before its forward and before its backward, and released after each. The unit that
comes next is fetched meanwhile. Units outside blocks (embeddings, the last norm) and the last block stay
gathered from forward to backward. In activation recomputation a forward runs inside backward: it
gathers, and leaves releasing to that backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .flat import FlatUnit


class Gathering:
    """Hooks on a module that gather each unit in time. ``units[i]`` is used by ``modules[i]``."""

    def __init__(
        self, module: nn.Module, units: Sequence[FlatUnit], modules: Sequence[nn.Module | None], *, prefetch: int
    ) -> None:
        self.units = units
        self.prefetch = prefetch
        self.in_backward = False
        self.pinned = 0  # > 0 inside ``gathered()``: nothing is released
        blocks: dict[int, list[int]] = {}
        for number, owner in enumerate(modules):
            if owner is not None:
                blocks.setdefault(id(owner), []).append(number)
        self._blocks = list(blocks.values())
        self._kept = [i for i, owner in enumerate(modules) if owner is None]
        self._position = {number: at for at, row in enumerate(self._blocks) for number in row}
        self._trainable = [
            sum(len(units[i].unit.placed) for i in row if units[i].unit.trainable) for row in self._blocks
        ]
        self._waiting = list(self._trainable)  # gradients of each block that backward still owes
        self._handles: list[RemovableHandle] = []
        for at, row in enumerate(self._blocks):
            owner = modules[row[0]]
            assert owner is not None
            self._handles.append(owner.register_forward_pre_hook(self._before_forward(at)))
            self._handles.append(owner.register_forward_hook(self._after_forward(at)))
        self._handles.append(module.register_forward_pre_hook(self._before_model, prepend=True))
        self._handles.append(module.register_forward_hook(self._after_model))

    @property
    def kept(self) -> list[int]:
        """Units that stay gathered from forward to backward."""
        return self._kept + (self._blocks[-1] if self._blocks else [])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- hooks ---------------------------------------------------------------------------------------

    def _before_model(self, *_: Any) -> None:
        for number in self._kept:
            self.units[number].gather()
        if self._blocks and not self.in_backward:
            self._fetch(0)
        for number in self._kept:
            self.units[number].wait()

    def _after_model(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.release_all()

    def _before_forward(self, at: int) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            self._fetch(at)
            if not self._trainable[at] and torch.is_grad_enabled():
                # Frozen: no gradient of its own says when backward is through, its input's does.
                tensors = [t for t in _tensors(inputs) if t.requires_grad]
                if tensors:
                    torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: self._release(at), mode="all")
            if not self.in_backward:
                for ahead in range(1, self.prefetch + 1):
                    if at + ahead < len(self._blocks):
                        self._fetch(at + ahead)
            self._wait(at)

        return hook

    def _after_forward(self, at: int) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if self.in_backward:
                return  # recomputation: backward of this block follows at once
            if torch.is_grad_enabled():
                tensors = [t for t in _tensors(outputs) if t.requires_grad]
                if tensors:
                    torch.autograd.graph.register_multi_grad_hook(tensors, self._before_backward(at), mode="any")
                if at == len(self._blocks) - 1 and tensors:
                    return
            self._release(at)

        return hook

    def _before_backward(self, at: int) -> Any:
        def hook(_gradient: Tensor) -> None:
            self._fetch(at)
            for ahead in range(1, self.prefetch + 1):
                if at - ahead >= 0:
                    self._fetch(at - ahead)
            self._wait(at)

        return hook

    # --- what the engine says --------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward = True
        self._waiting = list(self._trainable)

    def arrived(self, number: int) -> None:
        """A gradient of unit ``number`` is complete; the last one of a block releases it."""
        at = self._position.get(number)
        if at is not None:
            self._waiting[at] -= 1
            if self._waiting[at] == 0:
                self._release(at)

    def end_backward(self) -> None:
        self.in_backward = False
        self.release_all()

    def release_all(self) -> None:
        if not self.pinned:
            for unit in self.units:
                unit.release()

    def gather_all(self) -> None:
        for unit in self.units:
            unit.gather()
        for unit in self.units:
            unit.wait()

    # --- one block -------------------------------------------------------------------------------------

    def _fetch(self, at: int) -> None:
        for number in self._blocks[at]:
            self.units[number].gather()

    def _wait(self, at: int) -> None:
        for number in self._blocks[at]:
            self.units[number].wait()

    def _release(self, at: int) -> None:
        if not self.pinned:
            for number in self._blocks[at]:
                self.units[number].release()


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a module's output: nested lists, tuples, mappings and dataclass-like outputs."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    if hasattr(value, "__dict__"):
        return [t for v in vars(value).values() for t in _tensors(v)]
    return []
