"""Small models with sizes that divide nothing, and the undistributed run that they are held against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.model.groups import Groups
from launcher.engine.zero import ZeroEngine

TINY = GPTConfig(layers=2, hidden=15, heads=3, seq_len=7, vocab=37)


class Odd(nn.Module):
    """Tied, frozen, unused, used twice, a scalar, an empty list of buffers: what engines stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(13, 9)
        self.layers = nn.ModuleList([nn.Linear(9, 11), nn.Linear(11, 9), nn.Linear(9, 9)])
        self.layers[1].requires_grad_(False)  # frozen in the middle: gradients pass through
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(9, 13, bias=True)
        self.head.weight = self.table.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, 9))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens) + self.shift
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        for _ in range(2):
            x = x + self.scale * torch.tanh(self.layers[2](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Normed(nn.Module):
    """Buffers of three kinds: a BatchNorm's statistics and count, a frozen one's, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2)])
        self.still = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 17, bias=False)
        self.register_buffer("mask", torch.arange(6) != 2)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens).flatten(0, 1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return nn.functional.cross_entropy(self.head(self.still(x) * self.mask), targets.flatten())


def gpt() -> nn.Module:
    torch.manual_seed(3)
    return GPT(TINY)


def odd() -> nn.Module:
    torch.manual_seed(4)
    return Odd()


def normed() -> nn.Module:
    torch.manual_seed(5)
    return Normed()


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {"gpt": (gpt, 37), "odd": (odd, 13), "normed": (normed, 17)}

ODD_GROUPS: Groups = [{"match": ["*.bias", "scale"], "weight_decay": 0.0}, {"match": ["table.*"], "lr": 3e-2}]
CASES: dict[str, tuple[str, Groups, dict[str, str]]] = {
    "gpt": ("gpt", None, {}),
    "odd": ("odd", None, {}),
    "normed": ("normed", None, {}),
    "grouped": ("odd", ODD_GROUPS, {}),
    "narrow": ("odd", ODD_GROUPS, {"precision": "bf16"}),
    "narrow sums": ("gpt", [{"match": ["*.bias"]}], {"precision": "bf16", "gradients": "bf16"}),
}
"""What memory and messages are held against: a model, groups, and settings of precision."""


def batches(steps: int, size: int, vocab: int, length: int = 7, seed: int = 9) -> list[Tensor]:
    """Whole global batches of tokens, (size, length + 1) each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (size, length + 1), generator=generator) for _ in range(steps)]


def undistributed(
    name: str,
    steps: Sequence[Tensor],
    optimizer: AdamW,
    dtype: torch.dtype,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Plain PyTorch on the whole batch: the loss and all parameters after every step."""
    model = MODELS[name][0]().to(dtype)
    trainable = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(
        groups(model) if groups else trainable,
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
    )
    losses, states = [], []
    for batch in steps:
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if optimizer.clip is not None:
            torch.nn.utils.clip_grad_norm_(trainable, optimizer.clip)
        adam.step()
        adam.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        states.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return losses, states


def engine_of(
    name: str,
    *,
    stage: int,
    bucket: int = 25_000_000,
    accumulation: int = 1,
    optimizer: AdamW | SGD | None = None,
    choice: Any = None,
    reduce_every: str | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> ZeroEngine:
    config = EngineConfig(
        zero=Zero(stage, bucket, reduce_every=reduce_every),
        optimizer=optimizer or AdamW(lr=1e-2, weight_decay=0.1, clip=0.5),
        accumulation=accumulation,
    )
    return ZeroEngine(MODELS[name][0]().to(dtype), config, optimizer=choice, **more)


def train(engine: ZeroEngine, steps: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Trains on this rank's rows of every global batch; (mean loss over all ranks, norm) a step."""
    rank, world, accumulation = engine.comm.rank, engine.comm.size, engine.config.accumulation
    history = []
    for batch in steps:
        micro = batch.shape[0] // (world * accumulation)
        total = 0.0
        for number in range(accumulation):
            first = (number * world + rank) * micro
            mine = batch[first : first + micro]
            loss = engine.model(mine[:, :-1], mine[:, 1:])
            engine.backward(loss)
            total += float(loss.detach()) / accumulation
        info = engine.step()
        losses = engine.comm.gather_small(torch.tensor([total], dtype=torch.float64), "loss")
        history.append((float(losses.mean()), info.grad_norm))
    return history


def whole_state(engine: ZeroEngine) -> dict[str, Tensor]:
    """Every parameter, whole, by name."""
    with engine.gathered():
        return {n: p.detach().clone() for n, p in engine.model.named_parameters()}


def digest(state: Mapping[str, Tensor]) -> str:
    """A hash of all bits."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / (scale or 1.0)


def rank_after_rank(
    model: nn.Module,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
    steps: Sequence[Tensor],
    parts: int,
    optimizer: AdamW,
) -> tuple[list[float], list[float], list[dict[str, Tensor]]]:
    """Plain PyTorch, one data rank's rows after the other's with that rank's dropout: losses, norms, parameters of
    every step. ``loss_of`` is given the model, inputs and targets."""
    adam = torch.optim.AdamW(
        model.parameters(), optimizer.lr, optimizer.betas, optimizer.eps, weight_decay=optimizer.weight_decay
    )
    assert optimizer.clip is not None
    losses, norms, states = [], [], []
    for step, batch in enumerate(steps):
        total = 0.0
        for rank, rows in enumerate(batch.chunk(parts)):
            torch.manual_seed(1000 * step + rank)
            loss = loss_of(model, rows[:, :-1], rows[:, 1:]) / parts
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip)))
        adam.step()
        adam.zero_grad()
        losses.append(total)
        states.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return losses, norms, states
