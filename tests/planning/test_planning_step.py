"""The whole step by arithmetic, against real steps of the real engine and against the paper's residual states."""

from __future__ import annotations

from typing import Any

import pytest
from engine_ranks import run_ranks
from measured_step import measure_all
from planning_cases import direct, job

from launcher.planning import make_plan
from launcher.planning.plan import Plan
from launcher.planning.shapes import Shapes, gpt_numel, step_flops
from launcher.planning.step import block_bytes, stored_bytes, together
from launcher.specs.models import GptModel

MODELS = (
    {"layers": 3, "hidden": 96, "heads": 3, "seq_len": 50},
    {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32, "vocab": 1000},
)
CASES: list[dict[str, Any]] = [
    {"model": model, "stage": stage, "bucket": 200_000, "accumulation": 2, "micro": 4}
    for model, stages in zip(MODELS, ((0, 1, 2, 3), (2, 3)), strict=True)
    for stage in stages
]
RUNS = [(1, 3), (1, 5), *((2, number) for number in range(len(CASES)))]  # one rank is the same at every stage


def plan_of(case: dict[str, Any], world: int) -> Plan:
    return make_plan(
        job(
            nodes=1,
            model={"kind": "gpt", **case["model"]},
            zero={"stage": case["stage"], "bucket": f"{case['bucket']}B"},
            batch={"micro": case["micro"], "accumulation": case["accumulation"]},
            evaluate=None,
        ),
        direct(nodes={"names": "node01", "slots": world}),
    )


@pytest.fixture(scope="module")
def measured() -> dict[tuple[int, int], dict[str, Any]]:
    rows = run_ranks(2, measure_all, [CASES[number] | {"world": world} for world, number in RUNS])[0]
    return dict(zip(RUNS, rows, strict=True))


@pytest.mark.parametrize(("world", "number"), RUNS)
def test_the_lines_are_what_a_real_step_holds(
    world: int, number: int, measured: dict[tuple[int, int], dict[str, Any]]
) -> None:
    """State, buckets and bytes sent to the byte; the peak of forward and backward within 1.5 %."""
    plan, real = plan_of(CASES[number], world), measured[world, number]
    lines = {line.what: line for line in plan.step}
    assert plan.state.parameters == real["parameters"]
    for kind in ("parameters", "gradients", "optimizer"):
        assert lines[kind].bytes == real["memory"][kind]
    assert lines["communication buckets"].bytes == real["memory"]["buckets"]
    assert lines["norm of the gradient"].alive.backward == real["memory"]["norm"]
    assert plan.sent_bytes_per_step == real["sent_bytes"]
    assert sum(t.volume_elements for t in plan.traffic or ()) == real["volume_elements"]
    alive = [line.alive for line in plan.step if line.what != "allocator slack"]
    backward = max(sum(a.loss for a in alive), sum(a.backward for a in alive))
    assert backward == pytest.approx(real["backward"], rel=0.015)
    assert sum(a.update for a in alive) == pytest.approx(real["update"], rel=0.05)


def test_every_line_says_where_it_comes_from_and_none_is_a_sum() -> None:
    plan = plan_of(CASES[3], 2)
    assert {line.source for line in plan.step} == {"arithmetic", "assumed"}
    assert {line.what for line in plan.step if line.source == "assumed"} == {"allocator slack"}
    assert "gathered parameters" in {line.what for line in plan.step}
    assert all(line.bytes == max(line.alive.loss, line.alive.backward, line.alive.update) for line in plan.step)
    assert together(plan.step, assumed=False) < together(plan.step, assumed=True)
    assert together(plan.step, assumed=True) < sum(line.bytes for line in plan.step)


def test_activations_of_the_paper() -> None:
    """§3.2: one checkpoint a layer of 100B at batch 32 is 67.1 GB, and 4.2 GB over 16 tensor ranks."""
    shapes = Shapes(125, 8192, 64, 1024, 51200, 32, 16, 2)
    assert 125 * stored_bytes(shapes, "whole") == 67_108_864_000
    assert 125 * stored_bytes(shapes, "partitioned") == 67_108_864_000 // 16
    assert stored_bytes(shapes, "host") == 0
    alone = Shapes(1, 8192, 64, 1024, 51200, 32, 1, 2)
    stream = 2 * 32 * 1024 * 8192
    assert block_bytes(alone) == 16 * stream + 16 * 32 * 1024 + 4 * 32 * 1024 * 64
    assert 4 * stream < block_bytes(shapes) < 5 * stream


def test_recomputation_trades_activations_for_one_block() -> None:
    def lines(recompute: Any, activations: str = "whole") -> dict[str, int]:
        a_job = job(model={"kind": "gpt", "layers": 8, "hidden": 64, "heads": 4, "seq_len": 32})
        changed = a_job.model_copy(update={"recompute": recompute, "activations": activations})
        return {line.what: line.bytes for line in make_plan(changed, direct()).step}

    kept, all_again, some = lines("none"), lines("block"), lines((0, 1, 2))
    stream = 2 * 32 * 64 * 4
    assert "stored for recomputation" not in kept
    assert all_again["activations of the blocks"] == 0
    assert all_again["stored for recomputation"] == 8 * stream
    assert all_again["one block computed again"] == kept["activations of the blocks"] // 8 - stream
    assert some["activations of the blocks"] == kept["activations of the blocks"] * 5 // 8
    assert some["stored for recomputation"] == 3 * stream
    assert lines("block", "host")["stored for recomputation"] == 0


def test_flops_are_6_psi_a_token_and_8_with_recomputation() -> None:
    model = GptModel(kind="gpt", layers=12, hidden=768, heads=12, seq_len=1024, vocab=50257)
    psi, tokens = gpt_numel(model), 8 * 1024
    attention = 6 * 1024 * 768 * 12
    assert psi == 124_439_808  # GPT-2 small, as published
    assert step_flops(model, samples=8, recomputed=0) == tokens * (6 * psi + attention)
    assert step_flops(model, samples=8, recomputed=12) == tokens * (8 * psi + attention * 4 // 3)
    halfway = step_flops(model, samples=8, recomputed=6)
    assert step_flops(model, samples=8, recomputed=0) < halfway < step_flops(model, samples=8, recomputed=12)
