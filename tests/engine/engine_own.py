"""A model that knows nothing of zerun, as a job ships one, and how its layers are cut. Needs torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PLAN = {
    "layers.*.qkv": "column/3",
    "layers.*.out": "row",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "words": "vocabulary",
    "head": "vocabulary",
}


class Layer(nn.Module):
    """Attention and MLP with sizes taken from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, -1, 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        changed: Tensor = x + self.drop(self.down(torch.relu(self.up(x))))
        return changed


class Own(nn.Module):
    """The head is tied to the table of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss of (words, next words)."""
    words, targets = batch
    return nn.functional.cross_entropy(model(words).flatten(0, 1), targets.reshape(-1))
