"""AdamW on runs of any length and place: the bits of an element do not depend on where its run begins."""

from __future__ import annotations

import pytest
import torch

from launcher.contract.train import AdamW
from launcher.engine.model.flat import Run
from launcher.engine.model.units import Group
from launcher.engine.update.optim import FlatAdamW, learning_rate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cutting_a_run_changes_no_bit(dtype: torch.dtype) -> None:
    whole = [torch.randn(5000, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(4)]
    whole[3].abs_()

    def updated(cuts: list[int]) -> list[torch.Tensor]:
        state = [t.clone() for t in whole]
        runs = [
            Run(state[0][a:b], state[1][a:b], (state[2][a:b], state[3][a:b]), 0)
            for a, b in zip([0, *cuts], [*cuts, 5000], strict=True)
        ]
        optimizer = FlatAdamW(runs, AdamW(lr=1e-3, weight_decay=0.1), [Group()])
        for _ in range(3):
            state[1].copy_(whole[1])
            optimizer.step(1e-3, 0.37)
        return [state[0], state[2], state[3]]

    expected = updated([])
    for cuts in ([1], [17], [4999], [3, 20, 21, 1000, 4321], [0, 7]):
        for a, b in zip(expected, updated(cuts), strict=True):
            assert torch.equal(a, b), cuts


def test_equals_torch_with_groups() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(33, dtype=torch.float64), torch.randn(50, dtype=torch.float64)]
    gradients = [torch.randn(33, dtype=torch.float64), torch.randn(50, dtype=torch.float64)]
    reference = [torch.nn.Parameter(t.clone()) for t in tensors]
    adam = torch.optim.AdamW(
        [{"params": [reference[0]], "lr": 1e-2}, {"params": [reference[1]], "lr": 5e-3, "weight_decay": 0.0}],
        weight_decay=0.3,
        betas=(0.9, 0.95),
    )
    runs = [Run(t, torch.zeros_like(t), (torch.zeros_like(t), torch.zeros_like(t)), i) for i, t in enumerate(tensors)]
    mine = FlatAdamW(runs, AdamW(lr=1e-2, weight_decay=0.3), [Group(), Group(lr_scale=0.5, weight_decay=0.0)])
    for _ in range(5):
        for parameter, gradient, run in zip(reference, gradients, runs, strict=True):
            parameter.grad = gradient.clone()
            run.gradient.copy_(gradient)
        adam.step()
        mine.step(1e-2, 1.0)
    for parameter, run in zip(reference, runs, strict=True):
        torch.testing.assert_close(run.parameter, parameter.detach(), rtol=1e-13, atol=1e-13)


def test_a_unit_is_told_of_before_the_next_one_is_updated() -> None:
    """So that its parameters can be sent meanwhile; units come as their first runs were given, each once."""
    tensors = [torch.zeros(40) for _ in range(4)]
    runs = [
        Run(t, torch.ones(40), (torch.zeros(40), torch.zeros(40)), group, unit)
        for t, group, unit in zip(tensors, (0, 1, 0, 0), (2, 0, 1, 0), strict=True)
    ]
    seen: list[tuple[int, list[bool]]] = []
    optimizer = FlatAdamW(runs, AdamW(lr=1e-3), [Group(), Group()])
    optimizer.step(1e-3, 1.0, lambda unit: seen.append((unit, [bool(t.any()) for t in tensors])))
    assert seen == [
        (2, [True, False, False, False]),
        (0, [True, True, False, True]),
        (1, [True, True, True, True]),
    ]


def test_schedule_warms_up_and_falls_to_its_floor() -> None:
    config = AdamW(lr=1.0, warmup=4, lr_floor=0.1)
    rates = [learning_rate(config, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    constant = AdamW(lr=1.0, warmup=2, schedule="constant")
    assert [learning_rate(constant, s, 9) for s in (1, 2, 9)] == [0.5, 1.0, 1.0]
