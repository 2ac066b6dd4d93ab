"""Tensor parallelism × ZeRO stages × data ranks against the undistributed run, after every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import batches, digest, rank_after_rank, relative
from engine_ranks import run_ranks
from torch import Tensor

from launcher.contract.partition import state_bytes
from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import joined, split_of
from launcher.engine.zero import ZeroEngine

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37)
DROPOUT = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37, dropout=0.2)
OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)


def _engine(ranks: Ranks, stage: int, dtype: torch.dtype = torch.float64, **more: Any) -> ZeroEngine:
    """Stage 3 is built tensor by tensor (deferred), the others whole and cut."""
    config: GPTConfig = more.pop("gpt", CONFIG)

    def build() -> torch.nn.Module:
        torch.manual_seed(3)
        model = TensorGPT(config, ranks.tensor) if ranks.degree > 1 else GPT(config)
        for block in model.blocks:
            block.attention.dropout = 0.0  # type: ignore[union-attr]
        return model.to(dtype)

    bucket = more.pop("bucket", 3000)
    return ZeroEngine(
        build if more.pop("deferred", False) else build(),
        EngineConfig(Zero(stage, bucket, replicas=ranks.replica.size), more.pop("optimizer", OPTIMIZER), **more),
        ranks=ranks,
    )


def _whole(engine: ZeroEngine) -> dict[str, Tensor]:
    with engine.gathered():
        return {
            name: p.detach().clone() if split_of(p) is None else joined(p, split_of(p), engine.ranks.tensor)  # type: ignore[arg-type]
            for name, p in engine.model.named_parameters()
        }


def _train(engine: ZeroEngine, step: int, batch: Tensor) -> tuple[float, float]:
    """One step on this data rank's rows; (mean loss over data ranks, norm). Dropout follows the data rank."""
    data, accumulation = engine.comm, engine.config.accumulation
    micro = batch.shape[0] // (data.size * accumulation)
    total = torch.zeros(1, dtype=torch.float64)
    for number in range(accumulation):
        first = (number * data.size + data.rank) * micro
        mine = batch[first : first + micro]
        torch.manual_seed(1000 * step + 10 * number + data.rank)
        loss = engine.model(mine[:, :-1], mine[:, 1:])
        engine.backward(loss)
        total += loss.detach() / accumulation
    info = engine.step()
    return float(data.gather_small(total, "loss").mean()), info.grad_norm


def _undistributed(steps: list[Tensor], parts: int, dtype: torch.dtype) -> tuple[list[float], list[float], list[Any]]:
    """Plain PyTorch, a data rank's rows after the other's with that rank's dropout."""
    torch.manual_seed(3)
    model = GPT(DROPOUT).to(dtype)
    for block in model.blocks:
        block.attention.dropout = 0.0  # type: ignore[union-attr]
    return rank_after_rank(model, lambda model, x, y: model(x, y), steps, parts, OPTIMIZER)


def _parity(
    rank: int, world: int, dtype: torch.dtype, count: int, bounds: tuple[float, float], replicas: int = 1
) -> None:
    ranks = Ranks.connect(2, replicas=replicas)
    steps = batches(count, 4, 37)
    losses, norms, states = _undistributed(steps, ranks.data.size, dtype)
    bits = set()
    for stage in range(4):
        engine = _engine(ranks, stage, dtype, gpt=DROPOUT, deferred=stage == 3)
        history = []
        for number, batch in enumerate(steps):
            loss, norm = _train(engine, number, batch)
            history.append((loss, norm))
            assert abs(loss - losses[number]) < bounds[0] * losses[number], (stage, number)
            assert abs(norm - norms[number]) < 10 * bounds[0] * norms[number], (stage, number)
            state = _whole(engine)
            for name, value in states[number].items():
                assert relative(state[name], value) < bounds[1], (stage, number, name)
        bits.add((tuple(history), digest(state)))
        assert tuple(engine.memory()[k] for k in ("parameters", "gradients", "optimizer")) == tuple(
            state_bytes(engine.layout, stage)
        )
    assert len(bits) == 1, "the stages have the same bits"


@pytest.mark.parametrize("world", [2, 4])
def test_float64_equals_undistributed_after_every_step(world: int) -> None:
    run_ranks(world, _parity, torch.float64, 6, (1e-12, 1e-12))


@pytest.mark.full
def test_float64_on_two_replicas_of_two_data_and_two_tensor_ranks() -> None:
    run_ranks(8, _parity, torch.float64, 3, (1e-12, 1e-12), 2)


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_float32_stays_close_to_undistributed(world: int) -> None:
    run_ranks(world, _parity, torch.float32, 20, (1e-5, 1e-4))


def _narrow(rank: int, world: int, precision: str) -> None:
    """16 bits with an fp32 master, losses in fp32; fp16's scale is agreed by all ranks."""
    ranks = Ranks.connect(2)
    steps = batches(3, 4, 37)
    bits = set()
    for stage in range(4):
        engine = _engine(ranks, stage, torch.float32, gpt=DROPOUT, precision=precision)
        history = [_train(engine, number, batch) for number, batch in enumerate(steps)]
        bits.add((tuple(history), engine.loss_scale.value, digest(_whole(engine))))
        assert tuple(engine.memory()[k] for k in ("parameters", "gradients", "optimizer")) == tuple(
            engine.state_bytes()
        )
    assert len(bits) == 1
    losses, _, _ = _undistributed(steps, ranks.data.size, torch.float32)
    assert [loss for loss, _ in history] == pytest.approx(losses, rel=2e-2)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_give_the_same_bits_at_every_stage(precision: str) -> None:
    run_ranks(4, _narrow, precision)


def _switches(rank: int, world: int) -> None:
    """Recomputation, where its inputs wait, bucket sizes: never one bit. Accumulation and dropout are on."""
    ranks = Ranks.connect(2)
    steps = batches(2, 4 * ranks.data.size, 37)
    found = []
    cases: list[dict[str, Any]] = [{"stage": 0}, {"stage": 3, "bucket": 400}]
    for stage in (1, 3):
        cases += [{"stage": stage, "recompute": "block", "activations": a} for a in ("whole", "partitioned", "host")]
    cases += [{"stage": 2, "recompute": (1,), "activations": "partitioned"}]
    for case in cases:
        engine = _engine(ranks, dtype=torch.float32, gpt=DROPOUT, accumulation=2, **case)
        # bucket sizes and stages reduce after the same micro-steps, so that sums are the same
        history = [_train(engine, number, batch) for number, batch in enumerate(steps)]
        found.append((history, digest(_whole(engine))))
        memory = engine.memory()
        assert memory["gathered"] == 0
        part = -(-2 * 7 * 16 // 2) * 4
        blocks = {"whole": 0}.get(case.get("activations", "whole"), 2 if case.get("recompute") == "block" else 1)
        assert memory["stored"] + memory["host"] == blocks * part, case
    groups: dict[bool, list[Any]] = {}
    for case, bits in zip(cases, found, strict=True):
        groups.setdefault(case["stage"] >= 2, []).append(bits)
    for rows in groups.values():
        assert all(row == rows[0] for row in rows)


def test_no_switch_changes_a_bit() -> None:
    run_ranks(4, _switches)


def _checkpoint(
    rank: int, world: int, folder: str, tensor: int, stage: int, save: bool, replicas: int = 1
) -> tuple[Any, ...]:
    """Trains two steps; saves, or loads another's checkpoint first. (hash of all state, next losses, shard names)"""
    ranks = Ranks.connect(tensor, replicas=replicas)
    steps = batches(4, 4, 37)
    engine = _engine(ranks, stage, torch.float32)
    if save:
        for number in range(2):
            _train(engine, number, steps[number])
        engine.save(Path(folder), 2)
    else:
        assert engine.load(Path(folder))[0] == 2
        assert engine.optimizer.updates == 2
    state = digest(_whole(engine))
    return state, tuple(_train(engine, number, steps[number])[0] for number in (2, 3))


@pytest.mark.full
def test_replicas_of_tensor_ranks_are_saved_once_and_read_by_others(tmp_path: Path) -> None:
    state, losses = run_ranks(8, _checkpoint, str(tmp_path), 2, 3, True, 2)[0]
    assert len(list(tmp_path.glob("step-*/rank-*.safetensors"))) == 4
    for world, tensor, stage, replicas in ((8, 2, 3, 2), (4, 2, 1, 1), (4, 1, 2, 2)):
        found = run_ranks(world, _checkpoint, str(tmp_path), tensor, stage, False, replicas)
        assert {row[0] for row in found} == {state}
        assert found[0][1] == (losses if world == 8 else pytest.approx(losses, rel=1e-5))


def _saved_once(rank: int, world: int, folder: str) -> dict[str, int]:
    ranks = Ranks.connect(2)
    engine = _engine(ranks, 1, torch.float32)
    engine.save(Path(folder), 0)
    import safetensors

    with safetensors.safe_open(f"{folder}/step-00000000/rank-{rank:05d}.safetensors", "pt") as shard:
        return {name: shard.get_slice(name).get_shape()[0] for name in shard.keys()}  # noqa: SIM118


def test_what_is_replicated_is_saved_once(tmp_path: Path) -> None:
    shards = run_ranks(4, _saved_once, str(tmp_path))
    for rank, shard in enumerate(shards):
        names = {name.split("/")[0] for name in shard}
        assert ("blocks.0" in names and "norm" in names) == (rank % 2 == 0)
        assert "blocks.0#1" in names and "embedding" in names
    saved = sum(n for shard in shards for name, n in shard.items() if name.endswith("/parameters"))
    whole = sum(p.numel() for p in GPT(CONFIG).parameters())
    assert 0 <= saved - whole <= 16 + 2 * 10, "one padded word, and bucket ends"
