"""Tensor parallelism in real processes of the loop, and in a model of one's own."""

from __future__ import annotations

import dataclasses
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job, wait
from engine_ranks import run_ranks

from launcher.contract.train import GPT, AdamW, Batch, Checkpointing, Data, TrainConfig, Zero
from launcher.engine.comm import connect
from launcher.engine.model.units import describe
from launcher.engine.tensor.gpt import TensorGPT
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


def _sizes(rank: int, world: int) -> None:
    comm = connect()
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 7, "vocab": 37}
    layout = describe(TensorGPT(GPT(**sizes), comm), ranks=3, bucket_bytes=4000, tensor=world).layout
    assert layout == gpt_layout(GptModel(kind="gpt", **sizes), ranks=3, bucket_bytes=4000, tensor=world)


def test_the_planner_counts_what_the_engine_cuts() -> None:
    run_ranks(2, _sizes)
