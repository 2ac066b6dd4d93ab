"""State bytes to the byte, messages to the element, and no gathered parameter that outlives its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import CASES, MODELS, batches, engine_of, train
from engine_ranks import run_ranks

from launcher.contract.partition import state_bytes
from launcher.contract.train import AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine


def _live(engine: ZeroEngine) -> None:
    """``memory()`` against the closed form, and against the storages that the module's tensors show."""
    memory = engine.memory()
    expected = engine.state_bytes()
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == tuple(expected)
    assert memory["gathered"] == 0, "between steps nothing stays gathered"
    whole = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.model.parameters()}
    if engine.config.zero.stage == 3 and engine.comm.size > 1:
        assert sum(whole.values()) == 0
    else:
        assert sum(whole.values()) == memory["parameters"]
    assert all(p.grad is None for p in engine.model.parameters())


ALL = [
    (stage, bucket, *how)
    for stage in range(4)
    for bucket in (25_000_000, 1000)
    for how in ((1, None), (2, None), (2, "step"), (2, "micro_step"))
]
SMALL = [cell for cell in ALL if cell[1] == 1000]
FEW = [(stage, 500, 2, how) for stage in range(4) for how in (None, "step" if stage >= 2 else "micro_step")]


def _check(rank: int, world: int, case: str, cells: list[tuple[int, int, int, str | None]]) -> None:
    name, groups, settings = CASES[case]
    gradients = {"gradient_dtype": settings["gradients"]} if "gradients" in settings else {}
    for stage, bucket, accumulation, reduce_every in cells:
        config = EngineConfig(
            Zero(stage, bucket, reduce_every=reduce_every, **gradients),
            AdamW(1e-2, clip=0.5),
            accumulation=accumulation,
            precision=settings.get("precision", "fp32"),
        )
        engine = ZeroEngine(MODELS[name][0](), config, groups=groups)
        layout = engine.layout
        assert layout.numel == sum(p.numel() for p in engine.model.parameters())
        assert layout.padding < world * len(layout.units)
        _live(engine)
        before = engine.comm.traffic.volume_elements
        train(engine, batches(1, 2 * accumulation * world, MODELS[name][1]))
        _live(engine)
        if world > 1:
            found = engine.comm.traffic.volume_elements - before
            assert found == _volume(engine, accumulation), (stage, bucket, accumulation, reduce_every)


def _volume(engine: ZeroEngine, accumulation: int) -> int:
    """The paper's counts: 2Ψ at stages 0 to 2, 3Ψ − Ψ(kept) at 3, padding included."""
    units = engine.layout.units
    psi = sum(u.padded for u in units)
    trained = sum(u.padded for u in units if u.trainable)
    sums = trained * (accumulation if engine.config.reduces_every_micro_step else 1)
    if engine.config.zero.stage < 3:
        return sums + trained
    assert engine.gathering is not None
    kept = sum(units[i].padded for i in engine.gathering.kept)
    return sums + accumulation * (2 * psi - kept)


# The models that are odd at two ranks, every bucket and way to accumulate at three; the whole product is `full`.
QUICK = [("gpt", 1, ALL), ("gpt", 3, ALL), *((case, 2, FEW) for case in CASES)]


@pytest.mark.parametrize(
    ("case", "world", "cells"),
    [
        *(pytest.param(case, world, cells, id=f"{case}-{world}") for case, world, cells in QUICK),
        *(
            pytest.param(case, world, ALL if world < 4 else SMALL, id=f"{case}-{world}-all", marks=pytest.mark.full)
            for case in CASES
            for world in (1, 2, 3, 4, 8)
            if (case, world, ALL) not in QUICK
        ),
    ],
)
def test_memory_and_volume_equal_the_closed_forms(
    case: str, world: int, cells: list[tuple[int, int, int, str | None]]
) -> None:
    run_ranks(world, _check, case, cells, timeout_s=240)


def test_memory_of_frozen_tied_and_unused_parameters() -> None:
    run_ranks(2, _check_odd)


def _check_odd(rank: int, world: int) -> None:
    for stage in range(4):
        engine = engine_of("odd", stage=stage, bucket=500)
        train(engine, batches(1, 4, 13))
        _live(engine)
        form = state_bytes(engine.layout, stage)
        frozen = sum(p.numel() for p in engine.model.parameters() if not p.requires_grad)
        trained = sum(p.numel() for p in engine.model.parameters()) - frozen
        share = 1 if stage == 0 else world
        assert abs(form.optimizer - 8 * trained // share) < 8 * len(engine.layout.units)


def _watch(rank: int, world: int, name: str) -> None:
    """At every hook of every module: how many units hold gathered bytes."""
    engine = engine_of(name, stage=3)
    gathering = engine.gathering
    assert gathering is not None
    kept = set(gathering.kept)
    seen: list[int] = []

    def look(*_: Any) -> None:
        seen.append(sum(1 for i, u in enumerate(engine.units) if u.gathered and i not in kept))

    for module in engine.model.modules():
        module.register_forward_hook(look)
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(look)
    for batch in batches(2, 2 * world, MODELS[name][1]):
        seen.clear()
        train(engine, [batch])
        assert seen
        assert max(seen) <= 1 + gathering.prefetch
        assert engine.memory()["gathered"] == 0
        with torch.no_grad():
            engine.model(batch[:, :-1], batch[:, 1:])
        assert engine.memory()["gathered"] == 0, "an evaluation leaves nothing behind"


@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_no_gathered_unit_outlives_its_use(name: str) -> None:
    run_ranks(2, _watch, name)


def _peak_of_buckets(rank: int, world: int) -> None:
    """A bucket smaller than the largest parameter: two buffers and two for arrivals, whatever the model."""
    for stage in (1, 2, 3):
        engine = engine_of("gpt", stage=stage, bucket=400)
        train(engine, batches(2, 2 * world, 37))
        bound = 2 * ((400 if stage >= 2 else 0) + 200)  # gradients; what the other rank sends of them
        assert engine.memory()["buckets"] <= bound, stage


def test_bucket_memory_is_constant() -> None:
    run_ranks(2, _peak_of_buckets)
