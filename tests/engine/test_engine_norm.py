"""The norm has the same bits however the gradient is partitioned, also at another world size."""

from __future__ import annotations

import math

import pytest
import torch
from engine_ranks import run_ranks

from launcher.contract import partition
from launcher.contract.atoms import ATOM, BLOCK
from launcher.contract.partition import Parameter
from launcher.engine.comm import Alone, connect
from launcher.engine.model.flat import STAGES, FlatUnit
from launcher.engine.reduce.norm import NormPlan

SHAPES = [(3,), (BLOCK + 300,), (1,), (255, 3), (2 * BLOCK,), (BLOCK - 1,), (ATOM,), (77, 91)]


def _gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) * 10.0 ** (i % 4) for i, shape in enumerate(SHAPES)]


def _norms(rank: int, world: int, cases: list[tuple[int, int]]) -> list[float]:
    comm = connect() if world > 1 else Alone()
    found = []
    for stage, bucket in cases:
        parameters = [Parameter(f"p{i}", shape) for i, shape in enumerate(SHAPES)]
        layout = partition.build([("a", parameters[:3]), ("b", parameters[3:])], ranks=world, bucket_bytes=bucket)
        gradients = dict(zip((p.name for p in parameters), _gradients(), strict=True))
        units = []
        for unit in layout.units:
            tensors = [torch.nn.Parameter(torch.zeros(p.shape)) for p in unit.parameters]
            flat = FlatUnit(unit, tensors, STAGES[stage], comm, whole_gradient=stage < 2)
            whole = torch.zeros(unit.padded)
            for placed in unit.placed:
                whole[placed.start : placed.stop] = gradients[placed.parameter.name].view(-1)
            assert flat.gradient is not None
            for index, part in enumerate(flat.parts):
                flat.gradient_of_part(index).copy_(whole[part.start : part.stop])
            units.append(flat)
        found.append(NormPlan(units, comm).sum_of_squares())
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equal_bits_for_every_partition(world: int) -> None:
    cases = [(stage, bucket) for stage in (0, 2) for bucket in (25_000_000, 300_000, 70_004)]
    (expected,) = _norms(0, 1, [(0, 25_000_000)])
    exact = math.fsum(float(x) ** 2 for g in _gradients() for x in g.view(-1))
    assert expected == pytest.approx(exact, rel=1e-14)
    for found in run_ranks(world, _norms, cases):
        assert found == [expected] * len(cases)


def test_row_sums_depend_on_the_row_alone() -> None:
    rows = torch.randn(300, ATOM, dtype=torch.float64)
    whole = rows.sum(1)
    for start in range(0, 280, 7):
        for count in (1, 2, 3, 19):
            assert torch.equal(rows[start : start + count].clone().sum(1), whole[start : start + count])
