"""BatchNorm, Dropout and frozen parts over ranks: what holds, stage by stage, and after a resume.

Statistics of a batch are those of a rank's own rows, as under DDP, so that numbers differ from the undistributed
model's by nature. What holds instead: a plain torch loop that does what the ranks do gives the same to 1e-12, stage by
stage and over a resume at another stage; on one rank, everything equals torch; over ranks, running
statistics are rank 0's on every rank after each step; stages are bitwise equal; a resume is bitwise
the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine


class Normed(nn.Module):
    """A frozen layer in front (its BatchNorm still counts), dropout, a frozen normalisation behind."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 7)
        self.frozen.requires_grad_(False)
        self.layers = nn.Sequential(
            nn.BatchNorm1d(7), nn.Linear(7, 9), nn.Dropout(0.3), nn.BatchNorm1d(9, affine=False), nn.Linear(9, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.tanh(self.frozen(x)))
        return (out[:, 0] - x.sum(1)).square().mean()


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(6)
    return Normed().to(dtype)


def _rows(steps: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, generator=generator, dtype=torch.float64) for _ in range(steps)]


def _train(engine: ZeroEngine, rows: list[Tensor], first: int = 0) -> list[float]:
    """On this rank's rows, with a dropout mask that depends on step and rank alone."""
    rank, world = engine.comm.rank, engine.comm.size
    norms = []
    for step, batch in enumerate(rows, start=first):
        torch.manual_seed(100 * step + rank)
        dtype = next(engine.model.parameters()).dtype
        for part in batch[rank::world].to(dtype).chunk(engine.config.accumulation):
            engine.backward(engine.model(part))
        norms.append(engine.step().grad_norm)
    return norms


def _buffers(engine: ZeroEngine) -> dict[str, Tensor]:
    return {n: b.detach().clone() for n, b in engine.model.named_buffers()}


def _engine(stage: int, **changes: Any) -> ZeroEngine:
    config: dict[str, Any] = {"optimizer": AdamW(1e-2, clip=0.5), **changes}
    return ZeroEngine(_model(config.pop("dtype", torch.float32)), EngineConfig(Zero(stage, 64), **config))


def _own_statistics(rows: list[Tensor]) -> dict[str, Tensor]:
    """The first BatchNorm's running statistics over rank 0's rows: what feeds it is frozen, so no training matters."""
    model = _model()
    for batch in rows:
        model(batch.float())
    return {n: b for n, b in model.named_buffers() if n.startswith("layers.0.")}


def _over_ranks(rank: int, world: int, folder: str, optimizer: AdamW | SGD) -> list[str]:
    rows, found = _rows(4, 6 * world), []
    expected = _own_statistics([b[0::world] for b in rows])
    before = _model().frozen.weight  # type: ignore[union-attr]
    for stage in range(4):
        whole = _engine(stage, optimizer=optimizer)
        norms = _train(whole, rows)
        state, buffers = whole_state(whole), _buffers(whole)
        assert torch.equal(state["frozen.weight"], before)  # type: ignore[arg-type]
        for name, value in expected.items():
            assert torch.equal(buffers[name], value), f"rank {rank}: {name} is not what rank 0's rows make it"
        first = _engine(stage, optimizer=optimizer)
        assert _train(first, rows[:2]) == norms[:2]
        first.save(f"{folder}/{stage}", 2)
        second = _engine((stage + 1) % 4, optimizer=optimizer)
        second.load(f"{folder}/{stage}")
        assert digest(_buffers(second)) == digest(_buffers(first))
        assert _train(second, rows[2:], 2) == norms[2:]
        found += [digest(state | buffers), digest(whole_state(second) | _buffers(second))]
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_running_statistics_follow_rank_0_and_stages_and_resumes_are_bitwise_equal(tmp_path: Path, world: int) -> None:
    optimizer = AdamW(1e-2, clip=0.5) if world == 2 else SGD(0.05, 0.9, nesterov=True, clip=0.5)
    found = run_ranks(world, _over_ranks, str(tmp_path), optimizer)
    assert len({bits for row in found for bits in row}) == 1


def _as_ranks(world: int, rows: list[Tensor], accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    """What ``world`` ranks do, by plain torch in one process: each draws its own masks and normalises its own rows,
    gradients are the mean over all, and running statistics are those that rank 0 saw."""
    model = _model(torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for step, batch in enumerate(rows):
        first = {n: b.clone() for n, b in model.named_buffers()}
        after: dict[str, Tensor] = {}
        for rank in range(world):
            for name, buffer in model.named_buffers():
                buffer.copy_(first[name])
            torch.manual_seed(100 * step + rank)
            for part in batch[rank::world].chunk(accumulation):
                (model(part) / (world * accumulation)).backward()
            if rank == 0:
                after = {n: b.clone() for n, b in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
        norms.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        adam.step()
        adam.zero_grad()
    return norms, {n: t.detach().clone() for n, t in model.state_dict().items()}


def _beside_torch(rank: int, world: int, folder: str) -> None:
    rows = _rows(4, 8 * world)
    for accumulation in (1, 2):
        norms, expected = _as_ranks(world, rows, accumulation)
        for stage in range(4):
            place = f"{folder}/{accumulation}-{stage}"
            first = _engine(stage, dtype=torch.float64, accumulation=accumulation)
            found = _train(first, rows[:2])
            first.save(place, 2)
            second = _engine(3 - stage, dtype=torch.float64, accumulation=accumulation)
            second.load(place)  # and goes on at another stage
            found += _train(second, rows[2:], 2)
            assert found == pytest.approx(norms, rel=1e-12), (stage, accumulation)
            state = whole_state(second) | _buffers(second)
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(
                    state[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
                )


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_masks_statistics_and_frozen_parts_equal_torchs_over_ranks_and_after_a_resume(
    tmp_path: Path, world: int
) -> None:
    run_ranks(world, _beside_torch, str(tmp_path))


@pytest.mark.parametrize("stage", [0, 3])
def test_on_one_rank_all_of_it_equals_torch(stage: int) -> None:
    rows = _rows(5, 8)
    engine = _engine(stage, dtype=torch.float64, optimizer=SGD(0.05, 0.9, clip=0.5))
    _train(engine, rows)
    model = _model(torch.float64)
    trained = [p for p in model.parameters() if p.requires_grad]
    theirs = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for step, batch in enumerate(rows):
        torch.manual_seed(100 * step)
        theirs.zero_grad()
        model(batch).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        theirs.step()
    for name, value in engine.model.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)
