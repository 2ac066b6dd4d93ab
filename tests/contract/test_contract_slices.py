"""Slices of tensor ranks against numpy's own slicing, and every degree read from every other, element by element."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from launcher.contract import partition
from launcher.contract.partition import Layout, Parameter
from launcher.contract.slices import owners, reshard_tensor, slices

PARAMETERS = [
    Parameter("norm", (5,)),
    Parameter("qkv", (24, 3), tensor_axis=0, tensor_parts=3),
    Parameter("qkv.bias", (24,), tensor_axis=0, tensor_parts=3),
    Parameter("out", (7, 8), tensor_axis=1),
    Parameter("words", (37, 3), tensor_axis=0, tensor_padded=True),
]


def _local(parameter: Parameter, tensor: int, rank: int) -> np.ndarray:
    """The slice by numpy: the numbers of its elements in the whole parameter, -1 for padding."""
    whole = np.arange(parameter.numel).reshape(parameter.shape)
    if not parameter.is_split(tensor):
        return whole.reshape(-1)
    axis = parameter.tensor_axis
    assert axis is not None
    shares = []
    for stretch in np.split(whole, parameter.tensor_parts, axis):
        lacking = -stretch.shape[axis] % tensor
        pad = [(0, lacking if i == axis else 0) for i in range(whole.ndim)]
        shares.append(np.split(np.pad(stretch, pad, constant_values=-1), tensor, axis)[rank])
    return np.concatenate(shares, axis).reshape(-1)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_runs_are_what_numpy_cuts(tensor: int) -> None:
    for parameter in PARAMETERS:
        for rank in range(tensor):
            expected = _local(parameter, tensor, rank)
            assert expected.size == parameter.local_numel(tensor)
            for start, stop in [(0, expected.size), (1, expected.size - 2), (expected.size // 2, expected.size)]:
                found = np.full(expected.size, -1)
                for run in slices(parameter, tensor, rank, start, stop):
                    assert run.numel > 0 and start <= run.local and run.local + run.numel <= stop
                    found[run.local : run.local + run.numel] = np.arange(run.whole, run.whole + run.numel)
                assert np.array_equal(found[start:stop], expected[start:stop])
        back = np.full(parameter.numel, -1)
        for run in owners(parameter, tensor, 0, parameter.numel):
            back[run.whole : run.whole + run.numel] = _local(parameter, tensor, run.tensor_rank)[
                run.local : run.local + run.numel
            ]
        assert np.array_equal(back, np.arange(parameter.numel))


def _layout(ranks: int, tensor: int, bucket_bytes: int, cuts: Sequence[int]) -> Layout:
    groups = [(f"u{i}", PARAMETERS[a:b]) for i, (a, b) in enumerate(itertools.pairwise(cuts))]
    return partition.build(groups, ranks=ranks, bucket_bytes=bucket_bytes, tensor=tensor)


def _values(layout: Layout, rank: int, tensor_rank: int, base: dict[str, int]) -> list[np.ndarray]:
    """Each unit's shard, holding the number of every element; -1 for padding."""
    shards = []
    for unit in layout.units:
        shard = np.full(unit.shard_numel, -1)
        for piece in unit.pieces(rank):
            local = _local(piece.parameter, layout.tensor, tensor_rank)[piece.start : piece.stop]
            shard[piece.offset : piece.offset + local.size] = np.where(
                local < 0, -1, local + base[piece.parameter.name]
            )
        shards.append(shard)
    return shards


@pytest.mark.parametrize("new", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 4)])
@pytest.mark.parametrize("old", [(1, 1), (3, 1), (2, 2), (1, 4)])
def test_every_degree_is_read_from_every_other(old: tuple[int, int], new: tuple[int, int]) -> None:
    base = {p.name: 1000 * (i + 1) for i, p in enumerate(PARAMETERS)}
    before = _layout(old[0], old[1], 4 * 12, (0, 2, 5))
    after = _layout(new[0], new[1], 4 * 24, (0, 1, 3, 5))
    saved = {d * old[1] + t: _values(before, d, t, base) for d, t in itertools.product(range(old[0]), range(old[1]))}
    for rank, tensor_rank in itertools.product(range(new[0]), range(new[1])):
        found = [np.full(u.shard_numel, -1) for u in after.units]
        for copy in reshard_tensor(before, after, rank, tensor_rank):
            unit = before.units[copy.source_unit]
            assert unit.split or copy.source_rank % old[1] == 0, "what is replicated is saved once"
            target = found[copy.unit][copy.offset : copy.offset + copy.numel]
            assert (target == -1).all(), "written twice"
            target[:] = saved[copy.source_rank][copy.source_unit][copy.source_offset : copy.source_offset + copy.numel]
        for mine, expected in zip(found, _values(after, rank, tensor_rank, base), strict=True):
            assert np.array_equal(mine, expected)


def test_a_unit_is_split_or_replicated_as_a_whole() -> None:
    layout = _layout(2, 2, 1000, (0, 5))
    assert [(u.name, u.split) for u in layout.units] == [("u0", False), ("u0#1", True)]
    assert len(_layout(2, 1, 1000, (0, 5)).units) == 1
    with pytest.raises(ValueError, match="does not divide by the tensor degree 5"):
        Parameter("w", (6, 4), tensor_axis=0).local_shape(5)
    with pytest.raises(ValueError, match="in 3 stretches does not divide"):
        Parameter("w", (9, 4), tensor_axis=0, tensor_parts=3).local_shape(2)
