"""A model of one's own on tensor ranks by a map of its layers' names: each layer, trained at every stage, as a job."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import engine_own
import pytest
import torch
from engine_job import Job
from engine_models import batches, digest, rank_after_rank, relative
from engine_own import PLAN, Own, loss_of
from engine_ranks import run_ranks
from torch import Tensor

from launcher.contract.errors import UsageError
from launcher.contract.partition import state_bytes
from launcher.contract.train import AdamW, Batch, Checkpointing, Data, Factory, TrainConfig, Zero
from launcher.engine import build
from launcher.engine.comm import connect
from launcher.engine.config import EngineConfig
from launcher.engine.model import deferred
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.by_name import split_layers
from launcher.engine.tensor.layers import cut, joined, split_of
from launcher.engine.zero import ZeroEngine


def _own(seed: int = 0) -> Own:
    torch.manual_seed(seed)
    return Own().double()


def _mapped(rank: int, world: int) -> None:
    comm = connect()
    whole, split = _own(), _own()
    split_layers(split, PLAN, comm)
    assert split.head.weight is split.words.weight and split_of(split.head.weight) is not None
    assert sum(p.numel() for p in split.parameters()) < 0.6 * sum(p.numel() for p in whole.parameters())
    words = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
    for model in (whole, split):
        torch.manual_seed(2)
        loss_of(model, (words, words.roll(1, 1))).backward()
    expected = dict(whole.named_parameters())
    for name, mine in split.named_parameters():
        how, gradient = split_of(mine), expected[name].grad
        assert gradient is not None and mine.grad is not None
        assert relative(mine.grad, gradient if how is None else cut(gradient, how, comm)) < 1e-11, name
    refused = {
        "no layer of the model is called 'layer.0'": {"layer.0": "column"},
        "layers.0.qkv: 'diagonal' is not known": {"layers.0.qkv": "diagonal"},
        "layers.0.qkv: 'row/3' is not known": {"layers.0.qkv": "row/3"},
        "words is a Embedding, which cannot be cut by column": {"words": "column", "head": "column"},
        "one weight is tied between layers that are cut differently": {"words": "vocabulary"},
        "is to be both column and row": {"layers.0.up": "column", "layers.*.up": "row"},
        "parallel.tensor: 2 does not know how to cut this model": {},
    }
    for said, plan in refused.items():
        with pytest.raises(UsageError, match=said.replace(".", r"\.")):
            split_layers(_own(), plan, comm)


def test_a_model_of_ones_own_is_cut_by_a_map_of_names() -> None:
    run_ranks(2, _mapped)


# --- trained at every stage ---------------------------------------------------------------------------------

OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.1, eps=1e-5)


def _undistributed(steps: list[Tensor], parts: int) -> tuple[list[float], list[float], list[dict[str, Tensor]]]:
    return rank_after_rank(_own(), lambda model, x, y: loss_of(model, (x, y)), steps, parts, OPTIMIZER)


def _engine(ranks: Ranks, stage: int) -> ZeroEngine:
    def build() -> Own:
        model = _own()
        if ranks.degree > 1:
            split_layers(model, PLAN, ranks.tensor)
        return model

    return ZeroEngine(build if stage == 3 else build(), EngineConfig(Zero(stage, 600), OPTIMIZER), ranks=ranks)


def _step(engine: ZeroEngine, step: int, batch: Tensor) -> tuple[float, float]:
    rows = batch.chunk(engine.comm.size)[engine.comm.rank]
    torch.manual_seed(1000 * step + engine.comm.rank)
    loss = loss_of(engine.model, (rows[:, :-1], rows[:, 1:]))
    engine.backward(loss)
    norm = engine.step().grad_norm
    return float(engine.comm.gather_small(loss.detach().view(1), "loss").mean()), norm


def _whole(engine: ZeroEngine) -> dict[str, Tensor]:
    with engine.gathered():
        return {
            name: joined(p, how, engine.ranks.tensor) if (how := split_of(p)) else p.detach().clone()
            for name, p in engine.model.named_parameters()
        }


def _trained(rank: int, world: int, folder: str, count: int) -> None:
    deferred.LARGE = 50  # so that stage 3 makes its layers one by one
    build.built_whole = None  # type: ignore[assignment]  # and never the model
    ranks = Ranks.connect(2)
    steps = batches(count + 1, 4, 11)
    losses, norms, states = _undistributed(steps, ranks.data.size)
    bits = set()
    for stage in range(4):
        engine = _engine(ranks, stage)
        history = []
        for number, batch in enumerate(steps[:count]):
            loss, norm = _step(engine, number, batch)
            history.append((loss, norm))
            assert loss == pytest.approx(losses[number], rel=1e-12), (stage, number)
            assert norm == pytest.approx(norms[number], rel=1e-11) and norm > 0.1, (stage, number)
            state = _whole(engine)
            for name, value in states[number].items():
                assert relative(state[name], value) < 1e-12, (stage, number, name)
        bits.add((tuple(history), digest(state)))
        form = state_bytes(engine.layout, stage)
        assert tuple(engine.memory()[k] for k in ("parameters", "gradients", "optimizer")) == tuple(form)
        engine.save(f"{folder}/{stage}", count)
    assert len(bits) == 1, "the stages have the same bits"
    # What two tensor ranks saved goes on without any, over all ranks as data ranks.
    plain, tensor_only = Ranks.connect(1), digest(state)
    for stage in (0, 3):
        engine = _engine(plain, stage)
        assert engine.load(f"{folder}/{3 - stage}")[0] == count
        assert digest(_whole(engine)) == tensor_only
        engine.model.eval()  # dropout follows the data rank, of which there are more now
        again = _engine(ranks, 3 - stage)
        again.load(f"{folder}/{stage}")
        again.model.eval()
        assert _step(engine, count, steps[count]) == pytest.approx(_step(again, count, steps[count]), rel=1e-11)
        found, expected = _whole(engine), _whole(again)
        assert all(relative(found[n], expected[n]) < 1e-12 for n in expected)


@pytest.mark.parametrize("world", [4, pytest.param(2, marks=pytest.mark.full)])
def test_every_stage_trains_it_as_if_undistributed(tmp_path: Path, world: int) -> None:
    run_ranks(world, _trained, str(tmp_path), 4)


# --- as a job --------------------------------------------------------------------------------------------------


def _config(folder: Path) -> TrainConfig:
    (folder / "code").mkdir()
    shutil.copy(engine_own.__file__, folder / "code/mymodel.py")
    (folder / "code/train.bin").write_bytes(bytes(i * i % 11 for i in range(999)))
    return TrainConfig(
        zero=Zero(3, 600),
        optimizer=AdamW(lr=1e-2, clip=0.1),
        batch=Batch(micro=2, accumulation=1),
        steps=4,
        data=Data(tokens="train.bin", options={"seq_len": 8, "vocab": 11}),
        factory=Factory("mymodel:Own", loss="mymodel:loss_of"),
        tensor=2,
        split=PLAN,
        seed=5,
        checkpoint=Checkpointing(every_steps=2),
    )


def test_a_job_without_the_map_ends_and_with_it_trains(tmp_path: Path) -> None:
    job, config = Job(tmp_path, slots=2), _config(tmp_path)
    assert job.run(dataclasses.replace(config, split={})) == [2, 2], job.log(0)
    for rank in range(2):
        assert job.log(rank) == (
            f"rank {rank}: parallel.tensor: 2 does not know how to cut this model\n"
            "  parallel.split maps the names of its layers to column, row or vocabulary\n"
        )
    assert job.run(config, 2) == [0, 0], job.log(0, 2)
    losses: list[Any] = [[row["loss"] for row in job.metrics(rank, 2)] for rank in range(2)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    manifest = job.manifest(2)
    assert manifest.layout.tensor == 2 and manifest.layout.by_name["layers.0.qkv.weight"].shape == (24, 8)


@pytest.mark.full
def test_a_job_with_the_map_goes_on_without_tensor_ranks(tmp_path: Path) -> None:
    job, config = Job(tmp_path, slots=2), _config(tmp_path)
    assert job.run(config) == [0, 0], job.log(0)
    job.slots = 1
    assert job.run(dataclasses.replace(config, tensor=1), 2, resume=2) == [0], job.log(0, 2)
    losses = [row["loss"] for row in job.metrics(0)]
    assert [row["loss"] for row in job.metrics(0, 2)] == pytest.approx(losses[2:], rel=1e-5)
