"""A run on nothing: tensors with shapes and no memory, and a process group in which nobody else is.

:class:`Nothing` is torch's FakeTensorMode with three shortcuts, without which most of a simulation's time is spent
on operations that make nothing: views are taken directly, an operation in place returns its own argument, and a
collective its output. And it answers when values are read (a norm, a flag, a loss), which fake tensors have not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Store
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from ..watching.track import VIEWS, VIEWS_OF_MANY, Ledger, makes_storages, see_all

_IN_PLACE = {
    "add_", "sub_", "mul_", "div_", "copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "clamp_",
    "lerp_", "addcmul_", "addcdiv_", "sqrt_", "neg_", "masked_fill_", "trunc_normal_",
}  # fmt: skip
_OTHER, _VIEW, _SELF, _NONE, _OUT, _SCALAR, _COLLECTIVE, _MADE = range(8)
_CPU, _META = torch.device("cpu"), torch.device("meta")
_aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default


class _Store(Store):
    """A group of one process has nothing to store."""


_registered: list[bool] = []


def _group(about: Any, options: Any) -> Any:
    make: Any = FakeProcessGroup._create_internal
    return make(about.group_rank, about.group_size, options)


def join(rank: int, world_size: int) -> None:
    """A default process group of ``world_size`` ranks in which this process is ``rank``, and no other exists."""
    if not _registered:
        dist.Backend.register_backend("fake", _group, extended_api=True, devices=["cpu"])
        _registered.append(True)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=_Store())


class Nothing(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Everything inside happens on nothing, and is told to ``ledger``."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ledger = ledger
        self._kinds: dict[Any, int] = {}
        self._works: dict[Any, Any] = {}
        self._inside = False
        self._like: dict[torch.device, dict[str, Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing compiled here, and skipping it would import a compiler

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE_OF and type(args[0]) is FakeTensor:  # by far the most frequent
            return args[0].fake_device
        kwargs = kwargs or {}
        kind = self._kinds.get(function)
        if kind is None:
            kind = self._kinds[function] = _kind(function)
        if kind != _OTHER:
            done, result = self._shortcut(kind, function, args, kwargs)
            if done:
                return result
        if self._inside:  # a step of an operation that is made of others: only its end counts
            return self.dispatch(function, types, args, kwargs)
        self._inside = True
        try:
            result = self.dispatch(function, types, args, kwargs)
        finally:
            self._inside = False
        if kind == _COLLECTIVE:
            self._works[function] = (result[1], True) if isinstance(result, tuple) else (result, False)
        elif makes_storages(function):
            see_all(self.ledger, result)
        return result

    def _shortcut(self, kind: int, function: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(whether there is one, its result)."""
        if kind == _VIEW:
            if type(args[0]) is FakeTensor:
                with in_kernel_invocation_manager(self):
                    view = function(*args, **kwargs)
                device = args[0].fake_device
                if isinstance(view, torch.Tensor):
                    return True, self._wrap(view, device)
                return True, [self._wrap(one, device) for one in view]
        elif kind == _MADE and not self._inside and _is_plain(kwargs):
            device = kwargs.get("device") or (args[0].fake_device if isinstance(args[0], FakeTensor) else _CPU)
            with in_kernel_invocation_manager(self):
                made = function(*args, **{**kwargs, "device": _META})
            self.ledger.saw(made.untyped_storage())
            return True, self._wrap(made, device)
        elif kind == _SELF:
            return type(args[0]) is FakeTensor, args[0]
        elif kind == _NONE:
            return True, None
        elif kind == _OUT:
            return bool(kwargs["out"].numel()), kwargs["out"]
        elif kind == _SCALAR:
            if type(args[0]) is FakeTensor and args[0].constant is None:
                return True, _value(args[0].dtype)
        elif function in self._works:
            work, beside_output = self._works[function]
            return True, (args[0], work) if beside_output else work
        return False, None

    def _wrap(self, inner: torch.Tensor, device: torch.device) -> FakeTensor:
        """``FakeTensor(self, inner, device)``, made like the first one of this device."""
        like = self._like.get(device)
        if like is None:
            made = FakeTensor(self, inner, device)
            self._like[device] = dict(vars(made))
            return made
        made = torch.Tensor._make_subclass(
            FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=device
        )
        vars(made).update(like)
        return made


def _is_plain(kwargs: Any) -> bool:
    """Whether an operation makes an ordinary tensor in host memory."""
    return (
        kwargs.get("layout") in (None, torch.strided)
        and kwargs.get("device") in (None, _CPU)
        and not kwargs.get("pin_memory")
        and not kwargs.get("non_blocking")
    )


def _value(dtype: torch.dtype) -> float | bool | int:
    """What a value is taken to be where a run would read one: finite, nothing to do, one."""
    if dtype.is_floating_point:
        return 1.0
    return False if dtype == torch.bool else 1


def _kind(function: Any) -> int:
    if function is _aten._local_scalar_dense.default:
        return _SCALAR
    namespace = getattr(function, "namespace", "")
    if namespace == "c10d":
        return _COLLECTIVE
    if namespace != "aten":
        return _OTHER
    name = function._schema.name.split("::")[-1]
    returns = function._schema.returns
    if name in _IN_PLACE:
        return _SELF
    if name.startswith(("_foreach_", "_fused_")) and name.endswith("_") and not returns:
        return _NONE
    if function._overloadname.endswith("out") and len(returns) == 1 and "out" in {
        a.name for a in function._schema.arguments
    }:  # fmt: skip
        return _OUT
    if function in (_aten.empty.memory_format, _aten._to_copy.default):
        return _MADE
    if name in VIEWS or name in VIEWS_OF_MANY:
        return _VIEW
    return _OTHER
