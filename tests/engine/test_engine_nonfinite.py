"""A gradient that is not finite: the parameter, and the rank that made it, which is not where its sum lies."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.zero import NonFinite, ZeroEngine


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def _engine(stage: int, reduce_every: str | None = None, **more: Any) -> ZeroEngine:
    return ZeroEngine(_model(), EngineConfig(Zero(stage, reduce_every=reduce_every), SGD(0.1, 0.0), **more))


def _bias(engine: ZeroEngine) -> Any:
    """Of the last layer, whose gradient's end is in the last rank's shard."""
    return engine.model[1].bias  # type: ignore[index]


def _told(engine: ZeroEngine) -> str:
    with pytest.raises(NonFinite) as caught:
        engine.step()
    return str(caught.value)


def _loss_of(engine: ZeroEngine, rank: int) -> Any:
    return engine.model(torch.ones(1, 4) * (rank + 1)).sum()


def _nan_loss(rank: int, world: int, maker: int) -> list[str]:
    """The loss of ``maker`` is NaN in its second micro-step, through a parameter that the last rank owns."""
    told = []
    for stage in range(4):
        engine = _engine(stage, accumulation=2)
        engine.backward(_loss_of(engine, rank))
        loss = _loss_of(engine, rank)
        engine.backward(loss + _bias(engine)[3] * float("nan") if rank == maker else loss)
        told.append(_told(engine))
    return told


@pytest.mark.parametrize("maker", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_loss_that_is_no_number_names_its_rank_and_not_the_owner(maker: int) -> None:
    first, *others = run_ranks(2, _nan_loss, maker)
    assert all(told == first for told in others), "one answer for all"
    for message in first:
        assert f"the gradient of parameter 1.bias is not finite (norm nan): the loss of rank {maker} was nan" in message
        assert "in micro-step 2 of 2" in message
        assert "its sum lies in the shard of rank 1" in message


def _nan_gradient(rank: int, world: int, maker: int) -> dict[tuple[int, str], str]:
    """Finite losses, and on ``maker`` the root of nothing, whose derivative is 0 · ∞."""
    told = {}
    for stage, reduce_every in ((0, "step"), (1, "step"), (2, "step"), (2, "micro_step"), (3, "micro_step")):
        engine = _engine(stage, reduce_every)
        loss = _loss_of(engine, rank)
        if rank == maker:
            loss = loss + (_bias(engine)[3] * 0).sqrt()
        assert torch.isfinite(loss)
        engine.backward(loss)
        told[stage, reduce_every] = _told(engine)
    return told


def _spread(rank: int, world: int) -> list[str]:
    """What reaches the second of four layers in backward is NaN on rank 1: that layer and the one before it get it."""
    told = []
    for stage in range(4):
        engine = ZeroEngine(nn.Sequential(*_model(), *_model()), EngineConfig(Zero(stage), SGD(0.1, 0.0)))

        def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: gradient * float("nan"))

        if rank == 1:
            engine.model[1].register_forward_hook(spoil)  # type: ignore[index]
        engine.backward(_loss_of(engine, rank))
        told.append(_told(engine))
    return told


def test_what_spreads_in_backward_is_named_where_it_is_nearest_to_its_beginning() -> None:
    first, *others = run_ranks(2, _spread)
    assert all(told == first for told in others)
    for message in first:
        assert message.startswith("the gradient of parameter 1.bias is not finite (norm nan): all losses were finite")
        assert message.endswith("; 3 before it in the model are not finite either"), message


@pytest.mark.parametrize("maker", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_gradient_of_a_finite_loss_names_its_rank_where_that_is_known(maker: int) -> None:
    first, *others = run_ranks(3, _nan_gradient, maker)
    assert all(told == first for told in others)
    for (stage, reduce_every), message in first.items():
        assert "parameter 1.bias" in message and "in the shard of rank 2" in message, message
        assert "all losses were finite" in message
        if reduce_every == "step" and stage:
            assert f"the own gradient of rank {maker}" in message, message
        else:
            assert "which rank's own gradient was not is not known" in message, (stage, reduce_every, message)


def test_one_rank_alone_made_it_itself() -> None:
    engine = _engine(2)
    engine.backward((_bias(engine)[3] * 0).sqrt() + _loss_of(engine, 0))
    assert "all losses were finite, the gradient of rank 0 was not" in _told(engine)


def _skipped(rank: int, world: int, folder: str) -> None:
    engine = _engine(1, nonfinite="skip")
    before = digest(whole_state(engine))
    for bad in (True, False, True):
        loss = _loss_of(engine, rank)
        engine.backward(loss * float("inf") if bad and rank == 0 else loss)
        info = engine.step()
        assert info.skipped == bad
        assert ("the loss of rank 0 was " in info.why) == bad, info.why
    assert engine.skipped == 2 and engine.optimizer.updates == 1
    assert digest(whole_state(engine)) != before
    engine.save(folder, 3)
    again = _engine(3)
    again.load(folder)
    assert again.skipped == 2


def test_skipped_steps_are_counted_named_and_kept(tmp_path: Any) -> None:
    run_ranks(2, _skipped, str(tmp_path))


def _one_overflows(rank: int, world: int, folder: str) -> None:
    for stage in range(4):
        engine = ZeroEngine(_model(), EngineConfig(Zero(stage), AdamW(0.1, clip=1.0), precision="fp16"))
        inputs = torch.ones(1, 4, dtype=torch.float16)

        def step(factor: float, engine: ZeroEngine = engine, inputs: Tensor = inputs) -> bool:
            engine.backward(engine.model(inputs).sum().float() * factor)
            return engine.step().skipped

        before = {u.unit.name: [t.clone() for t in u.own_parameters()] for u in engine.units}
        state = whole_state(engine)
        assert engine.loss_scale.value == 2.0**16 and engine.skipped == 0
        assert step(30.0 if rank == 1 else 1e-3), "30 · 2^16 is no fp16; the other rank's gradient is one"
        assert engine.loss_scale.value == 2.0**15 and engine.skipped == 1
        for unit in engine.units:
            now = unit.own_parameters()
            assert all(torch.equal(a, b) for a, b in zip(now, before[unit.unit.name], strict=True)), stage
        assert digest(whole_state(engine)) == digest(state)
        assert not step(1e-3)
        assert (engine.skipped, engine.optimizer.updates, engine.loss_scale.value) == (1, 1, 2.0**15)
        assert digest(whole_state(engine)) != digest(state)
    engine.save(folder, 2)
    again = ZeroEngine(_model(), EngineConfig(Zero(1), AdamW(0.1, clip=1.0), precision="fp16"))
    again.load(folder)
    assert (again.skipped, again.loss_scale.value) == (1, 2.0**15)


def test_an_overflow_on_one_rank_is_skipped_by_both_and_counted(tmp_path: Any) -> None:
    run_ranks(2, _one_overflows, str(tmp_path))


def test_a_checkpoint_that_knows_no_count_begins_at_none(tmp_path: Any) -> None:
    engine = _engine(0)
    engine.skipped = 7
    engine.save(tmp_path, 1)
    manifest = tmp_path / "step-00000001" / "manifest.json"
    plain = json.loads(manifest.read_text())
    assert plain["scalars"].pop("skipped") == 7
    manifest.write_text(json.dumps(plain))
    engine.load(tmp_path)
    assert engine.skipped == 0


def _among_replicas(rank: int, world: int, maker: int) -> list[str]:
    """Ranks 0, 1 and ranks 2, 3 hold one model each: the last layer's bias is in the shards of ranks 1 and 3."""
    told = []
    for broken in ("loss", "gradient"):
        config = EngineConfig(Zero(1, reduce_every="step", replicas=2), SGD(0.1, 0.0))
        engine = ZeroEngine(_model(), config)
        loss = _loss_of(engine, rank)
        if rank == maker:
            bias = _bias(engine)[3]
            loss = loss + (bias * float("nan") if broken == "loss" else (bias * 0).sqrt())
        engine.backward(loss)
        told.append(_told(engine))
    return told


@pytest.mark.full
@pytest.mark.parametrize(
    ("maker", "whose"), [(2, "rank 2 was not"), (3, "what other ranks added: it is the own gradient of ranks 1 or 3")]
)
def test_a_rank_of_a_replica_is_named_as_far_as_is_known(maker: int, whose: str) -> None:
    first, *others = run_ranks(4, _among_replicas, maker)
    assert all(told == first for told in others)
    assert f"parameter 1.bias is not finite (norm nan): the loss of rank {maker} was nan; its sum lies in" in first[0]
    assert whose in first[1], first[1]
    assert all(message.endswith("in the shards of ranks 1 and 3") for message in first)


def _among_tensor_ranks(rank: int, world: int, maker: int) -> list[str]:
    """Ranks 0, 1 hold the two pieces of each layer, and ranks 2, 3 the same: a loss is one for both of a group."""
    ranks = Ranks.connect(2)
    torch.manual_seed(3)
    model = TensorGPT(GPTConfig(layers=1, hidden=8, heads=2, seq_len=7, vocab=16), ranks.tensor)
    engine = ZeroEngine(model, EngineConfig(Zero(1), SGD(0.1, 0.0)), ranks=ranks)
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(rank // 2))
    loss = engine.model(tokens[:, :-1], tokens[:, 1:])
    engine.backward(loss * float("inf") if rank // 2 == maker else loss)
    return [_told(engine)]


@pytest.mark.full
@pytest.mark.parametrize("maker", [0, 1])
def test_all_tensor_ranks_of_a_loss_are_named(maker: int) -> None:
    first, *others = run_ranks(4, _among_tensor_ranks, maker)
    assert all(told == first for told in others)
    assert f"the loss of rank {2 * maker} was inf, and that of rank {2 * maker + 1} too" in first[0]
