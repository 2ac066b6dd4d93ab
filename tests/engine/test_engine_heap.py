"""A step asks the kernel for no new pages: what one step freed, the next one uses."""

from __future__ import annotations

import os
import resource
import statistics

import pytest
import torch
from engine_ranks import run_ranks

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.heap import keep_freed
from launcher.engine.zero import ZeroEngine

CONFIG = GPTConfig(layers=6, hidden=256, heads=4, seq_len=32)
GATHERED_PAGES = 2 * 6 * 12 * 256**2 * 4 // 4096  # of all blocks, in forward and in backward


def _faults(rank: int, world: int, setting: str | None) -> float:
    if setting is not None:
        os.environ["MALLOC_TRIM_THRESHOLD_"] = setting
    engine = ZeroEngine(GPT(CONFIG), EngineConfig(Zero(3), AdamW(lr=1e-3, clip=1.0)))
    taken = []
    for number in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(number + 100 * rank + 7))
        engine.backward(engine.model(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        taken.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(taken[4:])  # the heap grows to what a step needs, and now and then a little more


def test_a_step_takes_no_new_pages() -> None:
    assert max(run_ranks(2, _faults, None)) < GATHERED_PAGES / 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_ARENA_MAX_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=1")],
)
def test_what_somebody_chose_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert not keep_freed(torch.device("cpu"))


def test_only_the_processs_own_memory_is_meant() -> None:
    assert not keep_freed(torch.device("cuda"))
