"""Every storage that tensors live in, from birth to death: what is held, of what kind, and when.

A storage counts once, whoever views it: its bytes from the operation that made it to the moment when the last
reference goes, and ``resize_`` in between (stage 3 shrinks a released unit to nothing). The ledger is the same
for a real run (:class:`Recorder`) and for a run on nothing (``engine.rehearsal.simulate``), so that the two can be held
against each other to the byte. Not counted: what a kernel or a library holds inside a call, mapped files.

A storage's category is claimed by the engine for what it keeps (:func:`claim`), else told by when it lived:

=============  ====================================================================================
parameters     stages 0 to 2 whole, stage 3 this rank's shards; frozen ones and buffers too
gradients      accumulated ones
optimizer      moments, and the fp32 master of 16-bit parameters
gathered       stage 3: whole parameters while they are needed
buckets        communication buffers that are kept
norm           indices and sums of the gradient norm; padding rows of the optimizer
activations    born in forward, alive when backward begins
recomputed     activations that backward makes again
temporaries    everything else
host           stored activations that were moved to host memory: not a device's bytes
=============  ====================================================================================
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..kept import kept

if TYPE_CHECKING:
    from ..zero import ZeroEngine

CATEGORIES = (
    "parameters", "gradients", "optimizer", "gathered", "buckets", "norm", "activations", "recomputed", "temporaries",
    "host",
)  # fmt: skip
BUILD, FORWARD, BACKWARD, UPDATE = "build", "forward", "backward", "update"

_FROM_FILE = torch.ops.aten.from_file.default
VIEWS = {
    "slice", "view", "as_strided", "t", "transpose", "permute", "expand", "select", "squeeze", "unsqueeze", "detach",
    "alias", "unfold", "narrow", "diagonal", "view_as_real", "view_as_complex", "_reshape_alias",
}  # fmt: skip
VIEWS_OF_MANY = {"unbind", "split", "split_with_sizes", "chunk"}


class Life:
    """One storage. ``born`` and ``died`` are places in the ledger's log."""

    __slots__ = ("again", "born", "category", "died", "kept", "phase", "size")

    def __init__(self, phase: str, born: int, again: bool) -> None:
        self.phase, self.born, self.again = phase, born, again
        self.died = -1
        self.size = 0
        self.category = ""
        self.kept: weakref.ref[Any] | None = None


class Ledger:
    """Counts. ``log`` holds every change as (storage, bytes more or less), ``phases`` where each phase begins.

    ``nothing`` says that tensors are fake ones, which stand on meta storages; elsewhere those are nobody's bytes.
    """

    def __init__(self, *, nothing: bool = False) -> None:
        self.nothing = nothing
        self.total = 0
        self.peak = 0
        self.log: list[tuple[Life, int]] = []
        self.phases: list[tuple[int, str]] = [(0, BUILD)]
        self._phase = BUILD
        self._lives: dict[int, Life] = {}

    def begin(self, phase: str) -> None:
        """What follows belongs to ``phase``."""
        self._phase = phase
        self.phases.append((len(self.log), phase))

    def saw(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        life = self._lives.get(key)
        if life is None:
            if not self.nothing and storage.device.type == "meta":
                return
            again = self._phase == BACKWARD and torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0
            life = self._lives[key] = Life(self._phase, len(self.log), again)
            life.kept = weakref.ref(storage, lambda _: self._gone(key))
        size = storage.nbytes()
        if size != life.size:
            self._change(life, size - life.size)

    def _change(self, life: Life, more: int) -> None:
        life.size += more
        self.log.append((life, more))
        self.total += more
        if self.total > self.peak:
            self.peak = self.total

    def _gone(self, key: int) -> None:
        life = self._lives.pop(key)
        life.died = len(self.log)
        if life.size:
            self._change(life, -life.size)

    def ignore(self, tensor: Tensor) -> None:
        """A mapped file is nobody's memory."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        life = self._lives[key] = Life(self._phase, len(self.log), False)
        life.size = storage.nbytes()
        life.kept = weakref.ref(storage, lambda _: self._lives.pop(key, None))

    def claim(self, category: str, tensors: Iterable[Tensor | None]) -> None:
        """These tensors' storages are of ``category``, whenever they were made."""
        for tensor in tensors:
            life = None if tensor is None else self._lives.get(tensor.untyped_storage()._cdata)
            if life is not None:
                life.category = category

    @contextmanager
    def resizes_watched(self) -> Iterator[None]:
        """``UntypedStorage.resize_`` is told, for as long as this lasts."""
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = plain(storage, size)
            if storage._cdata in self._lives:
                self.saw(storage)
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


_CLAIMED_AS = {"buffers": "parameters", "stored": "activations"}  # kinds of engine.kept that a step calls otherwise


def claim(ledger: Ledger, engine: ZeroEngine) -> None:
    """Tells the ledger what the engine keeps by now, and as what. Small messages and the copy of a save are told by
    when they live, as everything else."""
    for kind, tensors in kept(engine).items():
        category = _CLAIMED_AS.get(kind, kind)
        if category in CATEGORIES:
            ledger.claim(category, tensors)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps a ledger of a real run: ``with Recorder() as ledger``."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger or Ledger()
        self._makes: dict[Any, bool] = {}
        self._watching: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing compiled here, and skipping it would import a compiler

    def __enter__(self) -> Recorder:
        self._watching = self.ledger.resizes_watched()
        self._watching.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: Any) -> None:
        super().__exit__(*about)  # type: ignore[no-untyped-call]
        self._watching.__exit__(*about)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        makes = self._makes.get(function)
        if makes is None:
            makes = self._makes[function] = makes_storages(function)
        if makes:
            if function is _FROM_FILE:
                self.ledger.ignore(result)
            else:
                see_all(self.ledger, result)
        return result


class FirstSteps:
    """On CPUs, where nothing else measures memory: the most bytes of live storages in each of an attempt's first two
    steps. A recorder costs some microseconds an operation, so later steps go without."""

    def __init__(self, device: torch.device | None) -> None:
        self._recorder = Recorder() if device is not None and device.type == "cpu" else None
        self._left = 2
        if self._recorder is not None:
            self._recorder.__enter__()

    def begin(self) -> None:
        """A step begins."""
        if self._recorder is not None:
            self._recorder.ledger.peak = self._recorder.ledger.total

    def end(self) -> int | None:
        """A step has ended: its peak, or None where it was not recorded."""
        if self._recorder is None:
            return None
        peak = self._recorder.ledger.peak
        self._left -= 1
        if not self._left:
            self.close()
        return peak

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None


def makes_storages(function: Any) -> bool:
    """Views make none. A mapped file is only ever seen through views, and counted as nothing."""
    name = function.__name__.split(".")[0]
    return name not in VIEWS and name not in VIEWS_OF_MANY


def see_all(ledger: Ledger, result: Any) -> None:
    """Every tensor of an operation's result."""
    if isinstance(result, Tensor):
        ledger.saw(result.untyped_storage())
    elif isinstance(result, (list, tuple)):
        for item in result:
            see_all(ledger, item)


class Moment(NamedTuple):
    """What was alive at one place of the log, by category."""

    total: int
    holds: dict[str, int]
    at: int


class Recorded:
    """The ledger's log from ``start`` on: each phase's peak and what was alive then, and every category over time.

    ``points`` are at most ``limit``: of each share of the changes the largest moment, bytes by category. A category
    ``without`` is left out.
    """

    def __init__(self, ledger: Ledger, start: int, limit: int = 600, without: str = "") -> None:
        self.start = start
        self.share = max(1, -(-(len(ledger.log) - start) // limit))
        self.peaks: dict[str, Moment] = {}
        self.points: list[tuple[int, ...]] = []
        self.marks = [((at - start) // self.share, phase) for at, phase in ledger.phases if at >= start]
        names = {name: number for number, name in enumerate(CATEGORIES)}
        left_out = names.get(without, -1)
        backward_starts = [at for at, phase in ledger.phases if phase == BACKWARD]
        held = [0] * len(CATEGORIES)
        categories: dict[int, int] = {}
        for life, more in ledger.log[:start]:
            number = _number(life, categories, names, backward_starts)
            held[number] += 0 if number == left_out else more
        highest = -1
        marks = [*ledger.phases, (len(ledger.log) + 1, "")]
        mark = max(i for i, (at, _) in enumerate(marks) if at <= start)
        for at in range(start, len(ledger.log)):
            while marks[mark + 1][0] <= at:
                mark += 1
                self._see(marks[mark][1], held, at)
            life, more = ledger.log[at]
            number = _number(life, categories, names, backward_starts)
            held[number] += 0 if number == left_out else more
            if (at - start) % self.share == 0:
                self.points.append(())
                highest = -1
            if sum(held) > highest:
                self.points[-1], highest = tuple(held), sum(held)
            self._see(marks[mark][1], held, at)

    def _see(self, phase: str, held: Sequence[int], at: int) -> None:
        total, known = sum(held), self.peaks.get(phase)
        if known is None or total > known.total:
            holds = {c: n for c, n in zip(CATEGORIES, held) if n}  # noqa: B905 (Python 3.9 on the nodes)
            self.peaks[phase] = Moment(total, holds, at - self.start)

    @property
    def peak(self) -> Moment:
        """The largest of all phases' peaks."""
        return max(self.peaks.values(), key=lambda moment: moment.total)


def _number(life: Life, known: dict[int, int], names: dict[str, int], backward_starts: Sequence[int]) -> int:
    number = known.get(id(life))
    if number is None:
        number = known[id(life)] = names[life.category or _category(life, backward_starts)]
    return number


def _category(life: Life, backward_starts: Sequence[int]) -> str:
    """Told by when it lived: see the module's table."""
    if life.phase == FORWARD:
        following = bisect_left(backward_starts, life.born)
        if following < len(backward_starts) and (life.died < 0 or life.died > backward_starts[following]):
            return "activations"
    return "recomputed" if life.again else "temporaries"
