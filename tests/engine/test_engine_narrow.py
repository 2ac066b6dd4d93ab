"""16 bits × SGD × tensor ranks: close to undistributed fp32, equal among the stages, exact in memory."""

from __future__ import annotations

import pytest
import torch
from engine_models import batches, digest
from engine_ranks import run_ranks
from torch import Tensor

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import SGD, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import joined, split_of
from launcher.engine.zero import ZeroEngine

CONFIG = GPTConfig(layers=1, hidden=8, heads=2, seq_len=7, vocab=19)
OPTIMIZERS = {
    "sgd": SGD(0.5, 0.0, weight_decay=0.01, clip=0.5),
    "momentum": SGD(0.2, 0.9, nesterov=True, weight_decay=0.01, clip=0.5),
}


def _undistributed(steps: list[Tensor], config: SGD) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    model = GPT(CONFIG)
    sgd = torch.optim.SGD(
        model.parameters(), config.lr, config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
    )
    losses = []
    for batch in steps:
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        sgd.step()
        sgd.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def _whole(engine: ZeroEngine) -> dict[str, Tensor]:
    with engine.gathered():
        return {
            name: p.detach().clone() if split is None else joined(p, split, engine.ranks.tensor)
            for name, p in engine.model.named_parameters()
            for split in [split_of(p)]
        }


def _run(rank: int, world: int, tensor: int, precision: str, optimizer: str) -> None:
    ranks = Ranks.connect(tensor)
    config = OPTIMIZERS[optimizer]
    steps = batches(4, 4, 19)
    losses, expected = _undistributed(steps, config)
    bits = set()
    for stage in range(4):
        torch.manual_seed(3)
        model = GPT(CONFIG) if tensor == 1 else TensorGPT(CONFIG, ranks.tensor)
        engine = ZeroEngine(model, EngineConfig(Zero(stage, 500), config, precision=precision), ranks=ranks)
        history = []
        for number, batch in enumerate(steps):
            mine = batch.chunk(ranks.data.size)[ranks.data.rank]
            loss = engine.model(mine[:, :-1], mine[:, 1:])
            engine.backward(loss)
            assert not engine.step().skipped, "the loss scale is small enough from the start"
            mean = float(ranks.data.gather_small(loss.detach().double().view(1), "loss").mean())
            assert mean == pytest.approx(losses[number], rel=2e-2), (stage, number)
            history.append(mean)
        found = _whole(engine)
        mine, theirs = (torch.cat([state[name].float().view(-1) for name in expected]) for state in (found, expected))
        assert float((mine - theirs).norm() / theirs.norm()) < 2e-2, stage
        memory = engine.memory()
        assert tuple(memory[k] for k in ("parameters", "gradients", "optimizer")) == tuple(engine.state_bytes())
        bits.add((tuple(history), digest(found)))
    assert len(bits) == 1, "the stages have the same bits"


@pytest.mark.parametrize(
    ("world", "tensor", "precision", "optimizer"),
    [
        (2, 2, "fp16", "sgd"),
        *(
            pytest.param(world, tensor, precision, optimizer, marks=pytest.mark.full)
            for world, tensor in ((2, 1), (4, 2))
            for precision in ("bf16", "fp16")
            for optimizer in OPTIMIZERS
        ),
    ],
)
def test_sgd_in_16_bits(world: int, tensor: int, precision: str, optimizer: str) -> None:
    run_ranks(world, _run, tensor, precision, optimizer)
