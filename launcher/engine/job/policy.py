"""What the loop asks of an engine: six verbs. ZeRO is one that answers; others stand beside it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...contract import partition
from ...contract.errors import UsageError
from ...contract.manifest import Manifest
from ...contract.train import TrainConfig
from ..comm import Comm
from ..ranks import Ranks
from ..saving import checkpoint
from ..saving.background import Background
from ..zero import StepInfo, ZeroEngine


class Policy(Protocol):
    """One way to train a model on a group of ranks. ``lr`` is set by the loop before each step."""

    model: nn.Module
    ranks: Ranks
    comm: Comm  # over data-parallel ranks: ``ranks.data``
    device: torch.device
    lr: float

    @property
    def skipped(self) -> int:
        """Steps whose update was left out, counted over all attempts."""

    def backward(self, loss: Tensor) -> None: ...

    def step(self) -> StepInfo: ...

    def save(self, folder: Path, step: int, about: checkpoint.About) -> None: ...

    def saves_in_background(self) -> Background:
        """What saves while training goes on; its copy is there from the first call on."""

    def load(self, folder: Path, step: int) -> Manifest: ...

    def load_weights(self, path: Path) -> int:
        """Begins with the parameters in a folder of safetensors; returns the bytes that this rank read."""

    def memory(self) -> Mapping[str, int]: ...

    def parameters(self) -> int:
        """Ψ: elements of all parameters, tied ones once."""


class ZeroPolicy:
    """Our engine."""

    def __init__(
        self, factory: Callable[[], nn.Module], config: TrainConfig, device: torch.device, ranks: Ranks
    ) -> None:
        model = factory if _may_be_too_large(config) else factory().to(device)
        self.engine = ZeroEngine(model, config, device=device, ranks=ranks)
        self.model = self.engine.model
        self.ranks = ranks
        self.comm = self.engine.comm
        self.device = self.engine.device
        self.backward = self.engine.backward
        self.step = self.engine.step
        self.memory = self.engine.memory
        self.saves_in_background = self.engine.saves_in_background

    @property
    def lr(self) -> float:
        return self.engine.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.engine.lr = value

    @property
    def skipped(self) -> int:
        return self.engine.skipped

    def save(self, folder: Path, step: int, about: checkpoint.About) -> None:
        checkpoint.save(self.engine, folder, step, about)

    def load(self, folder: Path, step: int) -> Manifest:
        return checkpoint.load(self.engine, folder, step)

    def load_weights(self, path: Path) -> int:
        return self.engine.load_weights(path)

    def parameters(self) -> int:
        return self.engine.layout.psi


def _may_be_too_large(config: TrainConfig) -> bool:
    """Whether no rank should hold the whole model, even while it is built: deferring costs a second of start."""
    if config.zero.stage < 3:
        return False
    if config.gpt is None:
        return True
    gpt = config.gpt
    units = partition.gpt_parameters(gpt.layers, gpt.hidden, gpt.seq_len, gpt.vocab)
    return sum(p.numel for _, row in units for p in row) > 50_000_000


_POLICIES: dict[str, Any] = {"zero": ZeroPolicy}


def wrap(factory: Callable[[], nn.Module], config: TrainConfig, device: torch.device, ranks: Ranks) -> Policy:
    """The factory's model, trained on ``device`` among ``ranks`` by the policy that ``config`` names."""
    if config.policy not in _POLICIES:
        raise UsageError(f"policy {config.policy!r} is not known; known: {', '.join(_POLICIES)}")
    policy: Policy = _POLICIES[config.policy](factory, config, device, ranks)
    return policy
