"""What every rank computed, sent and waited for, and when: a trace that https://ui.perfetto.dev reads.

:class:`Traced` stands in front of a :class:`~.comm.Comm`, the one place where collectives live, so that no message is
missed; :class:`Trace` adds the forward and backward of every unit::

    trace = Trace()
    engine = ZeroEngine(model, config, comm=trace.of(connect()))
    trace.watch(engine)
    with trace.recording():
        … one step
    trace.write("step.json", engine.comm)      # by all ranks together

A message is shown from its posting until the rank knew that it was there, which is when it was waited for: it may
have arrived before. What the rank stood still for is told apart, as ``wait``. Times are CLOCK_MONOTONIC, which ranks
of one machine share and ranks of several do not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..comm import Comm, Pending, gather_bytes
from ..gather.gathering import tensors_in

if TYPE_CHECKING:
    from ..zero import ZeroEngine

T = TypeVar("T")
COMPUTE, GATHER, REDUCE, WAIT = "compute", "gather", "reduce", "wait"


class Span(NamedTuple):
    """Something between two times (ns). ``what`` is a message's own name, or forward or backward with a unit's."""

    kind: str
    what: str
    begin: int
    end: int


class Trace:
    """The spans of this rank while it records; nothing is kept otherwise."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._on = False
        self._backward: tuple[str, int, int] | None = None  # of the unit whose gradients arrive: name, begin, last

    def of(self, comm: Comm) -> Traced:
        """``comm``, seen by this trace."""
        return Traced(comm, self)

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Spans that begin inside are kept; those of before are forgotten."""
        self.spans, self._on = [], True
        try:
            yield self
        finally:
            self._close_backward()
            self._on = False

    def add(self, kind: str, what: str, begin: int) -> None:
        """From ``begin`` until now."""
        if self._on:
            self.spans.append(Span(kind, what, begin, time.monotonic_ns()))

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Computation under a name of its own."""
        begin = time.monotonic_ns()
        yield
        self._close_backward()
        self.add(COMPUTE, what, begin)

    # --- units -----------------------------------------------------------------------------------------

    def watch(self, engine: ZeroEngine) -> None:
        """Forward and backward of every unit that has modules of its own. After the engine's hooks, so that what is
        shown as computation begins when the unit is there."""
        seen: set[tuple[str, ...]] = set()
        for flat in engine.units:
            for tensor in flat.tensors if flat.unit.trainable else ():
                tensor.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            if flat.unit.modules and flat.unit.modules not in seen:
                seen.add(flat.unit.modules)
                for name in flat.unit.modules:
                    self._watch_module(engine.model.get_submodule(name), name)

    def _watch_module(self, module: nn.Module, name: str) -> None:
        begun: list[int] = []

        def before(_module: nn.Module, _inputs: Any) -> None:
            begun.append(time.monotonic_ns())

        def after(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
            self.add(COMPUTE, f"forward {name}", begun.pop())
            tensors = [t for t in tensors_in(outputs) if t.requires_grad]
            if tensors and torch.is_grad_enabled():
                torch.autograd.graph.register_multi_grad_hook(tensors, lambda _: self._begin_backward(name), mode="any")

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _begin_backward(self, name: str) -> None:
        self._close_backward()
        now = time.monotonic_ns()
        self._backward = (name, now, now)

    def _arrived(self, _tensor: Tensor) -> None:
        if self._backward is not None:
            self._backward = (*self._backward[:2], time.monotonic_ns())

    def _close_backward(self) -> None:
        if self._backward is not None and self._on:
            name, begin, last = self._backward
            self.spans.append(Span(COMPUTE, f"backward {name}", begin, last))
        self._backward = None

    # --- the file --------------------------------------------------------------------------------------

    def write(self, path: str | Path, comm: Comm) -> list[list[Span]]:
        """Rank 0 writes the spans of all ranks into ``path``; every rank returns them, in rank order."""
        mine = json.dumps(self.spans).encode()
        everyone = [[Span(*row) for row in json.loads(rows)] for rows in gather_bytes(comm, mine, "writing a trace")]
        if comm.rank == 0:
            Path(path).write_text(json.dumps(chrome(everyone)), encoding="utf-8")
        return everyone


class Traced:
    """A way to communicate that tells a trace of every message."""

    def __init__(self, comm: Comm, trace: Trace) -> None:
        self._comm, self._trace = comm, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def gather(self, flat: Tensor, what: str) -> Pending:
        begin = time.monotonic_ns()
        return _Watched(self._comm.gather(flat, what), self._trace, GATHER, what, begin)

    def reduce(self, flat: Tensor, out: Tensor, scratch: Tensor, what: str, *, add: bool = False) -> Pending:
        begin = time.monotonic_ns()
        return _Watched(self._comm.reduce(flat, out, scratch, what, add=add), self._trace, REDUCE, what, begin)

    def all_reduce(self, flat: Tensor, what: str) -> Pending:
        begin = time.monotonic_ns()
        return _Watched(self._comm.all_reduce(flat, what), self._trace, REDUCE, what, begin)

    def exchange(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], what: str) -> Tensor:
        return self._small(what, lambda: self._comm.exchange(send, send_counts, receive_counts, what))

    def gather_small(self, value: Tensor, what: str) -> Tensor:
        return self._small(what, lambda: self._comm.gather_small(value, what))

    def broadcast(self, value: Tensor, source: int, what: str) -> None:
        self._small(what, lambda: self._comm.broadcast(value, source, what))

    def _small(self, what: str, call: Callable[[], T]) -> T:
        begin = time.monotonic_ns()
        result = call()
        self._trace.add(WAIT, what, begin)
        return result


class _Watched:
    """A message under way; told of once it has been waited for."""

    def __init__(self, pending: Pending, trace: Trace, kind: str, what: str, begin: int) -> None:
        self._pending, self._trace = pending, trace
        self._kind, self._what, self._begin = kind, what, begin
        self._told = False

    def wait(self) -> None:
        begin = time.monotonic_ns()
        self._pending.wait()
        if not self._told:
            self._told = True
            self._trace.add(WAIT, self._what, begin)
            self._trace.add(self._kind, self._what, self._begin)


def chrome(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """The Chrome trace format: a process a rank, a track each for computation and waits; messages, several of which
    may be under way at once, as asynchronous spans."""
    first = min((span.begin for spans in ranks for span in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for track, kind in enumerate((COMPUTE, WAIT)):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": kind}})
        for number, span in enumerate(spans):
            common = {"name": span.what, "cat": span.kind, "pid": rank}
            begin, end = (span.begin - first) / 1e3, (span.end - first) / 1e3
            if span.kind in (COMPUTE, WAIT):
                track = 0 if span.kind == COMPUTE else 1
                events.append({**common, "ph": "X", "tid": track, "ts": begin, "dur": end - begin})
            else:
                identity = {"id": f"{rank}.{number}", "tid": 0}
                events.append({**common, **identity, "ph": "b", "ts": begin})
                events.append({**common, **identity, "ph": "e", "ts": end})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
