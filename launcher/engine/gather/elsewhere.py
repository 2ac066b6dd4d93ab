"""Uses of parameters that will not be there when backward comes, or whose values would be lost: refused by name.

At stage 3 reading a released parameter is refused by itself (``engine.model.released``). What reads one while it is
there, and needs it again in backward, when it is not, or an alias of it that was taken then, no class of its own can
tell: so the first forward that trains, and what follows it up to backward, is watched operation by operation.
``state_dict`` and ``load_state_dict`` say what to do instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_iter

from ...contract.errors import UsageError
from ..model.flat import FlatUnit
from ..model.released import READ, missed, refusal, refuse_second_backward

if TYPE_CHECKING:
    from .gathering import Gathering


class FirstForward(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation of the first forward that trains, and of what is computed from it until backward.

    A unit's parameter may be used inside its modules' forward: elsewhere its memory is not there, or will not be when
    backward comes.
    """

    def __init__(self, module: nn.Module, units: Sequence[FlatUnit], gathering: Gathering) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gathering = weakref.ref(gathering)  # torch's stack keeps this object where no backward ever comes
        self._on = False  # whether it stands on torch's stack
        self._looking = False
        self._of_storage = {flat.full.untyped_storage()._cdata: i for i, flat in enumerate(units)}
        self._handles = [
            module.register_forward_pre_hook(self._begin, prepend=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing compiled here, and skipping it would import a compiler

    def _begin(self, *_: Any) -> None:
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]
        self._looking = True

    def _end(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        # Beside another mode, which ends before this one would, the model's forward is all that can be watched.
        if not torch.is_grad_enabled() or outputs is None or len(_get_current_dispatch_mode_stack()) > 1:
            self._leave()

    def _leave(self) -> None:
        self._looking = False
        if self._on and self._is_last():
            self._on = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _is_last(self) -> bool:
        stack = _get_current_dispatch_mode_stack()
        return bool(stack) and stack[-1] is self

    def stop(self) -> None:
        """Backward begins: all was seen once."""
        self._leave()
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._looking:
            for value in tree_iter((args, kwargs)):
                if isinstance(value, Tensor) and torch._C._has_storage(value) and value.numel():
                    number = self._of_storage.get(value.untyped_storage()._cdata)
                    gathering = None if number is None else self._gathering()
                    if number is not None and gathering is not None:
                        self._look(gathering, number, value)
        return function(*args, **(kwargs or {}))

    def _look(self, gathering: Gathering, number: int, used: Tensor) -> None:
        gone = not used.untyped_storage().nbytes()
        # Backward needs again what an operation on a parameter keeps; the engine's own operations are on no parameter.
        later = isinstance(used, nn.Parameter) and torch.is_grad_enabled() and not gathering.stays(number)
        if not gone and not later:
            return
        if torch._C._current_graph_task_id() != -1:  # a backward that is not the engine's
            raise refuse_second_backward() if torch.is_grad_enabled() else missed()
        unit = gathering.units[number].unit
        at = used.storage_offset()
        name = next(p.parameter.name for p in unit.placed if p.start <= at < p.stop)
        raise refusal(name, unit.modules)


def guard_state(
    module: nn.Module, units: Sequence[FlatUnit], gathering: Gathering | None, *, before: Callable[[], None]
) -> None:
    """``state_dict()`` of ``module`` or of a part of it is refused where parameters are partitioned,
    ``load_state_dict()`` where what it writes would be lost; else it comes after ``before()``."""
    lost = ""
    if gathering is not None:
        lost = "each rank keeps a shard of the parameters (stage 3)"
    elif any(flat.master is not None for flat in units):
        lost = "the next step would overwrite the values from its fp32 master"

    def saving(part: nn.Module, prefix: str, keep_vars: bool) -> None:
        # With keep_vars the parameters themselves are asked for, for their names or shapes.
        if gathering is not None and not (keep_vars or gathering.pinned) and _any_parameter(part):
            raise UsageError("state_dict() was called while parameters are partitioned (stage 3)", hint=READ)

    def loading(part: nn.Module, *_: Any) -> None:
        before()
        if lost and _any_parameter(part):
            raise UsageError(
                f"load_state_dict() was called on a model that ZeroEngine holds: {lost}",
                hint="zero.load_weights(FILE) reads safetensors, zero.load(FOLDER) a checkpoint; or load before "
                "ZeroEngine is made",
            )

    for part in module.modules():
        part.register_state_dict_pre_hook(saving)  # type: ignore[no-untyped-call]
        # Its public name came after torch 2.4.
        part._register_load_state_dict_pre_hook(loading, with_module=True)  # type: ignore[no-untyped-call]


def _any_parameter(module: nn.Module) -> bool:
    return any(value is not None for value in module._parameters.values())
