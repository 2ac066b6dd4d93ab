"""bf16 and fp16 with an fp32 master: close to fp32, equal among the stages, exact in memory and checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import MODELS, batches, digest, engine_of, train, whole_state
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.errors import UsageError
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.model.precision import LossScale
from launcher.engine.zero import NonFinite, ZeroEngine

OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)


def _engine(name: str, stage: int, precision: str, **zero: Any) -> ZeroEngine:
    return ZeroEngine(
        MODELS[name][0](), EngineConfig(Zero(stage, **zero), OPTIMIZER, accumulation=2, precision=precision)
    )


def _run(rank: int, world: int, precision: str, folder: str) -> list[list[float]]:
    steps = batches(4, 4 * world, 37)
    histories, bits = [], {}
    for reduce_every in ("step", "micro_step"):
        for stage in range(4):
            engine = _engine("gpt", stage, precision, bucket_bytes=1004, reduce_every=reduce_every)
            first = {n: p.dtype for n, p in engine.model.named_parameters()}
            assert set(first.values()) == {torch.bfloat16 if precision == "bf16" else torch.float16}
            histories.append([loss for loss, _ in train(engine, steps)])
            memory = engine.memory()
            assert tuple(memory[k] for k in ("parameters", "gradients", "optimizer")) == tuple(engine.state_bytes())
            bits[reduce_every, stage] = digest(whole_state(engine))
    # Summed in 16-bit messages or in slices of the fp32 gradient, the order of adds differs with accumulation only.
    for reduce_every in ("step", "micro_step"):
        assert len({bits[reduce_every, stage] for stage in range(4)}) == 1, reduce_every
    engine.save(folder, 1)
    again = _engine("gpt", 1, precision)
    again.load(folder)
    assert digest(whole_state(again)) == bits["micro_step", 3]
    assert train(again, steps[:1]) == train(engine, steps[:1])
    return histories


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_follow_fp32_and_stages_agree(tmp_path: Any, precision: str) -> None:
    steps = batches(4, 8, 37)
    plain = ZeroEngine(MODELS["gpt"][0](), EngineConfig(Zero(0), OPTIMIZER))
    expected = [loss for loss, _ in train(plain, steps)]
    for histories in run_ranks(2, _run, precision, str(tmp_path)):
        for history in histories:
            assert history == pytest.approx(expected, rel=2e-2)


def _narrow(rank: int, world: int) -> None:
    for stage in range(4):
        engine = _engine("odd", stage, "bf16", gradient_dtype="bf16", bucket_bytes=500)
        train(engine, batches(2, 4 * world, 13))
        memory = engine.memory()
        assert tuple(memory[k] for k in ("parameters", "gradients", "optimizer")) == tuple(engine.state_bytes())


def test_gradients_may_be_narrow_too() -> None:
    run_ranks(2, _narrow)


def test_the_loss_scale_halves_on_overflow_and_skips_the_step() -> None:
    model = nn.Linear(4, 4, bias=False)
    zero = ZeroEngine(model, {"zero": {"stage": 0}, "optimizer": {"lr": 0.1}, "precision": "fp16"})
    before = model.weight.detach().clone()
    assert zero.loss_scale.value == 2.0**16
    zero.backward(model(torch.ones(1, 4, dtype=torch.float16)).sum().float() * 30.0)  # 30 · 2^16 is no fp16
    assert zero.step().skipped
    assert zero.loss_scale.value == 2.0**15
    assert torch.equal(model.weight, before) and zero.optimizer.updates == 0
    for _ in range(6):
        zero.backward(model(torch.ones(1, 4, dtype=torch.float16)).sum().float() * 30.0)
        zero.step()
    assert zero.loss_scale.value < 2.0**12
    assert zero.optimizer.updates > 0 and not torch.equal(model.weight, before)
    zero.loss_scale.value = 1.0  # as small as it gets: then the gradient itself is wrong
    zero.backward(model(torch.ones(1, 4, dtype=torch.float16)).sum().float() * float("inf"))
    with pytest.raises(NonFinite, match="weight"):
        zero.step()


def test_the_loss_scale_grows_after_good_steps() -> None:
    scale = LossScale(value=4.0, adapts=True, grow_after=3)
    for _ in range(3):
        scale.went_well()
    assert (scale.value, scale.good_steps) == (8.0, 0)
    assert scale.overflowed() and scale.value == 4.0
    fixed = LossScale.of("bf16")
    fixed.went_well()
    assert fixed.value == 1.0 and not fixed.overflowed()


def _as_fp32(rank: int, world: int, folder: str) -> None:
    engine = _engine("odd", 2, "bf16")
    train(engine, batches(2, 4 * world, 13))
    engine.save(folder, 3)
    masters = {u.unit.name: torch.cat(u.own_parameters()).float() for u in engine.units}
    plain = engine_of("odd", stage=3, accumulation=2)
    plain.load(folder)
    for flat in plain.units:
        name = flat.unit.name
        mine = torch.cat(flat.own_parameters())
        assert torch.equal(mine, masters[name]), name


def test_a_bf16_checkpoint_is_the_fp32_state(tmp_path: Any) -> None:
    run_ranks(2, _as_fp32, str(tmp_path))


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", 1.0 / 10000 ** torch.linspace(0, 1, 5), persistent=False)
        self.register_buffer("table", torch.linspace(0, 1, 7))
        self.register_buffer("ones", torch.ones(3))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Any) -> Any:
        return self.linear(x * torch.cos(8000 * self.angles).to(x.dtype)).float().square().mean()


class _Named(nn.Module):
    def __init__(self, keep: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = _Rotary()
        self.inner.zero_keep_dtype = keep

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def _kept_buffers(rank: int, world: int, folder: str) -> None:
    whole = _Named(()).inner.angles.clone()  # type: ignore[operator]
    for stage in (0, 3):
        for build in (lambda: _Named(("angles",)), _Named(("angles",))):
            engine = ZeroEngine(build, EngineConfig(Zero(stage), OPTIMIZER, precision="bf16"))
            inner = engine.model.inner
            assert torch.equal(inner.angles, whole) and inner.table.dtype == torch.bfloat16  # type: ignore[union-attr,arg-type]
            engine.backward(engine.model(torch.ones(2, 5, dtype=torch.bfloat16)))
            engine.step()
            assert torch.equal(inner.angles, whole)  # type: ignore[union-attr,arg-type]
    with pytest.raises(UsageError, match=r"zero_keep_dtype: the model has no buffer inner\.angel"):
        ZeroEngine(_Named(("angel",)), EngineConfig(Zero(0), OPTIMIZER, precision="bf16"))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher.engine").addHandler(handler)
    ZeroEngine(_Named(()), EngineConfig(Zero(0), OPTIMIZER, precision="bf16"))
    ZeroEngine(_Named(()), EngineConfig(Zero(0), OPTIMIZER))
    told = [] if rank else ["bf16 rounds the buffers inner.angles, inner.table"]
    assert [line.partition(";")[0] for line in said] == told


def test_buffers_that_a_module_names_are_not_rounded(tmp_path: Path) -> None:
    run_ranks(2, _kept_buffers, str(tmp_path))
