"""The state arithmetic against the paper's own tables, digit for digit, and against the engine's partition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.contract import partition
from launcher.contract.errors import UsageError
from launcher.planning.memory import (
    ZERO_STAGES,
    ElementBytes,
    Elements,
    element_bytes,
    floor_bytes,
    largest_model,
    plan_parameters,
    plan_state,
    readable,
    smallest_ranks,
    stage_memory,
    three_digits,
)

GB = 10**9
MIXED = element_bytes("bf16", "bf16")

# ZeRO paper, Table 1: GB a device, columns stage 1 | 2 | 3 for 7.5 B, 128 B, 1 T.
TABLE_1 = {
    1: ("120 120 120", "2048 2048 2048", "16000 16000 16000"),
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 0.47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 0.12", "513 257 2", "4011 2013 15.6"),
}


@pytest.mark.parametrize("ranks", TABLE_1)
@pytest.mark.parametrize(("column", "parameters"), [(0, 7_500_000_000), (1, 128 * GB), (2, 1000 * GB)])
def test_table_1_of_the_paper(ranks: int, column: int, parameters: int) -> None:
    elements = Elements.of_count(parameters)
    ours = " ".join(three_digits(stage_memory(s, elements, MIXED, ranks).total_bytes, GB) for s in (1, 2, 3))
    assert ours == TABLE_1[ranks][column]


def test_figure_1_of_the_paper() -> None:
    elements = Elements.of_count(7_500_000_000)
    totals = [stage_memory(s, elements, MIXED, 64).total_bytes for s in ZERO_STAGES]
    assert totals == [120 * GB, 31_406_250_000, 16_640_625_000, 1_875_000_000]


@pytest.mark.parametrize("tensor", [1, 2, 4, 8, 16])
def test_table_2_of_the_paper(tensor: int) -> None:
    """Its rule: 32 GB over the bytes a parameter, rounded to 0.1 B, times the tensor degree."""
    expected = {0: 2.0, 1: 7.6, 2: 14.4, 3: 128.0}
    for stage, billions in expected.items():
        alone = largest_model(stage, MIXED, 64, 32 * GB)
        assert float(three_digits(round(alone, -8), GB)) == billions
        whole = largest_model(stage, MIXED, 64, 32 * GB, tensor=tensor)
        assert whole // tensor == alone


def test_the_floor_of_seven_billion_at_stage_2() -> None:
    elements = Elements.of_count(7 * GB)
    assert floor_bytes(2, elements, MIXED) == 14 * GB
    assert [floor_bytes(s, elements, MIXED) for s in ZERO_STAGES] == [112 * GB, 28 * GB, 14 * GB, 0]
    plan = plan_state(elements, MIXED, chosen=2, world_size=64, device_bytes=12 * GB)
    assert plan.verdict == "does not fit"
    assert "floor 14 GB is above the 12 GB" in plan.because and "no number of ranks helps" in plan.because
    assert "stage 3 would fit" in plan.because
    assert plan.stages[2].smallest_ranks_that_fit is None


def test_more_ranks_help_above_the_floor() -> None:
    plan = plan_state(Elements.of_count(7 * GB), MIXED, chosen=2, world_size=4, device_bytes=16 * GB)
    assert plan.verdict == "does not fit"
    # 14 GB + 98 GB / N is 16 GB at N = 49
    assert "needs ≥ 49 ranks, the job has 4" in plan.because


def test_what_cannot_be_said() -> None:
    plan = plan_state(Elements.of_count(7 * GB), MIXED, chosen=2, world_size=4, device_bytes=None)
    assert plan.verdict == "cannot be said" and plan.stages[2].fits is None and "device memory" in plan.because
    assert plan_state(None, MIXED, chosen=2, world_size=4, device_bytes=GB).verdict == "cannot be said"


def test_a_count_without_a_job() -> None:
    plan = plan_parameters(7_500_000_000, ranks=64, device_bytes=32 * GB)
    assert [three_digits(stage.total_bytes, GB) for stage in plan.stages] == ["120", "31.4", "16.6", "1.88"]
    assert [stage.fits for stage in plan.stages] == [False, True, True, True]
    assert [stage.all_ranks_bytes for stage in plan.stages] == [64 * 120 * GB, 2010 * GB, 1065 * GB, 120 * GB]
    assert [stage.smallest_ranks_that_fit for stage in plan.stages] == [None, 45, 7, 4]
    parts = plan_parameters(8 * GB, ranks=64, tensor=4)
    assert parts.parameters == 8 * GB and parts.stages[0].total_bytes == 32 * GB and parts.stages[0].fits is None
    for wrong in (
        {"ranks": 6, "tensor": 4},
        {"ranks": 0},
        {"ranks": 1, "optimizer": "adam2"},
        {"ranks": 1, "precision": "x"},
    ):
        with pytest.raises(UsageError):
            plan_parameters(GB, **wrong)


def test_bytes_of_an_element() -> None:
    assert element_bytes("fp32", "fp32") == ElementBytes(4, 4, 8)
    assert element_bytes("bf16", "fp32") == ElementBytes(2, 4, 12)
    assert element_bytes("fp16", "fp16", "momentum") == ElementBytes(2, 2, 8)
    assert element_bytes("fp32", "fp32", "sgd") == ElementBytes(4, 4, 0)


def test_frozen_parameters_cost_weights_only() -> None:
    elements = Elements.of_count(1000, frozen=10_000)
    for stage in ZERO_STAGES:
        with_frozen = stage_memory(stage, elements, MIXED, 10)
        without = stage_memory(stage, Elements.of_count(1000), MIXED, 10)
        assert with_frozen.gradients_bytes == without.gradients_bytes
        assert with_frozen.optimizer_bytes == without.optimizer_bytes
        assert with_frozen.parameters_bytes - without.parameters_bytes == (2_000 if stage == 3 else 20_000)


shapes = st.lists(st.integers(1, 300), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 9), st.sampled_from(ZERO_STAGES), st.integers(1, 400))
def test_a_layout_comes_to_what_its_ranks_own(sizes: list[int], ranks: int, stage: int, bucket: int) -> None:
    """The closed form equals the partition's own shards, padding included, and the engine's promise."""
    groups = [(f"u{i}", [partition.Parameter(f"p{i}", (n,))]) for i, n in enumerate(sizes)]
    layout = partition.build(groups, ranks=ranks, bucket_bytes=bucket)
    ours = stage_memory(stage, Elements.of_layout(layout), element_bytes("fp32", "fp32"), ranks)
    promised = partition.state_bytes(layout, stage)
    assert (ours.parameters_bytes, ours.gradients_bytes, ours.optimizer_bytes) == tuple(promised)
    assert ours.all_ranks_bytes == ours.total_bytes * ranks
    if stage == 3:
        assert ours.parameters_bytes == 4 * layout.shard_numel


@settings(max_examples=80, deadline=None)
@given(shapes, st.sampled_from(ZERO_STAGES), st.integers(1, 20_000), st.booleans())
def test_the_smallest_number_of_ranks_is_the_smallest(sizes: list[int], stage: int, device: int, padded: bool) -> None:
    sizes = sizes if padded else sizes[:1]  # a plain count is one piece
    elements = Elements(tuple(sizes), (), padded)
    found = smallest_ranks(stage, elements, MIXED, device)
    by_hand = next(
        (n for n in range(1, max(sizes) + 1) if stage_memory(stage, elements, MIXED, n).total_bytes <= device), None
    )
    assert found == by_hand


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ZERO_STAGES), st.integers(1, 50), st.integers(0, 10**6))
def test_the_largest_model_fits_and_one_more_does_not(stage: int, ranks: int, device: int) -> None:
    most = largest_model(stage, MIXED, ranks, device)
    assert stage_memory(stage, Elements.of_count(most), MIXED, ranks).total_bytes <= device
    assert stage_memory(stage, Elements.of_count(most + 1), MIXED, ranks).total_bytes > device


def test_tensor_ranks_share_the_count_and_add_up() -> None:
    memory = stage_memory(1, Elements.of_count(8 * GB, tensor=4), MIXED, 16)
    assert memory.total_bytes == 4 * 2 * GB + 12 * 2 * GB // 16
    assert memory.all_ranks_bytes == memory.total_bytes * 64
    assert smallest_ranks(1, Elements.of_count(8 * GB, tensor=4), MIXED, memory.total_bytes) == 64


def test_the_plain_count_adds_up_without_padding() -> None:
    memory = stage_memory(3, Elements.of_count(10), MIXED, 3)
    assert memory.total_bytes == 54  # 160 / 3, rounded up to a byte
    assert memory.all_ranks_bytes == 16 * 10


def test_a_large_model_is_planned_at_once() -> None:
    layout = partition.build(partition.gpt_parameters(212, 8192, 1024, 50257), ranks=1, bucket_bytes=25_000_000)
    plan = plan_state(Elements.of_layout(layout), MIXED, chosen=3, world_size=400, device_bytes=32_510 * 2**20)
    assert plan.parameters == layout.numel > 170 * GB
    assert plan.verdict == "fits"
    assert plan.stages[3].smallest_ranks_that_fit == 81


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1000, "1 kB"), (14 * GB, "14 GB"), (41_250_000_000, "41.3 GB"), (16_000 * GB, "16 TB"),
     (999_999, "999 kB"), (99_990_000, "100 MB")],
)  # fmt: skip
def test_readable(count: int, text: str) -> None:
    assert readable(count) == text
