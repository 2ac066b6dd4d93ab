"""A stream of the user's that has a state of its own goes on after a resume as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_job import Job

from launcher.contract.errors import UsageError
from launcher.contract.train import SGD, Batch, Checkpointing, Data, Factory, TrainConfig, Zero
from launcher.engine.job.sources import FactoryBatches

USER_CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 6)
        self.frozen.requires_grad_(False)
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    def forward(self, x):
        return self.layers(torch.tanh(self.frozen(x)))

def loss(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

class Stream:
    # What it yields depends on all that it yielded before: start_sample alone cannot bring it back.
    def __init__(self, start):
        self.value, self.drawn = 1 + start, 0
    def __iter__(self):
        return self
    def __next__(self):
        self.value = (self.value * 48271 + self.drawn) % 2147483647
        self.drawn += 1
        x = torch.rand(4, generator=torch.Generator().manual_seed(self.value))
        return {"x": x, "y": x.sum()}
    def state_dict(self):
        return {"value": self.value, "drawn": self.drawn}
    def load_state_dict(self, state):
        self.value, self.drawn = state["value"], state["drawn"]

def stream(split, start_sample):
    return Stream(start_sample)
"""


def _config(stage: int, micro: int = 3) -> TrainConfig:
    return TrainConfig(
        zero=Zero(stage, bucket_bytes=64),
        optimizer=SGD(0.01, 0.9, clip=0.5),
        batch=Batch(micro, 2),
        steps=5,
        data=Data(factory="mymodel:stream"),
        factory=Factory("mymodel:Net", loss="mymodel:loss"),
        seed=3,
        checkpoint=Checkpointing(every_steps=3),
    )


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_resumed_run_with_batchnorm_dropout_frozen_parts_and_a_stateful_stream_is_bitwise_the_same(
    tmp_path: Path, stage: int
) -> None:
    job = Job(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mymodel.py").write_text(USER_CODE)
    assert job.run(_config(stage)) == [0, 0], job.log(0)
    state = job.manifest(3).data_state
    assert state is not None and state["drawn"] == 3 * 12, "taken where the next step begins, on whatever rank"
    final = job.manifest(5)
    for path in (tmp_path / "checkpoints" / "step-00000005").iterdir():
        path.unlink()
    assert job.run(_config(stage), 2, resume=3) == [0, 0], job.log(0, 2)
    losses = [row["loss"] for row in job.metrics(0)]
    assert [row["loss"] for row in job.metrics(0, 2)] == losses[3:]
    again = job.manifest(5)
    assert again.data_state == final.data_state
    assert [s.digest for s in again.shards] == [s.digest for s in final.shards], "buffers are in rank 0's shard"


class _Counted:
    def __init__(self, start: int) -> None:
        self.at, self.told = start, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> torch.Tensor:
        self.at += 1
        return torch.tensor(self.at - 1 + self.told)

    def state_dict(self) -> Any:
        return {"at": self.at, "told": 1000}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.told = state["at"], state["told"]


def test_the_state_is_one_for_all_ranks_and_loads_at_another_world_size() -> None:
    ranks = [FactoryBatches(lambda split, start: _Counted(start), {}, 0) for _ in range(2)]
    assert [r.train(2 * i, 2).tolist() for i, r in enumerate(ranks)] == [[0, 1], [2, 3]]
    states = [r.state(4) for r in ranks]
    assert states == [{"at": 4, "told": 1000}] * 2
    assert ranks[0].train(4, 2).tolist() == [4, 5], "saving skips nothing"
    alone = FactoryBatches(lambda split, start: _Counted(start), {}, 0)
    alone.restore(4, states[0])
    assert alone.train(4, 4).tolist() == [1004, 1005, 1006, 1007]


def test_states_that_cannot_be_kept_or_loaded_are_told_of() -> None:
    class Odd(_Counted):
        def state_dict(self) -> Any:
            return {"at": torch.zeros(2)}

    class Listed(_Counted):
        def state_dict(self) -> Any:
            return [1]

    with pytest.raises(UsageError, match="cannot be saved: Object of type Tensor"):
        FactoryBatches(lambda split, start: Odd(start), {}, 0).state(0)
    with pytest.raises(UsageError, match="returned list, not a mapping"):
        FactoryBatches(lambda split, start: Listed(start), {}, 0).state(0)
    plain = FactoryBatches(lambda split, start: iter(range(start, 100)), {}, 0)
    assert plain.state(0) is None
    plain.restore(3, None)
    assert plain.train(3, 1).tolist() == [3]
    with pytest.raises(UsageError, match="has no load_state_dict"):
        plain.restore(0, {"at": 1})
