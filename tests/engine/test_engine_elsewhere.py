"""What reads, writes or leaves half done what stage 3 has partitioned is refused by name, or is right."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy
import pytest
import torch
from engine_ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from launcher.contract.errors import UsageError
from launcher.engine import ZeroEngine

Use = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """``use`` comes after all blocks."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.use(self, x).square().mean()


def _engine(stage: int = 3, precision: str = "fp32", use: Use = lambda model, x: x) -> ZeroEngine:
    return ZeroEngine(Model(use), {"zero": {"stage": stage}, "optimizer": {"lr": 0.1}, "precision": precision})


X = torch.ones(2, 4)


def _reads(rank: int, world: int) -> None:
    """In the first forward and up to backward; each of these ended in SIGSEGV or in torch's own nameless words."""
    outside = r"parameter layers\.{} is used outside the forward of layers\.{}, where alone it is whole"
    uses: list[Use] = [
        lambda model, x: x * model.layers[1].bias,
        lambda model, x: x @ model.layers[1].weight,  # type: ignore[operator]
        lambda model, x: nn.functional.linear(x, model.layers[1].weight),  # type: ignore[arg-type]
    ]
    for use in uses:
        engine = _engine(use=use)
        for _ in range(2):  # whoever goes on is told again
            with pytest.raises(UsageError, match=outside.format("1.(weight|bias)", 1)):
                engine.model(X)
    last = _engine(use=lambda model, x: x @ model.layers[2].weight)  # type: ignore[operator]
    for engine in (_engine(), last):  # the last block stays until backward
        with torch.no_grad():
            engine.model(X)
        assert not _get_current_dispatch_mode_stack()
        for _ in range(2):
            engine.backward(engine.model(X))
            engine.step()
            assert not _get_current_dispatch_mode_stack(), "watching ends with the first backward"
    engine = _engine()
    loss = engine.model(X)
    with pytest.raises(UsageError, match=outside.format("0.weight", 0)):
        loss + sum((p**2).sum() for p in engine.model.parameters())


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "print": repr,
    "format": "{}".format,
    "norm": lambda p: p.norm(),
    "torch.norm": torch.norm,
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "add": lambda p: 1 + p,
    "index": lambda p: p[0],
    "iterate": list,
    "compare": lambda p: p == 0,
    "in place": lambda p: p.data.zero_(),
    "init": nn.init.zeros_,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: numpy.asarray(p),
    "item": lambda p: float(p.sum()),
    "nested": lambda p: torch.stack([torch.zeros_like(X), p]),
    "out": lambda p: torch.add(X, X, out=p),
    "foreach": lambda p: torch._foreach_norm([p]),
    "copy": copy.deepcopy,
    "pickle": lambda p: torch.save(p, io.BytesIO()),
    "to": lambda p: p.to(torch.float64),
    "linear": lambda p: nn.functional.linear(X, p),
}


def _by_hand(rank: int, world: int) -> None:
    """Reading a parameter between steps ended the process. What needs no values stays as it is."""
    engine = _engine()
    model = engine.model
    kinds: set[type] = set()
    model.layers[1].register_forward_pre_hook(lambda module, _: kinds.add(type(module.weight)))  # type: ignore[index,union-attr,operator]
    for _ in range(3):
        for owner, name in ((model.layers[1], "layers.1.weight"), (model.first, "first.weight")):  # type: ignore[index]
            weight = owner.weight  # type: ignore[union-attr,operator]
            for what, read in READS.items():
                with pytest.raises(UsageError, match=f"parameter {name} is ") as told:
                    read(weight)
                assert "with zero.gathered():" in str(told.value.hint), what
            assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
            assert (tuple(weight.shape), weight.dtype, weight.numel(), weight.grad) == ((4, 4), torch.float32, 16, None)
        with pytest.raises(UsageError, match=r"parameter first\.weight is read while it is partitioned"):
            model.double()
        with engine.gathered():
            assert all(type(p) is nn.Parameter and bool(p.norm() > 0) for p in model.parameters())
        engine.backward(model(X))
        engine.step()
    assert kinds == {nn.Parameter}, "what computes sees torch's own class"
    assert {name for name, _ in model.named_parameters()} == set(engine.layout.by_name)
    later = iter([False, False, True])
    engine = _engine(use=lambda model, x: x * model.layers[0].bias if next(later) else x)
    for _ in range(2):
        engine.backward(engine.model(X))
        engine.step()
    with pytest.raises(UsageError, match=r"parameter layers\.0\.bias is used outside the forward of layers\.0"):
        engine.model(X)


def _states(rank: int, world: int) -> None:
    for stage, precision in ((3, "fp32"), (3, "bf16"), (2, "bf16"), (1, "fp32")):
        engine = _engine(stage, precision)
        with engine.gathered():
            state = {name: torch.zeros_like(value) for name, value in engine.model.state_dict().items()}
        if stage == 3:
            with pytest.raises(UsageError, match=r"state_dict\(\) was called while parameters are partitioned"):
                engine.model.state_dict()
        if stage == 3 or precision == "bf16":
            with engine.gathered():
                for part, values in ((engine.model, state), (engine.model.layers[0], {"weight": X, "bias": X})):  # type: ignore[index]
                    with pytest.raises(UsageError, match=r"load_state_dict\(\) was called on a model that ZeroEngine"):
                        part.load_state_dict(values)
        else:
            engine.backward(engine.model(X))
            engine.step()
            engine.model.load_state_dict(state)
            engine.backward(engine.model(X))
            engine.step()
            assert float(engine.model.first.weight.detach().abs().max()) < 0.2  # type: ignore[operator,union-attr]


def _crossed(rank: int, world: int) -> None:
    """On sockets units of one size would go on with each other's values."""
    engine = ZeroEngine(
        Model(lambda model, x: x), {"zero": {"stage": 3, "same_host": "send"}, "optimizer": {"lr": 0.1}}
    )
    if rank == 1:
        engine.model.layers = nn.ModuleList([engine.model.layers[n] for n in (1, 0, 2)])  # type: ignore[index]
    with pytest.raises(UsageError, match="rank 1 of those that share the parameters used other blocks than rank 0"):
        engine.model(X)
    settings = {"stage": 3, "same_host": "send", "prefetch": 0}
    engine = ZeroEngine(Model(lambda model, x: x), {"zero": settings, "optimizer": {"lr": 0.1}})
    layers = list(engine.model.layers)  # type: ignore[arg-type]
    for step in range(2):
        if step and rank == 1:
            engine.model.layers = nn.ModuleList([layers[n] for n in (1, 0, 2)])
        with engine.gathered(), torch.no_grad():
            if rank == 0:
                engine.model(X)  # alone: nothing is gathered for it
        engine.backward(engine.model(X))
        if step:
            with pytest.raises(UsageError, match="rank 1 used other blocks than rank 0 in this step"):
                engine.step()
        else:
            engine.step()


def _penalty(engine: ZeroEngine, x: Tensor) -> Tensor:
    loss: Tensor = engine.model(x)
    (slope,) = torch.autograd.grad(engine.model(x), x, create_graph=True)
    return loss + slope.square().sum()


def _twice(rank: int, world: int) -> None:
    """What a second backward needs of a block is not there, unless all blocks stay; each of these was SIGSEGV."""
    found = []
    for stage in (2, 3):
        zero = {"stage": stage, **({"reshard": "keep"} if stage == 3 else {})}
        engine = ZeroEngine(Model(lambda model, x: x), {"zero": zero, "optimizer": {"lr": 0.1}})
        losses = []
        for step in range(3):
            loss = _penalty(engine, (X + rank + step).requires_grad_())
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append(losses)
    assert found[0] == found[1]
    for steps in (0, 2):
        engine = _engine()
        for _ in range(steps):
            engine.backward(engine.model(X))
            engine.step()
        for _ in range(2):
            with pytest.raises(UsageError, match=r"makes a graph for a second one \(create_graph=True\)") as told:
                _penalty(engine, X.clone().requires_grad_())
            assert "zero.reshard: keep" in str(told.value.hint)
        with pytest.raises(UsageError, match=r"inside a transform of torch\.func"):
            torch.vmap(engine.model)(X)
        with torch.no_grad():
            torch.vmap(engine.model)(X)
        engine.backward(engine.model(X))
        engine.step()


def _failed(rank: int, world: int) -> None:
    engine = _engine()

    def fails(_gradient: Tensor) -> None:
        raise ValueError("in a hook")

    handle = engine.model.layers[1].weight.register_hook(fails)  # type: ignore[index,union-attr,operator]
    with pytest.raises(ValueError, match="in a hook"):
        engine.backward(engine.model(X))
    handle.remove()
    with pytest.raises(UsageError, match=r"loss\.backward\(\) was called; the engine's is"):
        engine.model(X).backward()
    for call in (lambda: engine.backward(engine.model(X)), engine.step):
        with pytest.raises(UsageError, match="an earlier backward raised an error: its gradients are incomplete"):
            call()


def _all(rank: int, world: int) -> None:
    for what in (_reads, _by_hand, _states, _crossed, _twice, _failed):
        what(rank, world)


def test_it_is_refused_by_name_or_right() -> None:
    run_ranks(2, _all)
