"""A rank that was given something else than the others: all of them say what, before messages cross."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from engine_ranks import outcomes
from torch import nn

from launcher.engine import ZeroEngine
from launcher.engine.ranks import Ranks

BASE: dict[str, Any] = {"zero": {"stage": 1}, "optimizer": {"lr": 0.1}}


class _Scaled(nn.Module):
    """A layer, and a buffer whose shape or dtype may be a rank's own."""

    def __init__(self, name: str, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer(name, buffer)


def _config(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def _zero(**changes: Any) -> dict[str, Any]:
    return _config(zero={"stage": 1, **changes})


SETTINGS: list[tuple[dict[str, Any], str]] = [
    (_zero(stage=3), "zero.stage is 3 on rank 1, 1 on rank 0"),
    (_config(accumulation=4), "accumulation is 4 on rank 1, 1 on rank 0"),
    (_config(precision="bf16"), "precision is 'bf16' on rank 1, 'fp32' on rank 0"),
    (_zero(bucket_bytes=1000), "zero.bucket_bytes is 1000 on rank 1, 25000000 on rank 0"),
    (_zero(same_host="send"), "zero.same_host is 'send' on rank 1, 'read' on rank 0"),
    (_zero(replicas=2), "zero.replicas is 2 on rank 1, 1 on rank 0"),
    (_zero(reduce_every="micro_step"), "zero.reduce_every is 'micro_step' on rank 1, None on rank 0"),
    (_zero(unit={"names": ["0"]}), "zero.unit"),
    (_config(optimizer={"lr": 0.1, "clip": 1.0}), "optimizer.clip is 1.0 on rank 1, None on rank 0"),
    (_config(optimizer={"lr": 0.1, "momentum": 0.9}), "optimizer.name is 'SGD' on rank 1, 'AdamW' on rank 0"),
    (_config(nonfinite="skip"), "nonfinite is 'skip' on rank 1, 'stop' on rank 0"),
]


def _try(make: Any) -> str:
    started = time.monotonic()
    try:
        make()
    except Exception as error:
        assert time.monotonic() - started < 10, error
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _differ(rank: int, world: int) -> list[str]:
    """What every case says on this rank; ranks go on together after each, because all of them were told."""
    told = [_try(lambda c=c: ZeroEngine(nn.Linear(4, 4), c if rank == 1 else BASE)) for c, _ in SETTINGS]

    def build() -> nn.Module:
        return nn.Linear(4, 4)

    told.append(_try(lambda: ZeroEngine(build if rank == 1 else build(), BASE)))
    optimizer = torch.optim.RMSprop if rank == 1 else torch.optim.Adagrad
    told.append(_try(lambda: ZeroEngine(build(), BASE, optimizer=optimizer)))
    told.append(_try(lambda: ZeroEngine(build(), BASE, [{"match": ["bias"], "weight_decay": 0.1 * rank}])))
    for name, buffer in (
        ("scale", torch.ones(4 + rank)),
        ("scale", torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32)),
        ("other" if rank == 1 else "scale", torch.ones(4)),
    ):
        told.append(_try(lambda n=name, b=buffer: ZeroEngine(_Scaled(n, b), BASE)))
    told.append(_try(lambda: Ranks.connect(1 + rank)))
    ZeroEngine(build(), BASE)
    return told


EXPECTED = [
    *(f"rank 1 was given other settings than rank 0: {says}" for _, says in SETTINGS),
    "model is 'a function that builds it' on rank 1, 'a module' on rank 0",
    "optimizer.name is 'RMSprop' on rank 1, 'Adagrad' on rank 0",
    "rank 1 has another model than rank 0: group 1: weight_decay is 0.1 there, 0.0 on rank 0",
    "rank 1 has another model than rank 0: buffer scale: shape is [5] there, [4] on rank 0",
    "rank 1 has another model than rank 0: buffer scale: dtype is 'float64' there, 'float32' on rank 0",
    "rank 1 has another model than rank 0: buffer scale is missing there",
    "parallel.tensor is 2 on rank 1, 1 on rank 0",
]


@pytest.mark.filterwarnings("ignore")
def test_what_differs_is_named_with_both_values_on_all_ranks() -> None:
    for ok, told in outcomes(2, _differ):
        assert ok, told
        assert len(told) == len(EXPECTED)
        for message, words in zip(told, EXPECTED, strict=True):
            assert message.startswith("UsageError: ") and words in message, message
