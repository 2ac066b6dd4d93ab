"""The order in which buckets are summed is the model's own: passing buckets stay the stated few, whatever the order in
which a model uses its layers, what it leaves unused, and how large a parameter is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from engine_events import allocations
from engine_models import MODELS, batches, digest, whole_state
from engine_ranks import run_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from launcher.contract.errors import UsageError
from launcher.contract.train import AdamW, Zero
from launcher.engine.activations.recompute import recompute
from launcher.engine.config import EngineConfig
from launcher.engine.reduce.buckets import expected
from launcher.engine.zero import ZeroEngine

LAYERS, WIDTH, BUCKET = 16, 64, 4096
STATED = 2 * BUCKET + 2 * BUCKET // 2  # passing ones, and what the other of two ranks sends of each
LARGEST = WIDTH * WIDTH * 4  # the gradient of one weight, four buckets long
SMALL = 4096  # bytes in a backward that are neither buckets nor a parameter's gradient: those of a few activations
DEFINED = list(range(LAYERS))
REVERSED = DEFINED[::-1]
MIXED = [7 * number % LAYERS for number in DEFINED]


class Layers(nn.Module):
    """Uses its layers in an order that it is told before each forward; what it is not told is unused."""

    def __init__(self, spare: int = 0, *, hidden: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS + spare)])
        self.order = DEFINED
        self.hidden = hidden  # layers have a backward of their own inside backward, which the graph does not show

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            layer = self.layers[number]
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.hidden else layer(x))
        return x.square().mean()


class Rows(nn.Module):
    """Vectors in one unit that share buckets, used in a mixed order."""

    NUMEL = 700

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.full((self.NUMEL,), 0.1)) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for number in MIXED:
            x = x * (self.rows[number].square().sum() + 1)
        return x.mean()

    def begun(self) -> int:
        """The most buckets at once that have some of their gradients, when these come in reverse order of use."""
        width = BUCKET // 4
        lacking = {b: min(width, LAYERS * self.NUMEL - b * width) for b in range(-(-LAYERS * self.NUMEL // width))}
        whole, most = dict(lacking), 0
        for number in reversed(MIXED):
            for at in range(number * self.NUMEL, (number + 1) * self.NUMEL):
                lacking[at // width] -= 1
            filling = any(not left and whole[b] for b, left in lacking.items())
            for b in [b for b, left in lacking.items() if not left]:
                del lacking[b]
            most = max(most, sum(left < whole[b] for b, left in lacking.items()) + filling)
        return most


def _engine(model: nn.Module, stage: int = 2, bucket: int = BUCKET, accumulation: int = 1) -> ZeroEngine:
    zero = Zero(stage, bucket, reduce_every="micro_step")
    return ZeroEngine(model, EngineConfig(zero, AdamW(1e-2, clip=0.5), accumulation))


def _input(engine: ZeroEngine, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + engine.comm.rank)
    return torch.randn(1, WIDTH, generator=generator, requires_grad=True)


def _most_in_backward(engine: ZeroEngine, x: Tensor) -> int:
    """The most bytes at once that the CPU's allocator gave out in backward: it knows nothing of the engine."""
    loss = engine.model(x)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine.backward(loss)
    held: dict[int, int] = {}
    most = 0
    for _, address, size in allocations(profiled):
        if size > 0:
            held[address] = size
        else:
            held.pop(address, None)  # what was there before is none of backward's
        most = max(most, sum(held.values()))
    return most


def _bound(rank: int, world: int) -> None:
    """In the first step as in later ones: beside the stated buffers, which were there before, backward holds one
    parameter's gradient."""
    cases: list[tuple[str, Layers, list[list[int]]]] = [
        ("in order", Layers(), [DEFINED] * 2),
        ("reversed", Layers(), [REVERSED] * 2),
        ("mixed", Layers(), [MIXED] * 2),
        ("unused, defined last", Layers(spare=1), [DEFINED] * 2),
        ("unused in every other step", Layers(spare=1), [DEFINED, [*DEFINED, LAYERS]] * 2),
        ("not seen in the graph", Layers(hidden=True), [REVERSED] * 4),
        ("another order after some steps", Layers(), [DEFINED, DEFINED, REVERSED, MIXED, DEFINED, MIXED]),
    ]
    first_to_grow = {"not seen in the graph": 0, "another order after some steps": 2}
    for what, model, orders in cases:
        engine = _engine(model)
        assert engine.memory()["buckets"] == STATED, what
        most = []
        for number, used in enumerate(orders):
            model.order = used
            most.append(_most_in_backward(engine, _input(engine, number)))
            engine.step()
            assert engine.memory()["buckets"] == STATED, f"{what}: a buffer was kept"
        if what in first_to_grow:  # such a step is what tells
            assert most.pop(first_to_grow[what]) > LARGEST + 2 * BUCKET + SMALL, "the instrument sees more buffers"
        assert max(most) <= LARGEST + SMALL, (what, most)
        if what in ("in order", "reversed", "mixed"):
            assert engine.flow._settled, f"{what}: the same order twice is settled, and costs nothing from then on"
    rows = Rows()
    more = (rows.begun() - 2) * BUCKET
    assert more > 0
    engine = _engine(rows)
    for number in range(2):
        held = _most_in_backward(engine, _input(engine, number))
        engine.step()
        assert more <= held <= more + 4 * Rows.NUMEL + SMALL, "a buffer for each bucket that is begun, and no more"
        assert engine.memory()["buckets"] == STATED


def test_backward_holds_the_stated_buckets_and_one_gradient_in_any_order() -> None:
    run_ranks(2, _bound)


def _bits(rank: int, world: int) -> None:
    """Ranks that use other layers than each other, in other orders, in every step and micro-step."""
    rows = [DEFINED, REVERSED, MIXED[:9], REVERSED[3:], DEFINED[::2], MIXED]
    first = None
    for stage, bucket in ((0, 25_000_000), (0, BUCKET), (1, 1000), (2, BUCKET)):
        model = Layers()
        engine = _engine(model, stage, bucket, accumulation=2)
        norms = []
        for number in range(6):
            model.order = rows[(number + rank) % len(rows)]
            engine.backward(model(_input(engine, number)))
            if number % 2:
                norms.append(engine.step().grad_norm)
        bits = (norms, digest(whole_state(engine)))
        first = first or bits
        assert bits == first, (stage, bucket)


def test_bits_do_not_depend_on_the_order_even_where_ranks_differ() -> None:
    run_ranks(2, _bits)


def _models() -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, again in (("gpt", False), ("gpt", True), ("odd", False)):
        model = MODELS[name][0]()
        if again:
            recompute(model, "block", None)
        batch = batches(1, 2, MODELS[name][1])[0]
        yield f"{name}, recomputed: {again}", model, model(batch[:, :-1], batch[:, 1:])
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.GroupNorm(3, 3), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.LayerNorm(27), nn.Linear(27, 2))
    yield "convolutions", model, model(torch.randn(2, 3, 9, 9)).sum()


def test_the_graph_tells_the_order_in_which_autograd_hands_gradients_over() -> None:
    for what, model, loss in _models():
        named: Any = {id(p): name for name, p in model.named_parameters()}
        came: list[str] = []

        def arrived(p: Tensor, named: Any = named, came: list[str] = came) -> None:
            came.append(named[id(p)])

        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        told = expected(loss, named)
        loss.backward()  # type: ignore[no-untyped-call]
        assert told == came, what


def test_a_gradient_that_comes_twice_in_one_backward_is_refused() -> None:
    model = Layers(hidden=True)
    model.order = [0, 1, 0]
    engine = _engine(model)
    with pytest.raises(UsageError, match=r"the gradient of parameter layers\.0\.\w+ came twice in one backward"):
        engine.backward(model(torch.ones(1, WIDTH, requires_grad=True)))


def _lines_of_a_step(count: int) -> int:
    """Lines of Python that a step executes in this package, with so many parameters in one unit."""
    model = nn.ParameterList([nn.Parameter(torch.ones(256)) for _ in range(count)])
    engine = _engine(model, stage=1)
    lines = 0
    room = str(Path(__file__).parents[2] / "launcher")

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return look if frame.f_code.co_filename.startswith(room) else None

    for traced in (False, True):
        engine.backward(torch.stack([p.square().sum() for p in model]).sum())
        before = sys.gettrace()
        if traced:
            sys.settrace(look)
        try:
            engine.step()
        finally:
            sys.settrace(before)
    return lines


def test_a_step_runs_no_python_for_each_parameter() -> None:
    few = _lines_of_a_step(3)
    assert few > 20
    assert _lines_of_a_step(200) == few
