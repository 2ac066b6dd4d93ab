"""Tensor parallelism in real processes of the loop, and in a model of one's own."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_job import Job, wait
from engine_models import relative
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.errors import UsageError
from launcher.contract.train import GPT, AdamW, Batch, Checkpointing, Data, TrainConfig, Zero
from launcher.engine.comm import connect
from launcher.engine.tensor_gpt import TensorGPT
from launcher.engine.tensor_map import split_layers
from launcher.engine.tensor_parallel import cut, split_of
from launcher.engine.units import describe
from launcher.planning.shapes import gpt_layout
from launcher.specs.models import GptModel


def _config(folder: Path, **changes: Any) -> TrainConfig:
    for name in ("train", "heldout"):
        (folder / f"{name}.bin").write_bytes(bytes(range(251)) * 40)
    config = TrainConfig(
        zero=Zero(2, bucket_bytes=20_000),
        optimizer=AdamW(lr=1e-3, weight_decay=0.1, clip=1.0, warmup=2),
        batch=Batch(micro=2, accumulation=1),
        steps=4,
        data=Data(tokens=str(folder / "train.bin"), heldout=str(folder / "heldout.bin")),
        gpt=GPT(layers=2, hidden=32, heads=2, seq_len=32, vocab=251),
        seed=5,
        checkpoint=Checkpointing(every_steps=2),
    )
    return dataclasses.replace(config, **changes)


def test_a_job_at_degree_two_is_the_job_at_degree_one_which_can_resume_it(tmp_path: Path) -> None:
    """The tensor-parallel one recomputes with its stored activations partitioned."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    plain, split = Job(tmp_path / "a", slots=1), Job(tmp_path / "b", slots=2)
    config = _config(tmp_path)
    two = dataclasses.replace(config, tensor=2, recompute="block", activations="partitioned", zero=Zero(3, 20_000))
    assert plain.run(config) == [0], plain.log(0)
    assert split.run(two) == [0, 0], split.log(0) + split.log(1)
    losses = [row["loss"] for row in plain.metrics(0)]
    for rank in range(2):
        assert [row["loss"] for row in split.metrics(rank)] == pytest.approx(losses, rel=1e-5)
        assert all(row["tensor_volume_elements"] > 0 for row in split.metrics(rank))
    assert split.outcome().parameters == plain.outcome().parameters
    assert [s.rank for s in split.manifest(4).shards] == [0, 1] and split.manifest(4).layout.tensor == 2
    # 251 words are padded to 252; the manifest says the true shape.
    assert split.manifest(4).layout.by_name["embedding.weight"].shape == (251, 32)
    # Degree 2's checkpoint goes on at degree 1.
    split.slots = 1
    assert split.run(config, attempt=2, resume=2) == [0], split.log(0, 2)
    assert [row["loss"] for row in split.metrics(0, 2)] == pytest.approx(losses[2:], rel=1e-5)


def test_a_stop_signal_to_any_rank_of_a_tensor_group_stops_all(tmp_path: Path) -> None:
    job = Job(tmp_path, slots=2)
    processes = job.start(_config(tmp_path, tensor=2, steps=100_000))
    metrics = tmp_path / "attempts" / "1" / "metrics" / "rank-00001.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_bytes().count(b"\n") > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGUSR2)
    assert wait(processes) == [75, 75], job.log(0) + job.log(1)
    assert job.outcome().outcome == "stopped"


# --- a model of one's own ---------------------------------------------------------------------------


class Own(nn.Module):
    """Attention and MLP with sizes taken from tensors; the head is tied to the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
            )
            for _ in range(2)
        )
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            batch, seq, _ = x.shape
            q, k, v = layer["qkv"](x).view(batch, seq, 3, -1, 2).permute(2, 0, 3, 1, 4).unbind(0)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](y.transpose(1, 2).reshape(batch, seq, -1))
            x = x + layer["down"](torch.relu(layer["up"](x)))
        logits: Tensor = self.head(x)
        return logits


PLAN = {
    "layers.*.qkv": "column/3",
    "layers.*.out": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "words": "vocabulary",
    "head": "vocabulary",
}


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
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten()).backward()
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


def _sizes(rank: int, world: int) -> None:
    comm = connect()
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 7, "vocab": 37}
    layout = describe(TensorGPT(GPT(**sizes), comm), ranks=3, bucket_bytes=4000, tensor=world).layout
    assert layout == gpt_layout(GptModel(kind="gpt", **sizes), ranks=3, bucket_bytes=4000, tensor=world)


def test_the_planner_counts_what_the_engine_cuts() -> None:
    run_ranks(2, _sizes)
