"""One rank of several holds the engine wrong: it is told what it did, the others are told who is missing, all end."""

from __future__ import annotations

import datetime
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_ranks import impatient, outcomes
from torch import Tensor, nn

from launcher.engine import ZeroEngine
from launcher.engine.comm import absent, connect


def _engine(stage: int, accumulation: int = 1) -> ZeroEngine:
    absent.WITHIN_S = 0.5
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = {"zero": {"stage": stage}, "optimizer": {"lr": 0.1}, "accumulation": accumulation}
    engine = ZeroEngine(model, config, comm=connect(dist.new_group(timeout=datetime.timedelta(seconds=120))))
    impatient(engine.comm, 2)
    return engine


def _loss(engine: ZeroEngine) -> Tensor:
    return engine.model(torch.ones(1, 4)).sum()


def _replaced(rank: int, world: int) -> None:
    engine = _engine(1)
    engine.backward(_loss(engine))
    if rank == 1:
        engine.model[1].load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, assign=True)  # type: ignore[index]
    engine.step()


def _other_memory(rank: int, world: int) -> None:
    engine = _engine(2)
    if rank == 1:
        engine.model[1].weight.data = torch.zeros(4, 4)  # type: ignore[index,union-attr]
    engine.backward(_loss(engine))
    engine.step()


def _added(rank: int, world: int) -> None:
    engine = _engine(0)
    if rank == 1:
        engine.model[0].scale = nn.Parameter(torch.ones(1))  # type: ignore[index,union-attr]
    engine.backward(_loss(engine))
    engine.step()


def _backward_twice(rank: int, world: int) -> None:
    engine = _engine(3)
    loss = _loss(engine)
    engine.backward(loss)
    if rank == 1:
        engine.backward(loss)
    engine.step()


def _step_early(rank: int, world: int) -> None:
    engine = _engine(3, accumulation=2)
    engine.backward(_loss(engine))
    if rank == 0:
        engine.backward(_loss(engine))
    engine.step()


def _own_backward(rank: int, world: int) -> None:
    engine = _engine(3)
    loss = _loss(engine)
    if rank == 1:
        loss.backward()  # type: ignore[no-untyped-call]
    else:
        engine.backward(loss)
    engine.step()


def _never_joins(rank: int, world: int) -> None:
    engine = _engine(2)
    engine.backward(_loss(engine))  # the first one agrees on the order of sums
    engine.step()
    loss = _loss(engine)
    if rank == 1:
        time.sleep(5)  # longer than the others wait
        return
    engine.backward(loss)


CASES: list[Any] = [
    (_replaced, "parameter 1.weight was replaced after ZeroEngine was made"),
    pytest.param(_other_memory, "parameter 1.weight was given other memory", marks=pytest.mark.full),
    pytest.param(_added, "parameter 0.scale was added after", marks=pytest.mark.full),
    (_backward_twice, "backward was called 2 times, but accumulation is 1"),
    pytest.param(_step_early, "step was called after 1 of 2 micro-steps", marks=pytest.mark.full),
    (_own_backward, "loss.backward() was called; the engine's is zero.backward(loss)"),
]


@pytest.mark.parametrize(("misuse", "says"), CASES)
def test_the_rank_is_told_and_the_others_end_and_say_who_is_missing(misuse: Any, says: str) -> None:
    started = time.monotonic()
    (first_ok, first), (second_ok, second) = outcomes(2, misuse)
    assert time.monotonic() - started < 100
    assert not first_ok and not second_ok
    assert says in second, second
    assert "CommError" in first and ": rank 1 did not take part" in first, first


def test_a_rank_that_never_joins_is_named_with_the_message_it_misses() -> None:
    (ok, trace), (other_ok, _) = outcomes(2, _never_joins)
    assert not ok and other_ok
    assert "rank 0: sum of the gradients of unit 1, bucket 0: rank 1 did not take part" in trace, trace
