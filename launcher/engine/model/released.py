"""Parameters whose memory is not there (stage 3): whoever reads one from Python is told so, by its name.

A released parameter has its shape and no memory, and torch's kernels read it all the same, which ends the process. So
its class is another one until it is gathered again: torch asks that class before it does anything with the tensor. It
costs a tenth of a microsecond to change, and nothing while parameters are there: they are ``nn.Parameter`` as ever.

What autograd keeps of a parameter it reads without asking. But it compares the version with which it was kept: while
it is released that is one which no parameter has, so that a backward which comes when it is not there is an error, and
reads no freed memory (:func:`is_missed`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
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
        self._tensors = tuple(tensor for tensor in tensors if type(tensor) is nn.Parameter)
        self._counted = tuple(tensor for tensor in self._tensors if not tensor.is_inference())
        self._versions: tuple[int, ...] | None = None  # while they are released: those before
        self._gone = (_GONE,) * len(self._counted)
        for tensor, name in zip(tensors, names):  # noqa: B905 (Python 3.9 on the nodes)
            tensor._zero_released = (name, tuple(modules))  # type: ignore[attr-defined]

    def draw(self) -> None:
        self._versions = tuple(map(_version_of, self._counted))
        _set_versions(self._counted, self._gone)
        self._become(Released)

    def lift(self) -> None:
        if self._versions is not None:
            self._become(nn.Parameter)
            _set_versions(self._counted, self._versions)
            self._versions = None

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


def refuse_second_backward() -> UsageError:
    """What is said of a backward through released blocks that makes a graph."""
    return UsageError(
        "a backward through partitioned blocks makes a graph for a second one (create_graph=True), for which their "
        "parameters would not be there (stage 3)",
        hint="train with zero.stage 2, or with zero.reshard: keep, where blocks stay until zero.backward is through",
    )


def is_missed(error: RuntimeError) -> bool:
    """Whether a backward raised ``error`` because it needed a released parameter."""
    return f"is at version {_GONE};" in str(error)


def missed() -> UsageError:
    """What is said then."""
    return UsageError(
        "backward came to an operation whose parameter was not there (stage 3): it was computed where backward of its "
        "block is not expected",
        hint="let a block return what the loss needs of it; or zero.reshard: keep, or zero.stage 2",
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
_GONE = 2_000_000_011  # no parameter is written that often
_version_of = attrgetter("_version")


def _set_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    set_version: Any = torch._C._autograd._unsafe_set_version_counter
    if _OF_SEVERAL:
        set_version(tensors, versions)
    else:
        deque(map(set_version, tensors, versions), maxlen=0)


def _takes_several() -> bool:
    """Whether torch sets the versions of several tensors at once: it took one until 2.5."""
    try:
        torch._C._autograd._unsafe_set_version_counter((), ())  # type: ignore[arg-type, unused-ignore]
    except TypeError:
        return False
    return True


_OF_SEVERAL = _takes_several()
