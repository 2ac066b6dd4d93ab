"""The partition: every element has one owner, padding is at unit ends only, and resharding loses nothing."""

from __future__ import annotations

import json
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.contract import partition
from launcher.contract.partition import Layout, Parameter, Unit
from launcher.contract.plain import dumps, from_plain

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8)


def _layout(of: list[tuple[int, ...]], ranks: int, bucket: int, cuts: int) -> Layout:
    parameters = [Parameter(f"p{i}", shape, trainable=i % 5 != 4) for i, shape in enumerate(of)]
    step = max(1, len(parameters) // cuts)
    groups = [(f"u{i}", parameters[i : i + step]) for i in range(0, len(parameters), step)]
    return partition.build(groups, ranks=ranks, bucket_bytes=bucket)


@given(shapes, st.integers(1, 7), st.integers(1, 200), st.integers(1, 4))
def test_every_element_has_one_owner(of: list[tuple[int, ...]], ranks: int, bucket: int, cuts: int) -> None:
    layout = _layout(of, ranks, bucket, cuts)
    assert layout.numel == sum(prod(s) for s in of)
    assert layout.padding < ranks * len(layout.units) or layout.padding == 0
    for unit in layout.units:
        owners = [-1] * unit.padded
        for rank in range(ranks):
            offset = 0
            for part in unit.parts(rank):
                assert part.offset == offset
                offset += part.stop - part.start
                for at in range(part.start, part.stop):
                    assert owners[at] == -1
                    owners[at] = rank
            assert offset == unit.shard_numel
        assert -1 not in owners
        assert unit.padded - unit.numel < ranks
        seen = sum(piece.stop - piece.start for rank in range(ranks) for piece in unit.pieces(rank))
        assert seen == unit.numel


def _shards(layout: Layout, values: dict[str, list[float]]) -> list[list[list[float]]]:
    """[rank][unit] → the shard's elements; padding is zero."""
    result = []
    for rank in range(layout.ranks):
        row = []
        for unit in layout.units:
            flat = [x for placed in unit.placed for x in values[placed.parameter.name]]
            flat += [0.0] * (unit.padded - unit.numel)
            row.append([x for part in unit.parts(rank) for x in flat[part.start : part.stop]])
        result.append(row)
    return result


@settings(max_examples=60)
@given(shapes, st.integers(1, 5), st.integers(1, 5), st.integers(1, 99), st.integers(1, 99), st.integers(1, 3))
def test_resharding_moves_every_element_once(
    of: list[tuple[int, ...]], before: int, after: int, bucket: int, new_bucket: int, cuts: int
) -> None:
    old, new = _layout(of, before, bucket, 1), _layout(of, after, new_bucket, cuts)
    values = {f"p{i}": [100.0 * i + k for k in range(prod(shape))] for i, shape in enumerate(of)}
    source, expected = _shards(old, values), _shards(new, values)
    for rank in range(after):
        filled = [[0.0] * unit.shard_numel for unit in new.units]
        written = 0
        for copy in partition.reshard(old, new, rank):
            data = source[copy.source_rank][copy.source_unit]
            taken = data[copy.source_offset : copy.source_offset + copy.numel]
            assert len(taken) == copy.numel > 0
            filled[copy.unit][copy.offset : copy.offset + copy.numel] = taken
            written += copy.numel
        assert filled == expected[rank]
        assert written == sum(p.stop - p.start for u in new.units for p in u.pieces(rank))


def test_resharding_names_what_differs() -> None:
    old = _layout([(3, 4)], 2, 100, 1)
    for shape, dtype, words in (((4, 3), "float32", "shape"), ((3, 4), "float64", "float32 in the checkpoint")):
        new = partition.build([("u", [Parameter("p0", shape, dtype)])], ranks=1, bucket_bytes=100)
        with pytest.raises(ValueError, match=words):
            partition.reshard(old, new, 0)
    with pytest.raises(ValueError, match="p1 of the checkpoint is not in the model"):
        partition.reshard(_layout([(3,), (4,)], 2, 100, 1), _layout([(3,)], 2, 100, 1), 0)
    with pytest.raises(ValueError, match="p1 is not in the checkpoint"):
        partition.reshard(_layout([(3,)], 2, 100, 1), _layout([(3,), (4,)], 2, 100, 1), 0)


def test_unequal_kinds_become_units_of_their_own() -> None:
    kinds = [
        Parameter("a", (3,)),
        Parameter("b", (3,), dtype="bfloat16"),
        Parameter("c", (3,), trainable=False),
        Parameter("d", (2,)),
        Parameter("e", (2,), group=1),
    ]
    layout = partition.build([("u", kinds)], ranks=2, bucket_bytes=64)
    assert [(u.name, [p.name for p in u.parameters]) for u in layout.units] == [
        ("u", ["a", "d"]),
        ("u#1", ["b"]),
        ("u#2", ["c"]),
        ("u#3", ["e"]),
    ]
    assert layout.trainable_numel == 10
    assert layout.units[1].bucket == 32
    with pytest.raises(ValueError, match="mixes"):
        Unit("u", tuple(kinds), ranks=1, bucket=4)


def test_a_tensor_degree_divides_the_axis() -> None:
    parameter = Parameter("w", (6, 4), tensor_axis=0)
    assert parameter.local_shape(3) == (2, 4)
    assert parameter.local_numel(2) == 12
    with pytest.raises(ValueError, match="axis 0"):
        parameter.local_shape(4)


def test_a_layout_survives_json() -> None:
    layout = _layout([(3, 4), (), (7,)], 3, 20, 2)
    assert from_plain(Layout, json.loads(dumps(layout))) == layout


@pytest.mark.parametrize(("ranks", "stage", "expected"), [(1, 3, 16), (64, 0, 16), (64, 1, 8.125), (64, 3, 0.25)])
def test_state_bytes_are_the_papers_in_fp32(ranks: int, stage: int, expected: float) -> None:
    """4Ψ parameters, 4Ψ gradients, 8Ψ moments; what a stage partitions is divided by N."""
    layout = partition.build(partition.gpt_parameters(4, 256, 128, 256), ranks=ranks, bucket_bytes=1_000_000)
    found = partition.state_bytes(layout, stage)
    assert found.total / layout.numel == pytest.approx(expected, rel=1e-3)
    assert layout.padding / layout.numel < 1e-3
    assert found.total == found.parameters + found.gradients + found.optimizer


def test_state_bytes_of_other_kinds() -> None:
    layout = partition.build(
        [("u", [Parameter("a", (10,)), Parameter("f", (6,), trainable=False)])], ranks=2, bucket_bytes=1000
    )
    assert partition.state_bytes(layout, 0) == (64, 40, 80)
    assert partition.state_bytes(layout, 2) == (64, 20, 40)
    assert partition.state_bytes(layout, 3) == (32, 20, 40)
    assert partition.state_bytes(layout, 3, whole=True) == (32, 40, 40)
    assert partition.state_bytes(layout, 2, gradient_bytes=2, moments=1) == (64, 10, 20)


def test_gpt_counts_are_the_closed_form() -> None:
    for layers, hidden, seq, vocab in ((1, 8, 4, 5), (12, 768, 1024, 50257)):
        layout = partition.build(partition.gpt_parameters(layers, hidden, seq, vocab), ranks=1, bucket_bytes=10**8)
        expected = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq) * hidden + 2 * hidden
        assert layout.numel == expected
