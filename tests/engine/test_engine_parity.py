"""ZeRO is data parallelism: after every step it equals an undistributed run on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import MODELS, batches, digest, engine_of, relative, train, undistributed, whole_state
from engine_ranks import run_ranks

from launcher.contract.train import AdamW

# eps well above rounding noise: a key's bias has no gradient but noise, which Adam would blow up.
OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)


def _against_undistributed(
    rank: int, world: int, name: str, dtype: torch.dtype, count: int, cases: list[dict[str, Any]]
) -> list[tuple[str, float, float]]:
    """For each case the largest loss and parameter difference over all steps."""
    steps = batches(count, 8, MODELS[name][1])
    losses, states = undistributed(name, steps, OPTIMIZER, dtype)
    found = []
    for case in cases:
        engine = engine_of(name, dtype=dtype, optimizer=OPTIMIZER, **case)
        loss_gap = parameter_gap = 0.0
        for number, batch in enumerate(steps):
            ((loss, _),) = train(engine, [batch])
            loss_gap = max(loss_gap, abs(loss - losses[number]) / abs(losses[number]))
            state = whole_state(engine)
            assert state.keys() == states[number].keys()
            for key, value in states[number].items():
                parameter_gap = max(parameter_gap, relative(state[key], value))
        found.append((f"{name} {case}", loss_gap, parameter_gap))
    return found


def _cases(world: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [{"stage": s, "bucket": 3000} for s in range(4)]
    if world == 2:
        cases += [{"stage": s, "accumulation": 2} for s in range(4)]
        cases += [{"stage": s, "accumulation": 2, "reduce_every": "step"} for s in (2, 3)]
    return cases


@pytest.mark.parametrize("name", ["gpt", "odd"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_float64_equals_undistributed_after_every_step(world: int, name: str) -> None:
    for case, loss_gap, parameter_gap in run_ranks(
        world, _against_undistributed, name, torch.float64, 10, _cases(world)
    )[0]:
        assert loss_gap < 1e-12, case
        assert parameter_gap < 1e-12, case


@pytest.mark.parametrize("world", [1, 2, 4])
def test_float32_stays_close_to_undistributed_over_20_steps(world: int) -> None:
    cases = [{"stage": s} for s in (range(4) if world == 2 else (1, 3))]
    for case, loss_gap, parameter_gap in run_ranks(world, _against_undistributed, "gpt", torch.float32, 20, cases)[0]:
        assert loss_gap < 1e-5, case
        assert parameter_gap < 1e-4, case


def _bits(rank: int, world: int, name: str, cases: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    steps = batches(3, 2 * world, MODELS[name][1])
    found = []
    for case in cases:
        engine = engine_of(name, **case)
        history = train(engine, steps)
        found.append((tuple(history), digest(whole_state(engine))))
    return found


def _assert_equal_bits(world: int, name: str, cases: list[dict[str, Any]]) -> None:
    everyone = run_ranks(world, _bits, name, cases)
    first = everyone[0][0]
    assert first[0][0][1] > 0.5, "clipping must take part"
    for rank, found in enumerate(everyone):
        for case, bits in zip(cases, found, strict=True):
            assert bits == first, f"world {world}, rank {rank}, {name}: {case} differs from {cases[0]}"


@pytest.mark.parametrize("name", ["gpt", "odd"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_stages_and_bucket_sizes_give_equal_bits(world: int, name: str) -> None:
    buckets = (25_000_000, 4000, 1004, 236 if name == "gpt" else 20)
    _assert_equal_bits(world, name, [{"stage": s, "bucket": b} for s in range(4) for b in buckets[: 4 if s else 2]])


@pytest.mark.parametrize("reduce_every", ["step", "micro_step"])
def test_stages_give_equal_bits_under_accumulation(reduce_every: str) -> None:
    cases = [{"stage": s, "bucket": b} for s in range(4) for b in (25_000_000, 1004)]
    _assert_equal_bits(3, "gpt", [{**c, "accumulation": 2, "reduce_every": reduce_every} for c in cases])


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_stages_give_equal_bits_at_world_8(name: str) -> None:
    cases = [{"stage": s, "bucket": b} for s in range(4) for b in (25_000_000, 8 * 4 * 3, 8 * 4 * 13, 8 * 4 * 101)]
    _assert_equal_bits(8, name, cases)
