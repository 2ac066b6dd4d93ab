"""Recomputation changes memory, not one bit of the result: dropout on, at every stage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_models import TINY, batches, digest, whole_state
from engine_ranks import run_ranks

from launcher.contract.errors import UsageError
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.zero import ZeroEngine


def _train(stage: int, recompute: Any) -> tuple[list[float], str, int]:
    torch.manual_seed(3)
    model = GPT(dataclasses.replace(TINY, dropout=0.2))
    zero = ZeroEngine(model, EngineConfig(Zero(stage), AdamW(1e-2, clip=0.5), recompute=recompute))
    losses, saved = [], 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel()
        return tensor

    for number, batch in enumerate(batches(3, 2 * zero.comm.size, 37)):
        mine = batch[2 * zero.comm.rank : 2 * zero.comm.rank + 2]
        torch.manual_seed(number)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss = model(mine[:, :-1], mine[:, 1:])
        zero.backward(loss)
        zero.step()
        losses.append(float(loss.detach()))
        assert zero.memory()["gathered"] == 0
    return losses, digest(whole_state(zero)), saved


def _compare(rank: int, world: int) -> None:
    for stage in range(4):
        losses, bits, saved = _train(stage, "none")
        for which in ("block", (1,)):
            again, again_bits, less = _train(stage, which)
            assert again == losses and again_bits == bits, (stage, which)
            assert less < saved * (0.5 if which == "block" else 0.9)


def test_recomputation_changes_no_bit() -> None:
    run_ranks(2, _compare)


def test_blocks_that_are_not_there() -> None:
    with pytest.raises(UsageError, match="there is no block 2; the model has 2"):
        ZeroEngine(GPT(TINY), EngineConfig(Zero(0), AdamW(0.1), recompute=(2,)))
    with pytest.raises(UsageError, match="accepted are none, block and numbers"):
        EngineConfig(Zero(0), AdamW(0.1), recompute="all")
    with pytest.raises(UsageError, match="no list of blocks"):
        ZeroEngine(torch.nn.Linear(3, 3), EngineConfig(Zero(0), AdamW(0.1), recompute="block"))
