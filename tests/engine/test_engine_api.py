"""``ZeroEngine`` in a script of one's own: what it tells a user who holds it wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from engine_models import MODELS, batches, digest, engine_of, relative, train, undistributed, whole_state
from engine_ranks import outcomes, run_ranks
from torch import nn

from launcher.contract.errors import UsageError
from launcher.contract.train import AdamW
from launcher.engine import EngineConfig, ZeroEngine
from launcher.engine.zero import NonFinite


def test_importing_the_engine_loads_no_torch() -> None:
    code = "import sys, launcher.engine; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_one_process_needs_no_process_group() -> None:
    model = nn.Linear(5, 3)
    zero = ZeroEngine(model, {"zero": {"stage": 3}, "optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}})
    before = model.weight.detach().clone()
    zero.backward(model(torch.ones(2, 5)).square().mean())
    info = zero.step()
    assert info.grad_norm > 0 and not info.skipped
    assert not torch.equal(before, model.weight)


def test_step_off_the_boundary_and_backward_beyond_it() -> None:
    zero = engine_of("gpt", stage=0, accumulation=2)
    batch = batches(1, 2, 37)[0]

    def backward() -> None:
        zero.backward(zero.model(batch[:, :-1], batch[:, 1:]))

    with pytest.raises(UsageError, match="after 0 of 2"):
        zero.step()
    backward()
    with pytest.raises(UsageError, match="after 1 of 2"):
        zero.step()
    backward()
    with pytest.raises(UsageError, match=r"3 times.*accumulation is 2"):
        backward()
    zero.step()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero": {"stage": 4}, "optimizer": {"lr": 0.1}}, "accepted are 0, 1, 2 and 3"),
        ({"zero": {"stage": 1}, "optimizer": {"lr": 0.1}, "precision": "fp8"}, "accepted are fp32, bf16, fp16"),
        ({"zero": {"stage": 1}, "optimizer": {"lr": 0.1}, "acumulation": 2}, "unknown key 'acumulation'"),
        ({"zero": {"stage": 1}, "optimizer": {}}, "'lr' is missing"),
        ({"zero": {"stage": 1, "reduce_every": "x"}, "optimizer": {"lr": 0.1}}, "micro_step and step"),
    ],
)
def test_a_wrong_config_says_what_is_accepted(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        EngineConfig.of(config)


def _other_model(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if rank == 1 else 4))
    ZeroEngine(model, {"zero": {"stage": 2}, "optimizer": {"lr": 0.1}})


def test_a_rank_with_another_model_is_named_on_every_rank() -> None:
    for ok, trace in outcomes(2, _other_model):
        assert not ok
        assert "rank 1 has another model than rank 0" in trace
        assert "1.weight" in trace and "shape" in trace


def _other_weights(rank: int, world: int) -> str:
    torch.manual_seed(rank)
    zero = ZeroEngine(nn.Linear(7, 3), {"zero": {"stage": 3}, "optimizer": {"lr": 0.1}})
    return digest(whole_state(zero))


def test_rank_zeros_first_parameters_are_everyones() -> None:
    assert len(set(run_ranks(3, _other_weights))) == 1


def _nan(rank: int, world: int, policy: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"zero": {"stage": 2}, "optimizer": {"lr": 0.1}, "nonfinite": policy}
    zero = ZeroEngine(model, config)
    loss = model(torch.ones(1, 4)).sum()
    if rank == 1:
        loss = loss + model[1].bias[2] * float("nan")
    before = digest(whole_state(zero))
    zero.backward(loss)
    if policy == "skip":
        assert zero.step().skipped
        assert digest(whole_state(zero)) == before
        assert zero.optimizer.updates == 0
        return ""
    with pytest.raises(NonFinite) as caught:
        zero.step()
    return str(caught.value)


def test_a_nan_is_found_on_every_rank_and_named() -> None:
    for message in run_ranks(2, _nan, "stop"):
        assert "1.bias" in message and "the loss of rank 1 was nan" in message
    run_ranks(2, _nan, "skip")


def test_parameters_replaced_under_the_engine_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero = ZeroEngine(model, {"zero": {"stage": 0}, "optimizer": {"lr": 0.1}})
    model[1].weight.data = torch.zeros(4, 4)
    zero.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(UsageError, match=r"parameter 1\.weight was given other memory"):
        zero.step()


def _groups(rank: int, world: int) -> None:
    optimizer = AdamW(lr=1e-2, weight_decay=0.3, clip=0.5, eps=1e-5)
    plain = [n for n, p in MODELS["gpt"][0]().named_parameters() if p.ndim < 2]
    steps = batches(4, 4, 37)

    def torch_groups(model: nn.Module) -> list[dict[str, object]]:
        few = [p for p in model.parameters() if p.ndim < 2]
        many = [p for p in model.parameters() if p.ndim >= 2]
        return [{"params": many}, {"params": few, "weight_decay": 0.0, "lr": 5e-3}]

    losses, states = undistributed("gpt", steps, optimizer, torch.float64, torch_groups)
    for stage in range(4):
        zero = engine_of(
            "gpt",
            stage=stage,
            dtype=torch.float64,
            optimizer=optimizer,
            groups=[{"params": plain, "weight_decay": 0.0, "lr_scale": 0.5}],
        )
        for (loss, _), expected in zip(train(zero, steps), losses, strict=True):
            assert loss == pytest.approx(expected, rel=1e-12)
        state = whole_state(zero)
        assert max(relative(state[n], v) for n, v in states[-1].items()) < 1e-12


def test_parameter_groups() -> None:
    run_ranks(2, _groups)


def test_groups_that_name_no_parameter() -> None:
    with pytest.raises(UsageError, match="'nope', which is no parameter"):
        engine_of("gpt", stage=0, groups=[{"params": ["nope"]}])
    with pytest.raises(UsageError, match=r"norm\.weight is in two groups"):
        engine_of("gpt", stage=0, groups=[{"params": ["norm.weight"]}, {"params": ["norm.weight"]}])
