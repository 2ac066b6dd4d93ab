"""A model is built under a limit that its own weights would break: the kernel refuses memory beyond it (RLIMIT_DATA).
The allocator is as it comes, in a process that made no engine before, and then in the same one, which did.

What a rank owns must fit below the limit too, so the cases differ in how much that is: at world 2 most of the model is
frozen (half of the weights), at world 4 SGD keeps no moments (a quarter each of weights and gradients), at world 8
AdamW keeps two (an eighth of four kinds).
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine import EngineConfig, ZeroEngine

SHARE = 0.6  # of the whole weights, above what stood before
# Blocks, width: what ranks keep beside their state does not shrink with a model.
SMALL, LARGE, MANY, WIDE, NARROW = (96, 512), (32, 768), (80, 768), (48, 1024), (192, 512)


class Model(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        for block in self.blocks[1::2]:
            block.weight = nn.Parameter(torch.randn(width, width) * 0.03)  # two tensors for one, and the one before
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x).square().mean()


def _seeded(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(12)
    return Model(blocks, width)


def _frozen(blocks: int, width: int) -> nn.Module:
    model = _seeded(blocks, width)
    model.blocks.requires_grad_(False)  # type: ignore[union-attr]
    return model


def _data_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))


@contextmanager
def _limited(more: int) -> Iterator[None]:
    """The kernel gives this process at most ``more`` bytes of private memory above what it has."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _build(rank: int, world: int, made: Callable[..., nn.Module], size: tuple[int, int], config: EngineConfig) -> str:
    factory = partial(made, *size)
    with torch.device("meta"):
        weights = 4 * sum(p.numel() for p in factory().parameters())
    with _limited(int(SHARE * weights)):
        first = ZeroEngine(factory, config)
    with _limited(int(SHARE * weights)), pytest.raises(RuntimeError, match="can't allocate memory"):
        factory()
    with _limited(int(SHARE * weights)):
        zero = ZeroEngine(factory, config)
    assert first.layout == zero.layout
    expected = {name: p.detach() for name, p in factory().named_parameters()}
    assert digest(whole_state(zero)) == digest(expected), "bit for bit the undistributed initialisation"
    zero.backward(zero.model(torch.ones(2, size[1])))
    zero.step()
    return digest(whole_state(zero))


CASES = [
    pytest.param(2, _frozen, SMALL, AdamW(0.1), id="2 ranks, frozen blocks"),
    *(
        pytest.param(4, _seeded, size, SGD(0.1, 0.0), id="4 ranks, SGD, {} of {}".format(*size), marks=pytest.mark.full)
        for size in (LARGE, MANY, WIDE, NARROW)
    ),
    pytest.param(8, _seeded, LARGE, AdamW(0.1), id="8 ranks, AdamW", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "made", "size", "optimizer"), CASES)
def test_a_rank_builds_what_it_could_not_hold_whole(
    world: int, made: Callable[..., nn.Module], size: tuple[int, int], optimizer: AdamW | SGD
) -> None:
    config = EngineConfig(Zero(3, 1_000_000), optimizer)
    assert len(set(run_ranks(world, _build, made, size, config))) == 1
