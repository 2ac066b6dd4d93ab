"""Saving takes no second copy of the state, nor does loading: the CPU allocator's own events, as torch's profiler
records them, and Python's own count, meanwhile. Neither knows anything of units, shards or dtypes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_events import allocations
from engine_ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.saving import shardfile
from launcher.engine.zero import ZeroEngine

BLOCK = 2**16  # of a file, in these tests; the state is fifty times as large and more
MESSAGES = 2**14  # a digest a block, told to all


class _Halves(nn.Module):
    """Frozen and trainable layers side by side; a buffer too."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
        self.register_buffer("shift", torch.linspace(-1, 1, 512))
        for block in self.blocks[:3] if frozen else ():
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.shift
        return x.square().mean()


def _peak(profiled: Any) -> int:
    """The most that lived at any moment above what stood when recording began."""
    live = most = 0
    for _, _, size in allocations(profiled):
        live += size
        most = max(most, live)
    return most


def _watched(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes at most meanwhile: of tensors, of Python's objects."""
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return _peak(profiled), python


def _saved(rank: int, world: int, folder: str, precision: str, frozen: bool) -> None:
    shardfile.BLOCK_BYTES = BLOCK  # type: ignore[attr-defined]
    torch.manual_seed(0)
    engine = ZeroEngine(_Halves(frozen), EngineConfig(Zero(3 if world > 1 else 0), AdamW(1e-2), precision=precision))
    engine.backward(engine.model(torch.randn(2, 512).to(engine.units[0].full.dtype)))
    engine.step()
    engine.save(folder, 1)  # what a first one makes for good is not counted
    tensors, python = _watched(lambda: engine.save(folder, 2))
    written = sum(file.stat().st_size for file in Path(folder, "step-00000002").glob("*.safetensors")) // world
    assert written > 30 * BLOCK
    assert tensors <= BLOCK + MESSAGES, f"{tensors} bytes of tensors to write {written}"
    assert python <= 4 * BLOCK, f"{python} bytes of Python's to write {written}"
    _assert_stored_in_full(engine, Path(folder, "step-00000002", f"rank-{rank:05d}.safetensors"))
    tensors, python = _watched(lambda: engine.load(folder, 2))
    assert tensors <= BLOCK + MESSAGES, f"{tensors} bytes of tensors to read {written}"
    assert python <= 8 * BLOCK, f"{python} bytes of Python's to read {written}"


def _assert_stored_in_full(engine: ZeroEngine, file: Path) -> None:
    """Whatever is trained in, the file holds fp32: the master, or what a frozen parameter's would be."""
    stored = load_file(file)
    for flat in engine.units:
        mine = torch.cat([run.float() for run in flat.own_parameters()])
        found = stored[f"{flat.unit.name}/parameters"]
        assert found.dtype == torch.float32 and torch.equal(found, mine)


@pytest.mark.parametrize(
    ("precision", "frozen"), [("fp32", False), ("bf16", False), ("bf16", True)], ids=["fp32", "master", "frozen"]
)
def test_saving_and_loading_hold_a_piece_of_the_file_at_most(tmp_path: Path, precision: str, frozen: bool) -> None:
    run_ranks(1, _saved, str(tmp_path / "one"), precision, frozen)
    if frozen:
        run_ranks(2, _saved, str(tmp_path / "two"), precision, frozen)
