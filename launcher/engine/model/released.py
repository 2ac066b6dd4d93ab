"""Parameters whose memory is not there (stage 3): whoever reads one from Python is told so, by its name.

A released parameter has its shape and no memory, and torch's kernels read it all the same, which ends the process. So
its class is another one until it is gathered again: torch asks that class before it does anything with the tensor. It
costs a tenth of a microsecond to change, and nothing while parameters are there: they are ``nn.Parameter`` as ever.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...contract.errors import UsageError

READ = "with zero.gathered(): inside, every parameter is whole"


class Released(nn.Parameter):
    """What a parameter is while it is partitioned. Raises :class:`UsageError` for all that needs its values."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in _WITHOUT_VALUES:
            name, modules = _first_of((args, kwargs or {}))
            raise refusal(name, modules)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


class Veil:
    """Over the parameters of a unit, whose forward is that of ``modules``."""

    def __init__(self, tensors: Sequence[nn.Parameter], names: Sequence[str], modules: Sequence[str]) -> None:
        # Tensors of a kind of their own (fake ones, a user's subclass) stay what they are.
        self._tensors = [tensor for tensor in tensors if type(tensor) is nn.Parameter]
        for tensor, name in zip(tensors, names):  # noqa: B905 (Python 3.9 on the nodes)
            tensor._zero_released = (name, tuple(modules))  # type: ignore[attr-defined]

    def draw(self) -> None:
        self._become(Released)

    def lift(self) -> None:
        self._become(nn.Parameter)

    def _become(self, kind: type[nn.Parameter]) -> None:
        # A loop without a line of Python for each: this is done four times a step.
        deque(map(setattr, self._tensors, itertools.repeat("__class__"), itertools.repeat(kind)), maxlen=0)


def refusal(name: str, modules: Sequence[str]) -> UsageError:
    """What is said of parameter ``name``, which ``modules`` use alone (none: the whole model does)."""
    if not modules:
        return UsageError(f"parameter {name} is read while it is partitioned (stage 3)", hint=READ)
    return UsageError(
        f"parameter {name} is used outside the forward of {', '.join(modules)}, where alone it is whole (stage 3)",
        hint="to read it beside training: with zero.gathered(): · where the model itself uses it elsewhere, name it in "
        f"the model's own list: zero_kept = ({name!r},); or choose units (zero.unit) that hold every use of theirs",
    )


def _first_of(values: Any) -> tuple[str, tuple[str, ...]]:
    """Name and modules of the first released parameter in nested arguments."""
    left = deque([values])
    while left:
        value = left.popleft()
        if type(value) is Released:
            found: tuple[str, tuple[str, ...]] = value._zero_released  # type: ignore[attr-defined]
            return found
        if isinstance(value, Mapping):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
    return "of the model", ()


def _without_values() -> frozenset[Callable[..., Any]]:
    """What can be asked of a tensor, or set, without its values."""
    told = (
        "shape dtype device layout ndim requires_grad grad grad_fn is_leaf itemsize nbytes output_nr retains_grad "
        "is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn is_mps is_xpu names _version "
        "_backward_hooks _post_accumulate_grad_hooks"
    )
    methods = (
        "size dim ndimension numel nelement stride is_contiguous storage_offset element_size is_floating_point "
        "is_complex is_signed is_inference get_device untyped_storage data_ptr register_hook requires_grad_ "
        "register_post_accumulate_grad_hook __hash__ __len__"
    )
    found: list[Any] = [getattr(Tensor, name).__get__ for name in told.split() if hasattr(Tensor, name)]
    found += [getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "data", "_backward_hooks")]
    found += [getattr(Tensor, name) for name in methods.split() if hasattr(Tensor, name)]
    found += [torch.is_floating_point, torch.is_complex, torch.numel]
    return frozenset(found)


_WITHOUT_VALUES = _without_values()
