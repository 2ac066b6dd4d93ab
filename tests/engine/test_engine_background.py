"""Saving while training goes on: the same bytes, the same losses, and whatever kills it, whole checkpoints only."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job
from engine_models import batches, engine_of, train
from engine_ranks import outcomes, run_ranks

from launcher.checkpoints import verify
from launcher.contract import plain
from launcher.contract.errors import NoSpace
from launcher.contract.holdings import checkpoints_here
from launcher.contract.manifest import Manifest
from launcher.contract.saved import saved_bytes
from launcher.contract.train import GPT, AdamW, Batch, Checkpointing, Data, TrainConfig, Zero
from launcher.engine.saving import checkpoint, shardfile


def _both_ways(rank: int, world: int, folder: str) -> None:
    steps = batches(4, 2 * world, 13)
    waiting, going = (engine_of("odd", stage=s, bucket=1000) for s in (1, 1))
    copies = set()
    for number in range(4):
        assert train(waiting, steps[number : number + 1]) == train(going, steps[number : number + 1])
        waiting.save(f"{folder}/waiting", number + 1, {"number": number})
        going.save(f"{folder}/going", number + 1, {"number": number}, background=True)
        assert going.background is not None and going.background.step == number + 1
        copies.add(tuple(t.data_ptr() for t in going.background._copies.values()))
    assert going.finish_saving() == 4 and going.finish_saving() is None
    assert len(copies) == 1, "one copy, used again"
    buffers = sum(b.numel() * b.element_size() for b in going.model.buffers()) if rank == 0 else 0
    assert going.memory()["saving"] == saved_bytes(going.layout, moments=2) + buffers
    assert waiting.memory()["saving"] == 0
    fresh = engine_of("odd", stage=3, bucket=500)
    assert fresh.load(f"{folder}/going") == (4, {"number": 3})


def test_the_same_bytes_and_the_same_training(tmp_path: Path) -> None:
    run_ranks(2, _both_ways, str(tmp_path))
    for step in range(1, 5):
        one, other = (tmp_path / way / f"step-{step:08d}" for way in ("waiting", "going"))
        assert sorted(p.name for p in one.iterdir()) == sorted(p.name for p in other.iterdir())
        for file in ("rank-00000.safetensors", "rank-00001.safetensors"):
            assert (one / file).read_bytes() == (other / file).read_bytes()
        first, second = (Manifest.from_bytes((p / "manifest.json").read_bytes()) for p in (one, other))
        assert replace(first, written_at=0.0) == replace(second, written_at=0.0)
        assert verify(other).ok


def _killed(rank: int, world: int, folder: str, where: str) -> None:
    """Rank 1 (rank 0 for the manifest) is killed for good in the middle of its second save."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    engine = engine_of("gpt", stage=2, bucket=1000)
    steps = batches(3, 2 * world, 37)
    train(engine, steps[:1])
    engine.save(folder, 1, background=True)
    engine.finish_saving()
    train(engine, steps[1:2])
    if rank == (0 if where.startswith("manifest") else 1):
        if where == "copy":
            copied = engine.background._copy  # type: ignore[union-attr]
            engine.background._copy = lambda: (copied(), die())[0]  # type: ignore[union-attr,method-assign]
        elif where == "half a shard":
            stream = shardfile._stream

            def half(entries: Any) -> Any:
                for number, data in enumerate(stream(entries)):
                    yield data
                    if number == 3:
                        die()

            shardfile._stream = half
        elif where == "before the rename":
            shardfile.os.replace = die  # type: ignore[attr-defined]
        elif where == "manifest half written":
            plain.os.replace = die  # type: ignore[attr-defined]
    engine.save(folder, 2, background=True)
    train(engine, steps[2:])
    if where == "durable, no manifest" and rank == 1:
        engine.background._under_way.shard.result()  # type: ignore[union-attr]
        die()
    engine.finish_saving()
    if where == "after the manifest" and rank == 1:
        die()


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("copy", marks=pytest.mark.full),
        "half a shard",
        pytest.param("before the rename", marks=pytest.mark.full),
        pytest.param("durable, no manifest", marks=pytest.mark.full),
        "manifest half written",
        "after the manifest",
    ],
)
def test_killed_at_any_moment_only_whole_ones_are_there(tmp_path: Path, where: str) -> None:
    outcomes(2, _killed, str(tmp_path / "checkpoints"), where)
    expected = 2 if where == "after the manifest" else 1
    assert checkpoint.newest(tmp_path / "checkpoints") == expected
    assert verify(tmp_path / f"checkpoints/step-{expected:08d}").ok
    found = {c["step"]: c["whole"] for c in checkpoints_here(str(tmp_path))}
    assert found == ({1: True, 2: True} if expected == 2 else {1: True, 2: False})
    # The next attempt writes the same step over what is left, on another number of ranks.
    engine = engine_of("gpt", stage=0)
    assert engine.load(tmp_path / "checkpoints")[0] == expected
    engine.save(tmp_path / "checkpoints", 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints/step-00000002").iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
    ]
    assert verify(tmp_path / "checkpoints/step-00000002").ok


def test_an_error_in_writing_is_told_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NoSpace("rank 0: no space for it")

    engine = engine_of("gpt", stage=0)
    monkeypatch.setattr(shardfile, "write", full)
    engine.save(tmp_path, 1, background=True)
    assert engine.background is not None
    while not engine.background.durable_here():
        pass
    with pytest.raises(NoSpace, match="rank 0: no space"):
        engine.background.publish()
    engine.save(tmp_path, 2, background=True)
    with pytest.raises(NoSpace, match="rank 0: no space"):
        engine.finish_saving()
    assert checkpoint.newest(tmp_path) is None


@pytest.mark.full  # the rack's job of tests/e2e does so by default
def test_a_job_that_saves_in_the_background(tmp_path: Path) -> None:
    """Through the loop: the checkpoints, keep, the outcome and the losses of one that waits; stopped and resumed."""
    (tmp_path / "train.bin").write_bytes(bytes(range(256)) * 40)
    config = TrainConfig(
        zero=Zero(2, 5000),
        optimizer=AdamW(lr=3e-3),
        batch=Batch(micro=2, accumulation=1),
        steps=7,
        data=Data(tokens=str(tmp_path / "train.bin")),
        gpt=GPT(layers=1, hidden=16, heads=2, seq_len=16),
        seed=5,
        checkpoint=Checkpointing(every_steps=2, keep=2, background=True),
    )
    going, waiting = Job(tmp_path / "going"), Job(tmp_path / "waiting")
    assert going.run(config) == [0, 0], going.log(0) + going.log(1)
    plain_config = replace(config, checkpoint=replace(config.checkpoint, background=False))
    assert waiting.run(plain_config) == [0, 0], waiting.log(0)
    assert [r["loss"] for r in going.metrics(0)] == [r["loss"] for r in waiting.metrics(0)]
    names = [sorted(p.name for p in (job.folders[0] / "checkpoints").iterdir()) for job in (going, waiting)]
    assert names == [["step-00000006", "step-00000007"]] * 2
    assert going.outcome().checkpoint == 7
    assert [s.digest for s in going.manifest(7).shards] == [s.digest for s in waiting.manifest(7).shards]
    assert "step 2  copied for a checkpoint in " in going.log(0)
    assert json.loads((tmp_path / "going/checkpoints/step-00000006/manifest.json").read_text())["step"] == 6
