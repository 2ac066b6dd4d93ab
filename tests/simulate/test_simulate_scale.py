"""Ranks of worlds that no machine here could hold: native collectives, 16-bit weights, recomputation, tensor ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_steps import config

from launcher.contract import partition
from launcher.contract.plain import dumps
from launcher.contract.simulation import Simulation, SimulationRequest
from launcher.contract.train import GPT, Batch
from launcher.engine.rehearsal.nothing import Nothing
from launcher.engine.rehearsal.simulate import simulate
from launcher.planning.shapes import gpt_numel
from launcher.simulation import run_simulation
from launcher.specs.models import GptModel

ROOT = Path(__file__).parents[2]
MODEL = GPT(layers=48, hidden=1600, heads=25, seq_len=1024, vocab=51200)
BIG = config(3, recompute="block", precision="bf16", gpt=MODEL, batch=Batch(micro=8, accumulation=1))
BIG = replace(BIG, zero=replace(BIG.zero, bucket_bytes=25_000_000))


def simulated(**changes: object) -> Simulation:
    request = SimulationRequest(BIG, 0, (16,) * 256, "gpu")
    return run_simulation(replace(request, **changes), {})  # type: ignore[arg-type]


def test_the_last_of_4096_ranks() -> None:
    """State as the closed form has it, to the byte; what is alive at the peak adds up."""
    found = simulated(rank=4095)
    units = partition.gpt_parameters(48, 1600, 1024, 51200)
    named = [(name, [replace(p, dtype="bfloat16") for p in parameters]) for name, parameters in units]
    layout = partition.build(named, ranks=4096, bucket_bytes=25_000_000)
    assert tuple(found.state_bytes.values()) == tuple(partition.state_bytes(layout, 3))
    model = GptModel(kind="gpt", layers=48, hidden=1600, heads=25, seq_len=1024, vocab=51200)
    assert found.parameters == gpt_numel(model)
    assert found.collectives == "native" and found.world_size == 4096
    assert found.peak_bytes == sum(h.bytes for h in found.peak_holds) == max(p.bytes for p in found.peaks)
    assert len(found.timeline.points) <= 600
    assert max(sum(point) for point in found.timeline.points) == found.peak_bytes
    assert found.memory_bytes < 500e6


def test_operations_do_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 4,096 ranks take longer than 400: a view a rank in one small message was a third of all calls."""
    small = replace(BIG, gpt=GPT(layers=4, hidden=128, heads=2, seq_len=64, vocab=256))
    counts = []
    for nodes in (25, 256):
        with monkeypatch.context() as patch:
            seen = []
            whole = Nothing.__torch_dispatch__

            def counted(mode: Nothing, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(function)  # noqa: B023
                return whole(mode, function, types, args, kwargs)  # noqa: B023

            patch.setattr(Nothing, "__torch_dispatch__", counted)
            simulate(SimulationRequest(small, 16 * nodes - 1, (16,) * nodes, "gpu"))
        counts.append(len(seen))
    assert counts[0] > 1000
    assert abs(counts[1] - counts[0]) < 0.05 * counts[0], counts


def test_memory_is_the_simulations_own() -> None:
    """Whoever starts it may be large: what a process had held before exec is not what the simulation held."""
    small = GPT(layers=2, hidden=64, heads=2, seq_len=32, vocab=64)
    request = SimulationRequest(replace(BIG, gpt=small), 0, (1,), "gpu")
    large = """
import json, sys
from launcher.contract.plain import from_plain
from launcher.contract.simulation import SimulationRequest
from launcher.simulation import run_simulation
held = b"x" * 700_000_000
del held
print(run_simulation(from_plain(SimulationRequest, json.load(sys.stdin)), {}).memory_bytes)
"""
    done = subprocess.run(
        [sys.executable, "-c", large], input=dumps(request), cwd=ROOT, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert 50e6 < int(done.stdout) < 500e6


@pytest.mark.parametrize("activations", ["partitioned", "host"])
def test_tensor_ranks(activations: str) -> None:
    """16 tensor ranks a node: each holds a sixteenth of what is stored for recomputation, or nothing of it."""
    small = GPT(layers=6, hidden=512, heads=16, seq_len=256, vocab=1024)
    train = replace(BIG, gpt=small, tensor=16, activations=activations, zero=replace(BIG.zero, stage=2))
    found = simulated(train=train, slots=(16, 16), rank=17)
    stored = 6 * 8 * 256 * 512 * 2
    held = {h.what: h.bytes for p in found.peaks if p.phase == "forward" for h in p.holds}
    expected = {"partitioned": stored // 16, "host": 0}[activations]
    assert 0 < held["activations"] - expected < stored // 2, "beside it the head's, and the batch"
