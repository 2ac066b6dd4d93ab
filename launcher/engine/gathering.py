"""When the units of stage 3 are gathered and released.

A unit is gathered before its modules' forward and before their backward, and released after each. Those that
come next are fetched meanwhile, ``prefetch`` of them. Units that no module uses alone (embeddings, the last norm)
stay gathered from forward to backward, and with them what ``reshard`` says: the last unit (``keep_last``), none
(``after_forward``), or all (``keep``). In activation recomputation a forward runs inside backward: it gathers, and
leaves releasing to that backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from ..contract.errors import UsageError
from .flat import FlatUnit


class Gathering:
    """Hooks on a module that gather each unit in time. ``watch``: the first forward is held against the rule."""

    def __init__(
        self, module: nn.Module, units: Sequence[FlatUnit], *, prefetch: int, reshard: str, watch: bool = False
    ) -> None:
        self.units = units
        self.prefetch = prefetch
        self.in_backward = False
        self.pinned = 0  # > 0 inside ``gathered()``: nothing is released
        blocks: dict[tuple[str, ...], list[int]] = {}
        for number, flat in enumerate(units):
            if flat.unit.modules:
                blocks.setdefault(flat.unit.modules, []).append(number)
        self._blocks = list(blocks.values())
        self._root = [i for i, flat in enumerate(units) if not flat.unit.modules]
        staying = {"keep": len(self._blocks), "keep_last": 1, "after_forward": 0}[reshard]
        self._stays = [at >= len(self._blocks) - staying for at in range(len(self._blocks))]
        self._position = {number: at for at, row in enumerate(self._blocks) for number in row}
        self._trainable = [
            sum(len(units[i].unit.placed) for i in row if units[i].unit.trainable) for row in self._blocks
        ]
        self._waiting = list(self._trainable)  # gradients of each block that backward still owes
        self._handles: list[RemovableHandle] = []
        for at, names in enumerate(blocks):
            for name in names:
                member = module.get_submodule(name)
                before = self._before_forward(at, first=name == names[0])
                self._handles.append(member.register_forward_pre_hook(before))
                self._handles.append(member.register_forward_hook(self._after_forward(at, last=name == names[-1])))
        self._handles.append(module.register_forward_pre_hook(self._before_model, prepend=True))
        self._handles.append(module.register_forward_hook(self._after_model))
        if watch and self._blocks:
            _FirstForward(module, units)

    @property
    def kept(self) -> list[int]:
        """Units that stay gathered from forward to backward."""
        rows = (row for row, stays in zip(self._blocks, self._stays) if stays)  # noqa: B905 (Python 3.9 on the nodes)
        return self._root + [number for row in rows for number in row]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- hooks ---------------------------------------------------------------------------------------

    def _before_model(self, *_: Any) -> None:
        for number in self._root:
            self.units[number].gather()
        if self._blocks and self.prefetch and not self.in_backward:
            self._fetch(0)
        for number in self._root:
            self.units[number].wait()

    def _after_model(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.release_all()

    def _before_forward(self, at: int, *, first: bool) -> Any:
        def hook(_module: nn.Module, inputs: Any) -> None:
            self._fetch(at)
            if first and not self._trainable[at] and torch.is_grad_enabled():
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

    def _after_forward(self, at: int, *, last: bool) -> Any:
        def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            if self.in_backward:
                return  # recomputation: backward of this block follows at once
            if torch.is_grad_enabled():
                tensors = [t for t in _tensors(outputs) if t.requires_grad]
                if tensors:
                    torch.autograd.graph.register_multi_grad_hook(tensors, self._before_backward(at), mode="any")
                if self._stays[at] and tensors:
                    return
            if last:
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


class _FirstForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of the first forward: a rule may release what is used once more elsewhere, and then
    the operation would read memory that is not there."""

    def __init__(self, module: nn.Module, units: Sequence[FlatUnit]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units
        self._inside = False
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing compiled here, and skipping it would import a compiler

    def _begin(self, *_: Any) -> None:
        self._inside = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, *_: Any) -> None:
        if self._inside:
            self._inside = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_iter(args):
            if isinstance(value, Tensor) and value.numel() and not value.untyped_storage().nbytes():
                self._refuse(value)
        return function(*args, **(kwargs or {}))

    def _refuse(self, used: Tensor) -> None:
        storage = used.untyped_storage()._cdata
        for flat in self._units:
            if flat.full.untyped_storage()._cdata == storage:
                at = used.storage_offset()
                placed = next(p for p in flat.unit.placed if p.start <= at < p.stop)
                raise UsageError(
                    f"zero.unit: parameter {placed.parameter.name} is used outside the forward of "
                    f"{', '.join(flat.unit.modules)}, after its unit was released",
                    hint=f"name it in the model's own list: zero_kept = ({placed.parameter.name!r},); or choose units "
                    "that hold every use of their parameters",
                )
