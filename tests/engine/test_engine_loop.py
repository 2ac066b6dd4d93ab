"""The loop in real processes: what a run leaves behind, how it stops, resumes, fails and learns."""

from __future__ import annotations

import dataclasses
import random
import signal
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from engine_job import Job, wait

from launcher.contract.train import GPT, AdamW, Batch, Checkpointing, Data, Evaluate, Factory, TrainConfig, Zero

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Codecs and their tables: real text, regular beyond pairs of bytes. Every sixth file is held out."""
    out = tmp_path_factory.mktemp("corpus")
    files = sorted((STDLIB / "encodings").glob("*.py"))
    for name, chosen in (("train", [f for i, f in enumerate(files) if i % 6 != 5]), ("heldout", files[5::6])):
        (out / f"{name}.bin").write_bytes(b"\0".join(f.read_bytes() for f in chosen))
    return out


def _config(corpus: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        zero=Zero(2, bucket_bytes=50_000),
        optimizer=AdamW(lr=1e-3, weight_decay=0.1, clip=1.0, warmup=2),
        batch=Batch(micro=2, accumulation=1),
        steps=6,
        data=Data(tokens=str(corpus / "train.bin"), heldout=str(corpus / "heldout.bin")),
        gpt=GPT(layers=2, hidden=32, heads=2, seq_len=32, dropout=0.1),
        seed=5,
        evaluate=Evaluate(every=3, tokens=512),
        checkpoint=Checkpointing(every_steps=2, keep=2),
    )
    return dataclasses.replace(config, **changes)


def test_what_a_run_leaves_behind(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path)
    assert job.run(_config(corpus)) == [0, 0], job.log(0) + job.log(1)
    outcome = job.outcome()
    assert (outcome.outcome, outcome.step, outcome.checkpoint) == ("done", 6, 6)
    assert outcome.heldout_loss and outcome.bigram_entropy and outcome.train_loss
    assert outcome.parameters == 12 * 2 * 32**2 + 13 * 2 * 32 + (256 + 32) * 32 + 64
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
    manifest = job.manifest(6)
    assert [s.rank for s in manifest.shards] == [0, 1]
    assert (manifest.samples, manifest.global_batch, manifest.seed) == (24, 4, 5)
    assert {s.node for s in manifest.shards} == {"n0"}
    for rank in (0, 1):
        rows = job.metrics(rank)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert set(rows[0]) == {
            "step",
            "loss",
            "step_time_s",
            "tokens_per_s",
            "exposed_wait_s",
            "volume_elements",
            "sent_bytes",
            "skipped",
            "state_bytes",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
        }
        padded = sum(u.padded for u in manifest.layout.units)
        assert {row["volume_elements"] for row in rows} == {2 * padded}
        assert {row["sent_bytes"] for row in rows} == {2 * padded * 4 // 2}
        assert rows[0]["state_bytes"] == outcome.state_bytes
    assert [r["loss"] for r in job.metrics(0)] == [r["loss"] for r in job.metrics(1)]
    log = job.log(0)
    assert "step 1/6  loss 5.4" in log and "tokens/s  eta 0:0" in log
    assert "step 3  held-out loss" in log and "(bigram entropy" in log
    assert job.log(1) == ""


@pytest.mark.parametrize("stage", [2, 3])
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, corpus: Path, stage: int) -> None:
    """Dropout on, so the generator takes part; a second attempt in the same run folder."""
    config = _config(corpus, zero=Zero(stage), steps=5, checkpoint=Checkpointing(every_steps=3))
    whole, broken = Job(tmp_path / "whole"), Job(tmp_path / "broken")
    assert whole.run(config) == [0, 0], whole.log(0)
    assert broken.run(config) == [0, 0]
    assert broken.run(config, 2, resume=3) == [0, 0], broken.log(0, 2)
    assert "resumed from step 3 (saved by 2 ranks)" in broken.log(0, 2)
    losses = [row["loss"] for row in whole.metrics(0)]
    assert [row["loss"] for row in broken.metrics(0)] == losses
    assert [row["loss"] for row in broken.metrics(0, 2)] == losses[3:]
    assert [row["step"] for row in broken.metrics(0, 2)] == [4, 5]
    assert [s.digest for s in whole.manifest(5).shards] == [s.digest for s in broken.manifest(5).shards]
    assert broken.outcome(2).heldout_loss == whole.outcome().heldout_loss


def test_resumed_on_another_number_of_ranks(tmp_path: Path, corpus: Path) -> None:
    config = _config(corpus, steps=5, checkpoint=Checkpointing(every_steps=3), batch=Batch(2, 2))
    config = dataclasses.replace(config, gpt=dataclasses.replace(config.gpt, dropout=0.0))  # type: ignore[type-var]
    two, one, four = Job(tmp_path), Job(tmp_path, slots=1), Job(tmp_path, slots=4)
    assert two.run(config) == [0, 0]
    assert one.run(dataclasses.replace(config, batch=Batch(2, 4)), 2, resume=3) == [0], one.log(0, 2)
    assert four.run(dataclasses.replace(config, batch=Batch(2, 1)), 3, resume=3) == [0] * 4, four.log(0, 3)
    expected = [row["loss"] for row in two.metrics(0)][3:]
    for job, attempt in ((one, 2), (four, 3)):
        assert [row["loss"] for row in job.metrics(0, attempt)] == pytest.approx(expected, rel=1e-5)
    assert one.run(config, 4, resume=3) == [2]
    assert "global batch of 8, this attempt has 4" in one.log(0, 4)


def test_steps_whose_loss_is_no_number_are_skipped_and_saved(tmp_path: Path, corpus: Path) -> None:
    """The first step ruins the parameters: every loss after it is NaN, which no file of ours has a number for."""
    ruin = AdamW(lr=1e38, schedule="constant")
    job = Job(tmp_path)
    assert job.run(_config(corpus, steps=3, optimizer=ruin, nonfinite="skip")) == [0, 0], job.log(0)
    rows = job.metrics(0)
    assert [row["loss"] is None for row in rows] == [row["skipped"] for row in rows] == [False, True, True]
    assert job.outcome().skipped == job.manifest(3).scalars["skipped"] == 2
    assert "step 2 is skipped, 1 by now: the gradient of parameter " in job.log(0)
    assert "the loss of rank 0 was nan, and that of rank 1 too" in job.log(0)
    assert job.manifest(3).step == 3 and job.outcome().train_loss is None


def test_a_stop_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path)
    config = _config(corpus, steps=100_000, checkpoint=Checkpointing(every_steps=50_000), evaluate=None)
    processes = job.start(config)
    deadline = time.monotonic() + 60
    while "step 1/" not in job.log(0) and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGUSR2)
    assert wait(processes) == [75, 75], job.log(0) + job.log(1)
    outcome = job.outcome()
    assert outcome.outcome == "stopped" and outcome.checkpoint == outcome.step
    assert job.manifest(outcome.step).step == outcome.step
    assert job.metrics(0)[-1]["step"] == job.metrics(1)[-1]["step"] == outcome.step


def test_nothing_shared_every_node_holds_its_ranks_and_the_manifest(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path / "a", tmp_path / "b", slots=1)
    assert job.run(_config(corpus)) == [0, 0], job.log(0) + job.log(1)
    for number in (0, 1):
        folder = job.folders[number] / "checkpoints" / "step-00000006"
        assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", f"rank-{number:05d}.safetensors"]
        assert len(list((job.folders[number] / "checkpoints").iterdir())) == 2
    assert job.manifest(6, 0) == job.manifest(6, 1)
    assert [s.node for s in job.manifest(6).shards] == ["n0", "n1"]


def test_a_checkpoint_by_time_is_decided_by_rank_0_for_all(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path)
    config = _config(corpus, steps=12, evaluate=None, checkpoint=Checkpointing(every_s=0.002))
    assert job.run(config) == [0, 0]
    assert len(list((tmp_path / "checkpoints").glob("*/manifest.json"))) >= 2


USER_CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    def forward(self, x):
        return self.layers(x)

def net(width):
    return Net(width)

def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

def stream(split, start_sample, slope):
    index = start_sample + (10**6 if split == "heldout" else 0)
    while True:
        x = torch.rand(4, generator=torch.Generator().manual_seed(index))
        yield {"x": x, "y": slope * x.sum()}
        index += 1

def broken(width):
    import os
    if os.environ["RANK"] == "1":
        raise RuntimeError("this rank cannot")
    return Net(width)
"""


def _user_config(corpus: Path, **changes: Any) -> TrainConfig:
    own: dict[str, Any] = dict(
        gpt=None,
        factory=Factory("mymodel:net", {"width": 7}, "mymodel:loss"),
        data=Data(factory="mymodel:stream", options={"slope": 2.0}),
        steps=30,
        evaluate=Evaluate(every=30, tokens=32),
        batch=Batch(4, 1),
        optimizer=AdamW(lr=0.05),
    )
    return _config(corpus, **{**own, **changes})


def test_a_users_own_model_loss_and_data(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "code" / "launcher").mkdir(parents=True)  # must hide nothing of ours
    (tmp_path / "code" / "launcher" / "__init__.py").write_text("raise SystemExit('hidden')")
    (tmp_path / "code" / "mymodel.py").write_text(USER_CODE)
    assert job.run(_user_config(corpus, zero=Zero(3))) == [0, 0], job.log(0) + job.log(1)
    outcome = job.outcome()
    assert outcome.heldout_loss is not None and outcome.bigram_entropy is None
    assert outcome.heldout_loss < 0.5 * job.metrics(0)[0]["loss"]
    assert any("running_mean" in name for name in job.manifest(30).buffers)


END = """
import atexit, os, pathlib

class Late:
    def __del__(self):
        os.abort()  # what native code did whose thread met an interpreter that was being taken down

_late = Late()
atexit.register(lambda: pathlib.Path(f"hooks-{os.environ['RANK']}").touch())
"""


def test_a_rank_that_is_through_ends_well_whatever_the_interpreters_end_would_bring(
    tmp_path: Path, corpus: Path
) -> None:
    job = Job(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "late.py").write_text(END)
    (tmp_path / "code" / "mymodel.py").write_text(USER_CODE + "\nimport late\n")
    assert job.run(_user_config(corpus, steps=1)) == [0, 0], job.log(0) + job.log(1)
    assert job.outcome().outcome == "done"
    assert (tmp_path / "hooks-0").exists() and (tmp_path / "hooks-1").exists(), "hooks of the user's own still run"


def test_a_rank_that_fails_ends_all_quickly_and_says_why(tmp_path: Path, corpus: Path) -> None:
    job = Job(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mymodel.py").write_text(USER_CODE)
    started = time.monotonic()
    codes = job.run(_user_config(corpus, factory=Factory("mymodel:broken", {"width": 7}, "mymodel:loss")))
    assert codes == [1, 1]
    assert time.monotonic() - started < 60
    assert "RuntimeError: this rank cannot" in job.log(1)
    assert "rank 0: " in job.log(0) and "did not take part" in job.log(0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpt": None, "factory": Factory("nosuch:thing")}, "model.factory: no module 'nosuch'"),
        ({"tensor": 2}, "parallel.tensor: 2 needs as many ranks; there is one"),
        ({"policy": "ddp"}, "policy 'ddp' is not known"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    tmp_path: Path, corpus: Path, changes: dict[str, Any], words: str
) -> None:
    config = _config(corpus, **changes)
    if config.gpt is None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, options={"seq_len": 16}))
    job = Job(tmp_path, slots=1)
    assert job.run(config) == [2]
    assert words in job.log(0)


def test_it_learns_text_and_nothing_from_shuffled_targets(tmp_path: Path, corpus: Path) -> None:
    """Below the bigram entropy of the held-out text; never so where targets were shuffled."""
    learns = dict(
        steps=150,
        zero=Zero(2),
        gpt=GPT(layers=2, hidden=64, heads=4, seq_len=64),
        batch=Batch(8, 1),
        optimizer=AdamW(lr=6e-3, weight_decay=0.1, clip=1.0, warmup=20),
        evaluate=Evaluate(every=1000, tokens=8192),
        checkpoint=Checkpointing(),
    )
    job = Job(tmp_path / "real")
    assert job.run(_config(corpus, **learns)) == [0, 0], job.log(0)
    outcome = job.outcome()
    assert outcome.heldout_loss is not None and outcome.bigram_entropy is not None
    assert outcome.heldout_loss < outcome.bigram_entropy - 0.05

    shuffled = tmp_path / "shuffled"
    shuffled.mkdir()
    for name in ("train.bin", "heldout.bin"):
        data = bytearray((corpus / name).read_bytes())
        random.Random(1).shuffle(data)
        (shuffled / name).write_bytes(data)
    control = Job(tmp_path / "control")
    config = _config(shuffled, **{**learns, "steps": 60})
    assert control.run(config) == [0, 0]
    heldout = control.outcome().heldout_loss
    assert heldout is not None and heldout > outcome.bigram_entropy
