"""Beginning with weights that exist: each rank reads its part, names are checked, what follows is the same training."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_job import Job
from engine_models import batches, engine_of, gpt, odd, train, whole_state
from engine_ranks import run_ranks
from safetensors.torch import load_file, save_file

from launcher.checkpoints.export import Wish, export
from launcher.contract.errors import UsageError
from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Batch, Checkpointing, Data, Evaluate, Factory, TrainConfig, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.ranks import Ranks
from launcher.engine.saving.weights import load_weights
from launcher.engine.tensor.by_name import split_layers
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import joined, split_of
from launcher.engine.zero import ZeroEngine

CONFIG = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37)
SPLIT = {
    "blocks.*.attention.qkv": "column/3",
    "blocks.*.mlp.up": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.down": "row",
}


def _read_by_the_kernel(call: Any) -> int:
    """Bytes that this process asked the kernel for meanwhile: an instrument that shares no code with ours."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    call()
    return count() - before


def _other(name: str) -> torch.nn.Module:
    """The model with other first values."""
    model = gpt() if name == "gpt" else odd()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


def _every_stage(rank: int, world: int, name: str, folder: str, precision: str) -> None:
    expected = load_file(f"{folder}/model.safetensors")
    for stage in range(4):
        engine = ZeroEngine(_other(name), EngineConfig(Zero(stage, 700), AdamW(lr=1e-2), precision=precision))
        found: list[int] = []
        kernel = _read_by_the_kernel(lambda e=engine, f=found: f.append(load_weights(e, Path(folder))))
        state = whole_state(engine)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for key, value in state.items():
            assert torch.equal(value, expected[key].to(dtype)), (stage, key)
        for key, buffer in engine.model.named_buffers():
            assert torch.equal(buffer, expected[key].to(buffer.dtype)), key
        # Its own pieces and no others: everything at stage 0, padding nowhere.
        ranks = [rank] if stage else range(world)
        own = sum(p.stop - p.start for u in engine.layout.units for r in ranks for p in u.pieces(r))
        buffers = sum(b.numel() for b in engine.model.buffers())
        assert found == [4 * (own + buffers)]
        assert found[0] <= kernel <= found[0] + 65536, "headers, and what gloo reads of its sockets"
        if engine.layout.units[0].dtype == "bfloat16":
            master = torch.cat([t for t in engine.units[0].own_parameters()])
            assert master.dtype == torch.float32 and not torch.equal(master, master.bfloat16().float())


@pytest.mark.parametrize(("name", "precision"), [("odd", "fp32"), ("gpt", "bf16")])
def test_every_stage_reads_its_part_to_the_byte(tmp_path: Path, name: str, precision: str) -> None:
    torch.manual_seed(11)
    tensors = {n: torch.randn_like(t) for n, t in (gpt() if name == "gpt" else odd()).state_dict().items()}
    tensors.pop("head.weight", None)  # tied: under one of its names
    save_file(tensors, tmp_path / "model.safetensors")
    run_ranks(3, _every_stage, name, str(tmp_path), precision)


def _with_tensor_ranks(rank: int, world: int, kind: str, folder: str) -> None:
    ranks = Ranks.connect(2)
    expected = load_file(f"{folder}/model.safetensors")
    for stage in range(4):

        def build() -> torch.nn.Module:
            if kind == "gpt":
                return TensorGPT(CONFIG, ranks.tensor)
            model = GPT(CONFIG)
            split_layers(model, SPLIT, ranks.tensor)
            return model

        engine = ZeroEngine(
            build if stage == 3 else build(), EngineConfig(Zero(stage, 500), AdamW(lr=1e-2)), ranks=ranks
        )
        count = load_weights(engine, Path(folder))
        with engine.gathered():
            for name, parameter in engine.model.named_parameters():
                split = split_of(parameter)
                whole = parameter if split is None else joined(parameter, split, ranks.tensor)
                assert torch.equal(whole, expected[name]), (kind, stage, name)
        most = sum(t.numel() for t in expected.values()) * 4
        assert count < (0.6 if stage == 0 else 0.35) * most + 2000, (stage, count, most)


@pytest.mark.parametrize("kind", ["gpt", "factory"])
def test_tensor_ranks_read_their_slices(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(11)
    save_file({n: torch.randn_like(t) for n, t in GPT(CONFIG).state_dict().items()}, tmp_path / "model.safetensors")
    run_ranks(4, _with_tensor_ranks, kind, str(tmp_path))


def test_names_and_shapes_are_all_told_at_once(tmp_path: Path) -> None:
    tensors = dict(odd().state_dict())
    tensors["layers.0.bias"] = torch.zeros(12)
    tensors["stranger"] = torch.zeros(1)
    del tensors["scale"], tensors["table.weight"], tensors["shift"]  # head.weight is the same; a buffer may be missing
    save_file(tensors, tmp_path / "a.safetensors")
    engine = engine_of("odd", stage=0)
    before = {n: p.clone() for n, p in engine.model.named_parameters()}
    with pytest.raises(UsageError) as told:
        load_weights(engine, tmp_path)
    assert told.value.message.splitlines()[1:] == [
        "  missing     scale",
        "  shape       layers.0.bias: [12] there, [11] in the model",
        "  unexpected  stranger",
    ]
    assert all(torch.equal(p, before[n]) for n, p in engine.model.named_parameters())
    tensors = {n: t.clone() for n, t in odd().state_dict().items()}
    tensors["head.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"table.weight and head.weight are one tied weight of the model, and differ"):
        load_weights(engine, tmp_path)
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    with pytest.raises(UsageError, match="it is not whole"):
        load_weights(engine, tmp_path)
    (tmp_path / "a.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"no \*\.safetensors there \(only pytorch_model.bin\)"):
        load_weights(engine, tmp_path)
    with pytest.raises(UsageError, match="no such file or folder"):
        load_weights(engine, tmp_path / "nothing")


def _goes_on(rank: int, world: int, folder: str) -> None:
    steps = batches(4, 2 * world, 37)
    old = engine_of("gpt", stage=2, bucket=1000)
    train(old, steps[:3])
    old.save(folder, 3)
    if rank == 0:
        export(Path(folder) / "step-00000003", Path(folder) / "weights", Wish(most_bytes=9000))
    old.comm.gather_small(torch.zeros(1), "exported")
    new = ZeroEngine(_other("gpt"), EngineConfig(Zero(3, 1700), AdamW(lr=1e-3)))
    load_weights(new, Path(folder) / "weights")
    first, second = whole_state(old), whole_state(new)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert train(new, steps[3:])[0][0] == train(old, steps[3:])[0][0], "the loss begins where the other ended"


def test_an_exported_checkpoint_begins_where_it_ended(tmp_path: Path) -> None:
    run_ranks(2, _goes_on, str(tmp_path))


MODEL = """
import torch
from launcher.engine.gpt import GPT
from launcher.contract.train import GPT as Config

def net():
    return GPT(Config(layers=2, hidden=16, heads=4, seq_len=16))
"""


def _config(folder: Path) -> TrainConfig:
    corpus = bytes(range(256)) * 40
    for name in ("train.bin", "heldout.bin"):
        (folder / name).write_bytes(corpus)
    return TrainConfig(
        zero=Zero(3, 5000),
        optimizer=AdamW(lr=3e-3),
        batch=Batch(micro=2, accumulation=1),
        steps=5,
        data=Data(tokens=str(folder / "train.bin"), heldout=str(folder / "heldout.bin"), options={"seq_len": 16}),
        factory=Factory("mymodel:net"),
        seed=5,
        evaluate=Evaluate(every=5, tokens=256),
        checkpoint=Checkpointing(),
    )


def _job(folder: Path) -> Job:
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "mymodel.py").write_text(MODEL)
    return Job(folder, slots=1)


def test_a_job_of_ones_own_model_begins_with_weights(tmp_path: Path) -> None:
    """Nothing is learnt in its one step, at a rate that is none in fp32: what it saves is what it began with."""
    job = _job(tmp_path / "job")
    torch.manual_seed(17)
    model = GPT(GPTConfig(layers=2, hidden=16, heads=4, seq_len=16))
    save_file(dict(model.state_dict()), tmp_path / "job/code/base.safetensors")
    still = replace(_config(tmp_path), steps=1, optimizer=AdamW(lr=1e-300), weights="base.safetensors", evaluate=None)
    assert job.run(still) == [0], job.log(0)
    assert "began with the weights in" in job.log(0)
    export(tmp_path / "job/checkpoints/step-00000001", tmp_path / "out", Wish())
    found = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(found[n], t) for n, t in model.state_dict().items())


@pytest.mark.full
def test_a_job_begins_with_an_exported_checkpoint(tmp_path: Path) -> None:
    """Through the loop, a model of one's own: the held-out loss of the run that was exported, to the bit."""
    config = _config(tmp_path)
    first, second = _job(tmp_path / "first"), _job(tmp_path / "second")
    assert first.run(config) == [0], first.log(0)
    export(tmp_path / "first/checkpoints/step-00000005", tmp_path / "second/code/base", Wish())
    still = replace(config, steps=1, optimizer=AdamW(lr=1e-300), weights="base", zero=Zero(1))
    assert second.run(still) == [0], second.log(0)
    assert "began with the weights in" in second.log(0)
    assert second.outcome().heldout_loss == first.outcome().heldout_loss
    # A resumed attempt goes on from its checkpoint, not from the weights again.
    os.rename(tmp_path / "second/code/base", tmp_path / "second/code/gone")
    assert second.run(replace(still, steps=2), 2, resume=1) == [0], second.log(0, 2)
