"""SGD and the element-wise optimizers of torch.optim: torch's own numbers, at any stage, cut anywhere, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import MODELS, batches, digest, engine_of, relative, train, whole_state
from engine_ranks import run_ranks
from torch import Tensor

from launcher.contract.errors import UsageError
from launcher.contract.train import SGD, AdamW
from launcher.engine.config import EngineConfig
from launcher.engine.model.flat import Run
from launcher.engine.model.units import Group
from launcher.engine.update.elementwise import ELEMENTWISE, Chosen

optim = torch.optim
CASES: dict[str, tuple[Any, Callable[[Any], optim.Optimizer]]] = {
    "sgd": (SGD(0.05, 0.0, weight_decay=0.1), lambda g: optim.SGD(g, lr=0.05, weight_decay=0.1)),
    "momentum": (SGD(0.05, 0.9), lambda g: optim.SGD(g, lr=0.05, momentum=0.9)),
    "nesterov": (
        SGD(0.05, 0.9, nesterov=True, weight_decay=0.1),
        lambda g: optim.SGD(g, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "Adam amsgrad": (None, lambda g: optim.Adam(g, lr=0.01, eps=1e-5, amsgrad=True)),
    "RMSprop": (None, lambda g: optim.RMSprop(g, lr=0.01, eps=1e-3, momentum=0.9, centered=True, weight_decay=0.1)),
    "Adagrad": (None, lambda g: optim.Adagrad(g, lr=0.01, initial_accumulator_value=0.3)),
    "ASGD": (None, lambda g: optim.ASGD(g, lr=0.01, t0=2)),
    "Rprop": (None, lambda g: optim.Rprop(g, lr=0.01)),
    "NAdam": (None, lambda g: optim.NAdam(g, lr=0.01, eps=1e-5)),
    "RAdam": (None, lambda g: optim.RAdam(g, lr=0.01, eps=1e-5)),
    "Adamax": (None, lambda g: optim.Adamax(g, lr=0.01, eps=1e-5)),
    "Adadelta": (None, lambda g: optim.Adadelta(g, lr=0.5)),
    "AdamW": (None, lambda g: optim.AdamW(g, lr=0.01, eps=1e-5)),
}


def _chosen(case: str) -> Chosen:
    config, make = CASES[case]
    return Chosen(AdamW(1.0), make) if config is None else Chosen(config)


def _updated(case: str, cuts: list[int], dtype: torch.dtype, factor: float = 0.37) -> list[Tensor]:
    chosen = _chosen(case)
    whole, gradient, *moments = (torch.zeros(1300, dtype=dtype) for _ in range(2 + len(chosen.moments)))
    given = [torch.randn(1300, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(6)]
    whole.copy_(given[5])
    runs = [
        Run(whole[a:b], gradient[a:b], tuple(m[a:b] for m in moments), 0)
        for a, b in zip([0, *cuts], [*cuts, 1300], strict=True)
    ]
    optimizer = chosen.on(runs, [Group()])
    for number in range(5):
        gradient.copy_(given[number])
        optimizer.step(chosen.lr, factor)
    return [whole, *moments]


@pytest.mark.parametrize("case", list(CASES))
def test_torchs_numbers_wherever_runs_are_cut(case: str) -> None:
    for a, b in zip(_updated(case, [], torch.float64), _updated(case, [3, 700], torch.float64), strict=True):
        assert torch.equal(a, b)
    expected = _updated(case, [], torch.float32)
    for cuts in ([1], [1299], [3, 20, 21, 1000], [0, 7]):
        for a, b in zip(expected, _updated(case, cuts, torch.float32), strict=True):
            assert torch.equal(a, b), cuts
    given = [torch.randn(1300, generator=torch.Generator().manual_seed(i)).double() for i in range(6)]
    reference = torch.nn.Parameter(given[5].clone())
    theirs = CASES[case][1]([reference])
    for gradient in given[:5]:
        reference.grad = gradient * 0.37
        theirs.step()
    torch.testing.assert_close(_updated(case, [9], torch.float64)[0], reference.detach(), rtol=1e-13, atol=1e-13)


def test_every_listed_class_is_tried() -> None:
    assert {type(make([torch.zeros(1)])).__name__ for _, make in CASES.values()} == set(ELEMENTWISE)


class _Mine(optim.SGD):
    pass


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (optim.Adafactor, "optimizer Adafactor cannot be partitioned"),
        (optim.Muon, "optimizer Muon cannot be partitioned"),
        (optim.LBFGS, "optimizer LBFGS cannot be partitioned"),
        (optim.SparseAdam, "optimizer SparseAdam cannot be partitioned"),
        (lambda g: optim.Adafactor(g, lr=0.1), "optimizer Adafactor cannot be partitioned"),
        (_Mine, "optimizer _Mine cannot be partitioned"),
        (lambda g: optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda g: optim.SGD([torch.zeros(3)], lr=0.1), "of other parameters"),
        (lambda g: 3, "returned int"),
    ],
)
def test_others_are_refused_by_name(choice: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        engine_of("gpt", stage=0, choice=choice)


def test_a_class_takes_the_configs_rate_and_decay_and_groups_scale_them() -> None:
    config = AdamW(0.02, weight_decay=0.1)
    groups = [{"params": ["scale"], "lr_scale": 0.5, "weight_decay": 0.0}]
    engine = engine_of("odd", stage=0, dtype=torch.float64, optimizer=config, groups=groups, choice=optim.RMSprop)
    model = MODELS["odd"][0]().double()
    rest = [p for n, p in model.named_parameters() if n != "scale" and p.requires_grad]
    theirs = optim.RMSprop([{"params": rest}, {"params": [model.scale], "lr": 0.01, "weight_decay": 0.0}], 0.02)
    theirs.param_groups[0]["weight_decay"] = 0.1
    for batch in batches(3, 4, 13):
        train(engine, [batch])
        theirs.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        theirs.step()
    state = whole_state(engine)
    for name, value in model.named_parameters():
        torch.testing.assert_close(state[name], value.detach(), rtol=1e-11, atol=1e-12)
    with pytest.raises(UsageError, match="Rprop has no weight decay"):
        engine_of("odd", stage=0, optimizer=config, choice=optim.Rprop)


def test_plain_mappings_say_which_by_their_keys() -> None:
    zero = {"stage": 1}
    assert EngineConfig.of({"zero": zero, "optimizer": {"lr": 0.1, "momentum": 0.5}}).optimizer == SGD(0.1, 0.5)
    assert EngineConfig.of({"zero": zero, "optimizer": {"lr": 0.1}}).optimizer == AdamW(0.1)
    with pytest.raises(UsageError, match="nesterov needs a momentum"):
        EngineConfig.of({"zero": zero, "optimizer": {"lr": 0.1, "momentum": 0, "nesterov": True}})


# --- over ranks -------------------------------------------------------------------------------------------


def _settings(case: str) -> dict[str, Any]:
    config, make = CASES[case]
    return {"optimizer": AdamW(1.0)} | {"choice": make} if config is None else {"optimizer": config}


def _reference(case: str, steps: list[Tensor]) -> dict[str, Tensor]:
    model = MODELS["odd"][0]().double()
    theirs = CASES[case][1]([p for p in model.parameters() if p.requires_grad])
    for batch in steps:
        theirs.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        theirs.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def _distributed(rank: int, world: int, case: str, folder: str) -> None:
    """Stages and bucket sizes bit for bit; an interrupted run bit for bit; the undistributed numbers in float64."""
    steps = batches(4, 4 * world, 13)
    more = _settings(case)
    bits = set()
    for stage in range(4):
        whole = engine_of("odd", stage=stage, bucket=500 + 100 * stage, **more)
        expected = train(whole, steps)
        memory, form = whole.memory(), whole.state_bytes()
        assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == tuple(form)
        first = engine_of("odd", stage=stage, bucket=500, **more)
        found = train(first, steps[:2])
        first.save(f"{folder}/{stage}", 2)
        # Resumed from another stage's checkpoint where there is one.
        second = engine_of("odd", stage=stage, bucket=900, **more)
        second.load(f"{folder}/{max(0, stage - 1)}")
        assert found + train(second, steps[2:]) == expected
        bits |= {digest(whole_state(e)) for e in (whole, second)}
    assert len(bits) == 1
    double = engine_of("odd", stage=3, dtype=torch.float64, **more)
    train(double, steps)
    reference = _reference(case, steps)
    for name, value in whole_state(double).items():
        assert relative(value, reference[name]) < 1e-11, name


@pytest.mark.parametrize(
    "case",
    ["nesterov", "RMSprop", "ASGD", *(pytest.param(c, marks=pytest.mark.full) for c in ("sgd", "NAdam", "Adagrad"))],
)
def test_stages_and_resumed_runs_are_bitwise_equal(case: str, tmp_path: Path) -> None:
    run_ranks(2, _distributed, case, str(tmp_path))


def test_state_of_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_of("odd", stage=0)
    engine.save(tmp_path, 1)
    with pytest.raises(UsageError, match="saved with the optimizer AdamW, not SGD"):
        engine_of("odd", stage=0, optimizer=SGD(0.1, 0.9)).load(tmp_path)


def test_our_adamw_goes_on_in_torchs(tmp_path: Path) -> None:
    same = AdamW(0.01, betas=(0.9, 0.999), weight_decay=0.01)
    engine = engine_of("odd", stage=0, optimizer=same)
    train(engine, batches(2, 4, 13))
    engine.save(tmp_path, 1)
    other = engine_of("odd", stage=0, optimizer=same, choice=optim.AdamW)
    other.load(tmp_path)
    train(engine, batches(1, 4, 13, seed=5))
    train(other, batches(1, 4, 13, seed=5))
    for name, value in whole_state(engine).items():
        torch.testing.assert_close(whole_state(other)[name], value)
