"""Building a model that is larger than a rank: the factory runs without memory for its large tensors.

While the factory runs, every large tensor is made on the meta device and the operations on it are noted,
each with the state of the random generator before it. Later any one tensor is made whole by running its
own operations again, with the very numbers that an ordinary construction would have drawn; it is then
sliced and dropped. At no time is more than one large parameter whole.

Random operations are carried out once while recording, into scratch memory that is one piece for all of them: that
is what moves the generator on exactly as an ordinary construction does.

A factory may also build on the meta device itself. What its construction leaves without values is then filled as its
author would: by the model's ``init_weights()``, or module by module, in module order, by ``init_weights()`` or
``reset_parameters()`` of each that lacks some.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from ...contract.errors import UsageError

LARGE = 1024
"""Elements from which on a tensor is deferred."""


DRAWN_BY_VALUE = {"poisson", "binomial", "multinomial", "_standard_gamma", "_sample_dirichlet"}
"""Operations whose use of the generator depends on values, which a deferred tensor has not."""


class NotDeferred(Exception):
    """This factory cannot be deferred; says why."""


class _Scratch:
    """Stands in for deferred tensors of one operation after the other: one piece, as large as the largest needs.

    A tensor each, taken and freed between what a model keeps, makes the heap grow by the whole model (``engine.heap``).
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._used = 0

    def begin(self) -> Callable[[Tensor], Tensor]:
        """What makes the tensors of the next operation; those of the one before must not be used any more."""
        self._used = 0
        return self._like

    def end(self) -> None:
        self._memory = self._memory.new_empty(0)

    def _like(self, meta: Tensor) -> Tensor:
        """Zeros of the same shape and strides: random kernels treat dense and strided tensors differently."""
        reach = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride()))  # noqa: B905 (Python 3.9)
        nbytes = meta.element_size() * (reach if meta.numel() else 0)
        start = -(-self._used // 64) * 64
        if start + nbytes > self._memory.numel():
            self.end()  # another tensor of this operation may still hold it
            self._memory, start = self._memory.new_empty(nbytes), 0
        self._used = start + nbytes
        piece = self._memory[start : start + nbytes].zero_().view(meta.dtype)
        return piece.as_strided(meta.shape, meta.stride(), piece.storage_offset())


@dataclass
class _Operation:
    """One call as it was made; ``reads`` and ``writes`` are storages of deferred tensors."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: Any
    reads: frozenset[int]
    writes: frozenset[int]
    random: Tensor | None


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows which tensors made inside were only allocated: nothing wrote into them yet."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bare: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run_watched(function, args, dict(kwargs or {}))

    def _run_watched(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        if function.__name__.startswith(("empty", "new_empty")):
            self._bare.update({_key(t): t.untyped_storage() for t in _tensors(result)})
        elif self._bare:
            for place, argument in enumerate(function._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[place] if place < len(args) else kwargs.get(argument.name)
                    for tensor in _tensors(written):
                        self._bare.pop(_key(tensor), None)
        return result

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether anything but an allocation wrote into the storage of ``tensor``."""
        return _key(tensor) not in self._bare


def _refuse_generators(args: Any, kwargs: Any) -> None:
    """What draws from torch's own generator is done again from its state; another one has moved on by then."""
    if any(isinstance(value, torch.Generator) for value in tree_iter((args, kwargs))):
        raise NotDeferred("it draws from a generator of its own")


class Recording(Watching):  # type: ignore[no-untyped-call]
    """Defers large tensors made inside; :meth:`whole` makes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[_Operation] = []
        self._filled: set[int] = set()
        self._alive: list[Any] = []  # storages, so that their addresses stay theirs
        self._scratch = _Scratch()
        self._running: tuple[Any, Any] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        reads = frozenset(_key(t) for t in _metas((args, kwargs)))
        if not reads and not _makes_large(function, args, kwargs):
            return self._run_watched(function, args, kwargs)
        state = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            _refuse_generators(args, kwargs)
            if reads and function.overloadpacket.__name__ in DRAWN_BY_VALUE:
                raise NotDeferred(f"what {function} draws depends on values")
            state = torch.get_rng_state()
            self._draw(function, args, kwargs)
        outputs = function(*args, **{**kwargs, **({} if reads else {"device": torch.device("meta")})})
        made = [t for t in tree_iter(outputs) if isinstance(t, Tensor)]
        written = {_key(t) for t in made if not _is_view(function)}
        self._alive += [t.untyped_storage() for t in made]
        self._note(_Operation(function, args, kwargs, outputs, reads, frozenset(written), state))
        return outputs

    def _draw(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Moves the generator on as the operation does."""
        self._running = function, args
        _run(function, args, kwargs, self._scratch.begin())
        self._running = None

    @property
    def at(self) -> str:
        """What is being carried out, for people."""
        if self._running is None:
            return "recorded"
        function, args = self._running
        shapes = [list(t.shape) for t in _tensors(args)] or [list(a) for a in args if isinstance(a, (list, tuple))]
        name = getattr(function, "__name__", str(function))
        return f"recorded, at {name} of {' x '.join(map(str, shapes[0])) if shapes else 'a tensor'}"

    def end(self) -> None:
        """The factory is through."""
        self._scratch.end()
        self._running = None

    def _note(self, operation: _Operation) -> None:
        """With aliases of its tensors: a parameter may be given another storage later (``model.to(dtype)``)."""
        args, kwargs, outputs = tree_map(_alias, (operation.args, operation.kwargs, operation.outputs))
        self._operations.append(replace(operation, args=args, kwargs=kwargs, outputs=outputs))
        if "empty" not in str(operation.function):
            self._filled |= operation.writes

    def noted(self, function: Any) -> Any:
        """``function(tensor, …)``, which fills ``tensor``, as one operation of the record."""

        @functools.wraps(function)
        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.device.type != "meta":
                filled: Tensor = function(tensor, *args, **kwargs)
                return filled
            _refuse_generators(args, kwargs)
            state = torch.get_rng_state()
            key = frozenset({_key(tensor)})
            with torch.utils._python_dispatch._disable_current_modes():
                self._draw(function, (tensor, *args), kwargs)
                self._note(_Operation(function, (tensor, *args), kwargs, tensor, key, key, state))
            return tensor

        return fill

    def is_filled(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._filled if tensor.device.type == "meta" else super().is_filled(tensor)

    def whole(self, tensor: Tensor) -> Tensor:
        """The values that ``tensor`` (deferred, or not) would have had."""
        if tensor.device.type != "meta":
            return tensor.detach()
        wanted = {_key(tensor)}
        chosen: list[_Operation] = []
        for operation in reversed(self._operations):
            if (operation.writes or operation.reads) & wanted:
                wanted |= operation.reads
                chosen.append(operation)
        real: dict[int, Tensor] = {}
        kept = torch.get_rng_state()
        for operation in reversed(chosen):
            self._run_again(operation, real)
        torch.set_rng_state(kept)
        return _as_real(tensor, real)

    def _run_again(self, operation: _Operation, real: dict[int, Tensor]) -> None:
        if operation.random is not None:
            torch.set_rng_state(operation.random)
        outputs = _run(operation.function, operation.args, operation.kwargs, lambda t: _as_real(t, real))
        made = zip(_tensors(operation.outputs), _tensors(outputs))  # noqa: B905 (Python 3.9 on the nodes)
        for meta, value in made:
            real.setdefault(_key(meta), value)


def _alias(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.device.type == "meta" else value


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in tree_iter(value) if isinstance(t, Tensor)]


def _metas(value: Any) -> list[Tensor]:
    return [t for t in _tensors(value) if t.device.type == "meta"]


def _makes_large(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is a factory call (``empty``, ``randn``, …) for a large CPU tensor."""
    if _tensors((args, kwargs)) or "device" not in {a.name for a in function._schema.arguments}:
        return False
    device = torch.device(kwargs.get("device") or "cpu").type
    if device == "meta":  # made like a deferred tensor
        return True
    if device != "cpu":
        return False
    shape = args[0] if args and isinstance(args[0], (list, tuple)) else None
    if shape is None or not all(isinstance(n, int) for n in shape):
        return False
    numel = 1
    for n in shape:
        numel *= n
    return numel >= LARGE


def _is_view(function: Any) -> bool:
    returns = function._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _run(function: Any, args: Any, kwargs: dict[str, Any], real: Callable[[Tensor], Tensor]) -> Any:
    def value(x: Any) -> Any:
        return real(x) if isinstance(x, Tensor) and x.device.type == "meta" else x

    named = tree_map(value, kwargs)
    if named.get("device") is not None and torch.device(named["device"]).type == "meta":
        named["device"] = torch.device("cpu")
    with torch.no_grad():
        return function(*tree_map(value, args), **named)


def _as_real(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real tensor at the same place of the same storage."""
    base = real[_key(meta)]
    return torch.as_strided(base, meta.shape, meta.stride(), meta.storage_offset())


def record(factory: Callable[[], nn.Module]) -> tuple[nn.Module, Recording]:
    """The factory's model with large tensors on the meta device, and what makes them real.

    Raises :class:`NotDeferred`, with the random generator as it was, for a factory that looks at its values
    while it builds, or fills a tensor in a way that cannot be noted. Memory that is refused is no such reason: that
    error goes on as it is.
    """
    recording = Recording()
    state = torch.get_rng_state()
    try:
        with _init_functions_noted(recording), recording, memory_told(lambda: f"the model was {recording.at}"):
            model = factory()
            _fill(model, recording)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type == "meta" and not recording.is_filled(tensor):
                raise NotDeferred(f"how {name} gets its first values could not be noted")
    except BaseException as error:
        torch.set_rng_state(state)
        if _wants_values(error) or (isinstance(error, RuntimeError) and not _is_memory(error)):
            raise NotDeferred((str(error).strip() or type(error).__name__).splitlines()[0]) from error
        raise
    finally:
        recording.end()
    return model, recording


@contextmanager
def memory_told(what: Callable[[], str]) -> Iterator[None]:
    """An error that memory was refused says what was being done, and goes on as it is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if _is_memory(error):
            error.args = (f"{str(error).strip() or 'memory was refused'}; meanwhile {what()}",)
        raise


def _is_memory(error: BaseException) -> bool:
    """Whether memory was refused, on any device: torch has no class of its own for that on CPU."""
    kinds = (MemoryError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
    told = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, kinds) or any(words in str(error).lower() for words in told)


def _wants_values(error: BaseException) -> bool:
    """Whether numpy, or who takes memory as it does, was to read a deferred tensor: no RuntimeErrors."""
    return isinstance(error, (TypeError, BufferError)) and "meta" in str(error)


def built_whole(factory: Callable[[], nn.Module]) -> nn.Module:
    """The factory's model in memory. Raises :class:`UsageError` for a parameter on the meta device."""
    with Watching() as watching:
        model = factory()
        try:
            _fill(model, watching)
        except NotDeferred as why:
            raise UsageError(str(why)) from why
    return refuse_meta(model)


def _fill(model: nn.Module, watching: Watching) -> None:
    """Calls what the model's author wrote to give it its first values, where its construction has not."""

    def lacks(module: nn.Module, *, inside: bool) -> bool:
        tensors = (*module.parameters(recurse=inside), *module.buffers(recurse=inside))
        return any(not watching.is_filled(t) for t in tensors)

    def call(module: nn.Module, name: str) -> bool:
        function = getattr(module, name, None)
        if not callable(function):
            return False
        try:
            inspect.signature(function).bind()
        except TypeError as error:
            raise NotDeferred(f"{type(module).__name__}.{name}() needs arguments: {error}") from error
        function()
        return True

    if not lacks(model, inside=True) or call(model, "init_weights"):
        return
    for module in model.modules():
        if lacks(module, inside=False) and not call(module, "init_weights"):
            call(module, "reset_parameters")


def refuse_meta(model: nn.Module) -> nn.Module:
    """The model, if every parameter of it has memory. Raises :class:`UsageError` naming one that has none."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise UsageError(
                f"parameter {name} is on the meta device, and nothing gives it its first values",
                hint="give ZeroEngine the function that builds the model, and the model init_weights(), or its modules "
                "reset_parameters(), that need no arguments",
            )
    return model


@contextmanager
def _init_functions_noted(recording: Recording) -> Iterator[None]:
    """torch.nn.init leaves meta tensors alone or looks at values: its functions are noted as a whole."""
    names = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_") and callable(getattr(nn.init, n))]
    plain = {name: getattr(nn.init, name) for name in names}
    for name, function in plain.items():
        setattr(nn.init, name, recording.noted(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(nn.init, name, function)
