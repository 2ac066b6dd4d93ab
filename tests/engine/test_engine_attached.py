"""What an engine hangs onto a model goes with it and is in no copy; what comes later to the model is named."""

from __future__ import annotations

import copy
import gc
import io
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from launcher.contract.errors import UsageError
from launcher.engine import ZeroEngine


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.out = nn.Linear(4, 1)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).square().mean()


class Eager(Model):
    zero_read_by_forward = True


def _engine(stage: int, model: nn.Module | None = None, **more: Any) -> ZeroEngine:
    return ZeroEngine(model or Model(), {"zero": {"stage": stage}, "optimizer": {"lr": 0.1}, **more})


X = torch.arange(8.0).view(2, 4) / 8


def _trained(engine: ZeroEngine, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine.model(X)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _whole(engine: ZeroEngine) -> dict[str, Tensor]:
    with engine.gathered():
        return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


# --- what comes later ---------------------------------------------------------------------------------------


def _new_head(model: Any) -> None:
    model.out = nn.Linear(4, 1)


def _head_at_its_address(model: Any) -> None:
    del model.out  # the next module may get its address
    model.out = nn.Linear(4, 1)


def _longer(model: Any) -> None:
    model.layers.append(nn.Linear(4, 4))


def _adapter(model: Any) -> None:
    model.layers[1] = nn.Sequential(model.layers[1], nn.Linear(4, 4))


def _below_a_leaf(model: Any) -> None:
    model.layers[2].adapter = nn.Linear(4, 4)


def _own_parameter(model: Any) -> None:
    model.layers.scale = nn.Parameter(torch.ones(1))  # a list of modules had none


def _parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.layers[0])


NEW: list[tuple[Callable[[Any], None], str]] = [
    (_new_head, r"module out came after ZeroEngine was made: its parameter out\.weight is not trained"),
    (_head_at_its_address, r"module out came after ZeroEngine was made"),
    (_longer, r"module layers\.3 came after ZeroEngine was made"),
    (_adapter, r"module layers\.1\.1 came after ZeroEngine was made"),
    (_below_a_leaf, r"module layers\.2\.adapter came after ZeroEngine was made"),
    (_own_parameter, r"parameter layers\.scale was added after ZeroEngine was made"),
    (_parametrized, r"parameter layers\.0\.weight was taken away after ZeroEngine was made"),
]


def _later(rank: int, world: int) -> None:
    for stage in (0, 3):
        for change, says in NEW:
            if change is _parametrized and stage == 3:
                continue  # reads the weight, which is refused by itself
            engine = _engine(stage)
            _trained(engine)
            change(engine.model)
            engine.backward(engine.model(X))
            with pytest.raises(UsageError, match=says):
                engine.step()
    engine = _engine(2)
    engine.model.out.weight.data = torch.zeros(1, 4)  # type: ignore[union-attr,operator]
    engine.backward(engine.model(X))
    with pytest.raises(UsageError, match=r"out\.weight was given other memory") as told:
        engine.step()
    assert "copy_() into them inside gathered()" in str(told.value.hint)
    with engine.gathered(), torch.no_grad():
        engine.model.first.weight.copy_(torch.ones(4, 4))  # type: ignore[union-attr,operator]
    assert bool((_whole(engine)["first.weight"] == 1).all())
    for stage, precision in ((3, "fp32"), (2, "bf16")):
        engine = _engine(stage, precision=precision)
        assert "copy_()" not in engine._unchanged._hint and "zero.load_weights(FILE)" in engine._unchanged._hint


def _shorter(model: Any) -> None:
    del model.layers[2]


def _turned(model: Any) -> None:
    model.layers = nn.ModuleList([model.layers[n] for n in (0, 2, 1)])


def _wrapped(model: Any) -> None:
    model.layers[1] = nn.Sequential(model.layers[1])


def _taken_out_and_put_back(model: Any) -> None:
    model.first, kept = nn.Identity(), model.first
    model.kept = kept


def _fewer(rank: int, world: int) -> None:
    """Modules that are taken out, or stand elsewhere: as if the model had been so, and what is out stays as it was."""
    for change in (_shorter, _turned, _wrapped, _taken_out_and_put_back):
        plain = Model()
        optimizer = torch.optim.AdamW(plain.parameters(), 0.1, (0.9, 0.95), weight_decay=0.0)
        seen = []
        for stage in range(4):
            engine = _engine(stage)
            seen.append(_trained(engine))
            change(engine.model)
            seen[-1] += _trained(engine, 3)
        losses = []
        for step in range(4):
            if step == 1:
                change(plain)
            optimizer.zero_grad()
            loss = plain(X)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert seen[0] == seen[1] == seen[2] == seen[3] == pytest.approx(losses, rel=1e-4), change
        if change is _shorter:
            assert set(engine.layout.by_name) - set(dict(engine.model.named_parameters())) == {
                "layers.2.weight",
                "layers.2.bias",
            }


def _unfrozen(rank: int, world: int) -> None:
    for stage in (0, 3):
        model = Model()
        model.layers[1].requires_grad_(False)
        engine = _engine(stage, model)
        _trained(engine)
        model.layers[1].requires_grad_(True)
        engine.backward(model(X))
        with pytest.raises(UsageError, match=r"parameter layers\.1\.weight was frozen when ZeroEngine was made"):
            engine.step()
        model.layers[1].requires_grad_(False)
        engine.step()
        _trained(engine)
    seen = []
    for stage in range(4):
        engine = _engine(stage)
        losses = _trained(engine)
        engine.model.layers[1].requires_grad_(False)  # type: ignore[index,union-attr]
        before = _whole(engine)
        losses += _trained(engine, 2)
        after = _whole(engine)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if not name.startswith("layers.1.")}
        engine.model.layers[1].requires_grad_(True)  # type: ignore[index,union-attr]
        seen.append(losses + _trained(engine, 2))
        assert not torch.equal(_whole(engine)["layers.1.weight"], after["layers.1.weight"])
    assert seen[0] == seen[1] == seen[2] == seen[3]


# --- two engines ----------------------------------------------------------------------------------------------


def _again(rank: int, world: int) -> None:
    for stage in range(4):
        model = Model()
        engine = _engine(stage, model, recompute="block")
        losses = _trained(engine, 2)
        values = _whole(engine)
        for second in (model, lambda model=model: model, nn.Sequential(model)):
            with pytest.raises(UsageError, match=r"parameter (0\.)?first\.weight belongs to a ZeroEngine already"):
                _engine(stage, second)  # type: ignore[arg-type]
        assert _trained(engine)[0] != losses[-1]
        values = _whole(engine)
        del engine
        if stage == 3:
            with pytest.raises(UsageError, match=r"parameter first\.weight has no values: it was partitioned"):
                _engine(stage, model)
            continue
        for layer in model.layers:
            assert "forward" not in vars(layer)
        model(X).backward()  # a plain model again
        model.zero_grad()
        engine = _engine(2, model)
        assert all(torch.equal(value, values[name]) for name, value in _whole(engine).items())
        _trained(engine)
    engine = _engine(2)
    engine.saves_in_background()  # refers to the engine, as a list of one's own may
    model = engine.model
    del engine
    _trained(_engine(2, model))
    one = _engine(2)
    with pytest.raises(UsageError, match=r"model\.held_by_an_engine is False on rank 1, True on rank 0"):
        _engine(2, one.model if rank == 0 else Model())


def _under_way(rank: int, world: int) -> None:
    """An engine goes while updated parameters are on their way: they arrive."""
    values = {}
    for stage in (0, 1):
        model = Eager()
        engine = _engine(stage, model)
        assert (engine.arriving is not None) == (stage == 1)
        _trained(engine, 2)
        copied = copy.deepcopy(model).state_dict()
        del engine
        assert all(torch.equal(copied[name], p) for name, p in model.named_parameters())
        values[stage] = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(value, values[1][name]) for name, value in values[0].items())


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _one_through_another(rank: int, world: int) -> None:
    seen = []
    for stage in range(4):
        judge = _engine(stage, Judge())
        maker = _engine(stage, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        seen.append([])
        for _ in range(3):
            judge.model.requires_grad_(False)
            loss = -judge.model(maker.model(X))
            maker.backward(loss)
            maker.step()
            judge.model.requires_grad_(True)
            other = judge.model(X) + judge.model(maker.model(X).detach())
            judge.backward(other)
            judge.step()
            seen[-1] += [float(loss.detach()), float(other.detach())]
        with pytest.raises(UsageError, match=r"another ZeroEngine came to parameter layers\.1\.(weight|bias)") as told:
            maker.backward(-judge.model(maker.model(X)))
        assert "requires_grad_(False)" in str(told.value.hint)
    assert seen[0] == seen[1] == seen[2] == seen[3]


# --- an engine that goes ----------------------------------------------------------------------------------------


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _hooks(model: nn.Module) -> list[Any]:
    return [h for m in model.modules() for key, value in vars(m).items() if "hooks" in key for h in value.values()]


def _gone(rank: int, world: int) -> None:
    for stage in (0, 3):
        counts = set()
        for number in range(4):
            model = Model()
            engine = _engine(stage, model, recompute="none" if number % 2 else "block")
            _trained(engine)
            if number == 3:
                engine.model(X)  # a forward without a backward
            full, seen = weakref.ref(engine.units[0].full), weakref.ref(engine)
            if number % 2:
                del engine  # at once where the model stays
                assert seen() is None
                assert not _hooks(model)
            else:
                del engine, model
                gc.collect()
                assert seen() is None and full() is None
            gc.collect()
            counts.add(_descriptors())
        assert len(counts) == 1, counts
    engine = _engine(3)
    engine.model(X)
    del engine
    gc.collect()
    assert not _get_current_dispatch_mode_stack(), "nobody watches a first forward any more"


# --- copies -----------------------------------------------------------------------------------------------------


class Stateful(nn.Linear):
    """Says itself what copies take over."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.cache: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": None}


def _through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def _looked(*_: Any) -> None:
    """A hook of the user's own."""


def _copies(rank: int, world: int) -> None:
    for stage, recompute in ((0, "block"), (1, "none"), (2, "block"), (3, "none"), (3, "block")):
        model = Model()
        model.layers[1] = Stateful()
        model.register_forward_hook(_looked)
        engine = _engine(stage, model, recompute=recompute)
        model.out.register_forward_pre_hook(_looked)
        model.layers[1].cache = open(os.devnull)  # noqa: SIM115 (no file can be copied)
        _trained(engine, 2)
        with engine.gathered():
            loss = float(model(X).detach())
            copies = [copy.deepcopy(model), _through_file(model), copy.deepcopy([nn.Sequential(model)])[0][0]]
            layer = copy.deepcopy(model.layers[0])
        after = _trained(engine, 2)
        model.layers[1].cache.close()
        for one in copies:
            assert _hooks(one) == [_looked, _looked] and not any("forward" in vars(m) for m in one.modules())
            assert not any("__getstate__" in vars(m) for m in one.modules())
            assert all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in one.parameters())
            assert float(one(X).detach()) == loss
            optimizer = torch.optim.SGD(one.parameters(), 0.01)
            one(X).backward()
            optimizer.step()
            assert float(one(X).detach()) < loss
            one.load_state_dict(one.state_dict())
        assert torch.equal(layer(X), copies[2].get_submodule("layers.0")(X)) is False
        assert after[0] == pytest.approx(loss), "the copies are on their own"
        if stage == 3:
            for copied in (copy.deepcopy, _through_file):
                with pytest.raises(UsageError, match=r"parameter first\.weight is read while it is partitioned"):
                    copied(model)  # type: ignore[operator]
        second = _engine(stage, copies[0])
        assert len(_trained(second, 2)) == 2
        with pytest.raises(UsageError, match="a group of ranks cannot be copied or pickled, nor what holds one"):
            copy.deepcopy(engine)


def _all(rank: int, world: int) -> None:
    gc.freeze()  # the interpreter's own objects need not be looked at again and again
    for what in (_later, _fewer, _unfrozen, _again, _under_way, _one_through_another, _gone, _copies):
        what(rank, world)


def test_it_goes_with_the_engine_and_what_comes_later_is_named() -> None:
    run_ranks(2, _all)
