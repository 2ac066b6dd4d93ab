"""Stage 3 with any module: blocks in any order, some left out, used twice or in part, called past the model's forward.

All of it is held against stage 2, to the bit, and watched: how many blocks hold memory, how much was sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from test_engine_units import Watcher
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.contract.errors import UsageError
from launcher.engine import ZeroEngine

COUNT = 6


class Blocks(nn.Module):
    """Blocks between two layers, used in ``order``."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(5, 5)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList([make() for _ in range(COUNT)])
        self.last = nn.Linear(5, 5)
        self.order: Sequence[int] = range(COUNT)

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = x + torch.tanh(self.layers[number](x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encode(x)).square().mean()


def _engine(stage: int, model: nn.Module, accumulation: int = 1, recompute: str = "none", **zero: Any) -> ZeroEngine:
    settings = {"stage": stage, "reduce_every": "micro_step", **(zero if stage == 3 else {})}
    config = {"zero": settings, "optimizer": {"lr": 0.01}, "accumulation": accumulation, "recompute": recompute}
    return ZeroEngine(model, config)


def _x(engine: ZeroEngine, step: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + engine.comm.rank))


Step = Callable[[ZeroEngine, Tensor], None]


def _plain(engine: ZeroEngine, x: Tensor) -> None:
    engine.backward(engine.model(x))
    engine.step()


def _trained(engine: ZeroEngine, orders: Sequence[Sequence[int]], step: Step = _plain) -> str:
    for number, order in enumerate(orders):
        engine.model.order = order  # type: ignore[assignment]
        step(engine, _x(engine, number))
    return digest(whole_state(engine))


EVEN = (0, 2, 4, 1, 3, 5)
BACK = tuple(reversed(range(COUNT)))
ORDERS: dict[str, list[Sequence[int]]] = {
    "back": [BACK] * 3,
    "even": [EVEN] * 3,
    "left out": [(0, 1, 2, 4, 5), (0, 2, 3, 4), range(COUNT), (1, 3, 5)],
    "changing": [range(COUNT), BACK, EVEN, (3, 0, 5, 1), BACK],
    "twice": [(0, 1, 0, 2, 2, 3, 1), (0, 1, 0, 2, 2, 3, 1), (0, 0, 1, 5)],
}


def _orders(rank: int, world: int, cases: list[tuple[str, int, str, str]]) -> None:
    expected: dict[str, str] = {}
    for name, prefetch, reshard, recompute in cases:
        case = (name, prefetch, reshard, recompute)
        orders = ORDERS[name]
        expected[name] = expected.get(name) or _trained(_engine(2, Blocks()), orders)
        engine = _engine(3, Blocks(), recompute=recompute, prefetch=prefetch, reshard=reshard)
        watcher = Watcher(engine)
        watcher.stays = []
        psi, block = sum(u.padded for u in engine.layout.units), engine.layout.units[1].padded
        root = psi - COUNT * block
        volumes: list[int] = []

        def step(engine: ZeroEngine, x: Tensor, volumes: list[int] = volumes, watcher: Watcher = watcher) -> None:
            before = engine.comm.traffic.volume_elements
            _plain(engine, x)
            volumes.append(engine.comm.traffic.volume_elements - before)
            assert watcher.held() == set()

        assert _trained(engine, orders, step) == expected[name], case
        kept = block if reshard == "keep_last" else 0
        assert watcher.most <= 1 + prefetch + (kept > 0), (case, watcher.most)
        if name in ("back", "even"):
            exact = 3 * psi - root - kept
            # The first forward looked as defined after block 0, until 2 came.
            wasted = block * len({1, 2, 3, 4, 5}.intersection(range(prefetch + 1)) - {2}) if name == "even" else 0
            assert volumes == [exact + wasted, exact, exact], (case, volumes)


ONE = [("back", 1, "keep_last", "none"), ("even", 1, "keep_last", "none"), ("left out", 1, "keep_last", "none")]
ONE += [("changing", 1, "keep_last", "block"), ("twice", 1, "after_forward", "none"), ("back", 0, "keep_last", "none")]
REST = [
    (name, prefetch, reshard, recompute)
    for name in ORDERS
    for prefetch in (0, 1, 2, 9)
    for reshard in ("keep_last", "after_forward")
    for recompute in ("none", "block")
]


class Partly(nn.Module):
    """One of two is used, by the data of the rank; a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.never = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = self.one(x) if float(x.detach().sum()) > 0 else self.other(x)
        return used


class Adapted(nn.Module):
    """A frozen layer with trained ones beside it, the last of which has its gradients before the frozen one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2), nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        base = torch.tanh(self.base(x))
        return base + self.up(self.down(x))  # type: ignore[no-any-return]


class Stopped(nn.Module):
    """A weight that is used once more where no gradient reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.layer.weight.detach())  # type: ignore[no-any-return]


class Reentrant(Blocks):
    """Recomputed in the way in which a backward runs inside backward."""

    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Pair(nn.ModuleList):
    """A block that is no more than a list: only what is in it is called."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(5, 5), nn.Linear(5, 5)])


class Lists(Blocks):
    def encode(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one, other in self.layers:  # type: ignore[misc]
            x = x + torch.tanh(other(torch.tanh(one(x))))
        return x


class Aside(nn.Module):
    """What it keeps for the loss is computed after what it returns: backward comes to that first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.aside = torch.tanh(self.router(torch.tanh(self.router(x)))).square().mean()
        return y


class Balanced(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(layer.aside for layer in self.layers)  # type: ignore[operator]


MODELS: dict[type, tuple[type[Blocks], ...]] = {Pair: (Lists,), Aside: (Balanced,)}


def _parts(rank: int, world: int) -> None:
    for make in (Partly, Adapted, Stopped, Pair, Aside):
        for model in MODELS.get(make, (Blocks, Reentrant)):
            expected = _trained(_engine(2, model(make)), [range(COUNT)] * 2)
            engine = _engine(3, model(make))
            watcher = Watcher(engine)
            assert _trained(engine, [range(COUNT)] * 2) == expected, (make, model)
            if model is not Reentrant or make is Adapted:
                assert watcher.most <= 2, (make, model, watcher.most)


class Kept(nn.Module):
    """Keeps a loss as an attribute and returns what came in, or what no gradient reaches, or computes it in between."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.router = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "plain":
            return torch.tanh(self.layer(x))
        if self.kind == "before":
            self.kept = self._aside(x)
            return torch.tanh(self.layer(x))
        y = x if self.kind == "through" else self.layer(x)
        self.kept = self._aside(x)
        if self.kind == "two":
            return y, self.router(y)
        return y.detach() if self.kind == "detached" else y

    def _aside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.router(torch.tanh(self.router(x)))).square().mean()


class Losses(nn.Module):
    """``cut``: uses that no gradient leaves. ``kept``: uses whose loss counts. ``own``: whether the output does."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList([Kept(kind) for kind in kinds])
        self.cut: set[int] = set()
        self.kept = set(range(len(kinds)))
        self.own = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = x.new_zeros(())
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number in self.cut else x)
            x = x[0] if isinstance(x, tuple) else x
            if number in self.kept and layer.kind != "plain":
                total = total + layer.kept
        return total + x.square().mean() if self.own else total


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "handed on": ("through through through", {}),
    "handed on at the ends": ("through plain through after through", {}),
    "no gradient leaves": ("detached detached after detached", {}),
    "cut between": ("before before before", {"cut": {1, 2}}),
    "left early": ("before after before plain", {"kept": {1}, "own": False}),
    "a second output that is not used": ("two two two", {"kept": {0, 2}}),
}


def _losses(rank: int, world: int) -> None:
    """Backward comes to a part of a block before it comes to what the block returned, or never comes to that."""
    for name, (kinds, how) in LOSSES.items():
        for step in (_plain, _later):
            found = set()
            for stage, prefetch in ((2, 1), (3, 1), (3, 0)):
                model = Losses(kinds.split())
                model.__dict__.update(how)
                engine = _engine(stage, model, 2 if step is _later else 1, prefetch=prefetch)
                found.add(_trained(engine, [()] * 2, step))
            assert len(found) == 1, (name, step)
    engine = _engine(3, Losses(["before"] * 3), prefetch=0)
    _plain(engine, _x(engine, 0))
    engine.model.kept, engine.model.own = {0}, False  # type: ignore[assignment]
    with pytest.raises(UsageError, match="backward came to an operation whose parameter was not there"):
        _plain(engine, _x(engine, 1))  # nothing looked like it, and the first graph was another


# --- past the model's own forward ------------------------------------------------------------------------


def _teacher(engine: ZeroEngine, x: Tensor) -> None:
    loss = engine.model(x)
    with torch.no_grad():
        engine.model(x + 1)
        engine.model.layers[2](x)  # type: ignore[index,operator]
    with engine.gathered():
        float(engine.model.first.weight.norm())  # type: ignore[union-attr,operator]
    engine.backward(loss)
    engine.step()


def _methods(engine: ZeroEngine, x: Tensor) -> None:
    with torch.no_grad():
        target = engine.model.encode(x + 1)  # type: ignore[operator]
    engine.backward((engine.model.encode(x) - target).square().mean())  # type: ignore[operator]
    with torch.no_grad():
        engine.model.encode(x)  # type: ignore[operator]
    engine.step()


def _inside(engine: ZeroEngine, x: Tensor) -> None:
    with engine.gathered():
        _plain(engine, x)
        after = [p.detach().clone() for p in engine.model.parameters()]
        engine.backward(engine.model(x))
        engine.step()
    with engine.gathered():
        engine.backward(engine.model(-x))
        assert not any(torch.equal(p, old) for p, old in zip(engine.model.parameters(), after))  # noqa: B905
    engine.step()


def _two_at_once(engine: ZeroEngine, x: Tensor) -> None:
    first, second = engine.model(x), engine.model(-x)
    engine.backward(first + second)
    engine.step()


def _later(engine: ZeroEngine, x: Tensor) -> None:
    first, second = engine.model(x), engine.model(-x)
    engine.backward(first)
    engine.backward(second)
    engine.step()


def _calls(rank: int, world: int) -> None:
    for step in (_teacher, _methods, _inside, _two_at_once, _later):
        accumulation = 2 if step is _later else 1
        expected = _trained(_engine(2, Blocks(), accumulation), [BACK] * 2, step)
        for reshard in ("keep_last", "keep") if step is _teacher else ("keep_last",):
            engine = _engine(3, Blocks(), accumulation, reshard=reshard)
            watcher = Watcher(engine)
            watcher.stays = watcher.rows[:1] if reshard == "keep_last" else watcher.rows  # used last
            assert _trained(engine, [BACK] * 2, step) == expected, (step, reshard)
            assert watcher.held() == set()
            assert step is _inside or watcher.most <= 2, (step, reshard, watcher.most)


def test_blocks_in_any_order_are_gathered_in_theirs() -> None:
    run_ranks(2, _orders, ONE)


@pytest.mark.full
def test_blocks_in_any_order_with_any_setting() -> None:
    run_ranks(2, _orders, REST)


def test_blocks_that_are_used_in_part_are_released_and_no_earlier_than_backward_is_through() -> None:
    run_ranks(2, _parts)


def test_a_loss_that_a_block_keeps_whatever_it_returns() -> None:
    run_ranks(2, _losses)


def test_a_forward_without_gradients_in_between_and_methods_and_two_forwards_at_once() -> None:
    run_ranks(2, _calls)


def _left_over(rank: int, world: int) -> None:
    for stage in range(4):
        for recompute in ("none", "block"):
            engine = _engine(stage, Blocks(), recompute=recompute)
            gc.collect()
            gc.disable()
            for step in range(3):
                _plain(engine, _x(engine, step))
            left = [type(found).__name__ for found in gc.get_objects() if type(found).__name__.endswith("Backward0")]
            gc.enable()
            assert not left, (stage, recompute, left)


def test_a_step_leaves_no_operation_to_the_collector() -> None:
    """What does stays in the heap between large pieces, whose places are then taken elsewhere: half as much again."""
    run_ranks(2, _left_over)
