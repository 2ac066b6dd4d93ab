"""The reference GPT: pre-norm, learned positions, tied embedding, ``scaled_dot_product_attention``.

Names and shapes are those of ``contract.partition.gpt_parameters``: planner and engine count alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..contract.train import GPT as GPTConfig


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) → the same."""
        batch, seq, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, hidden))
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: Tensor = x + self.drop(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    """``forward(tokens)``: (batch, seq) → logits (batch, seq, vocab); with ``targets`` the mean loss."""

    zero_kept = ("embedding.weight",)  # the head uses it too, after the embedding has
    zero_read_by_forward = True  # nothing else reads parameters: those of a step may arrive during the next forward

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.hidden % config.heads:
            raise ValueError(f"model.hidden {config.hidden} does not divide by model.heads {config.heads}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.seq_len, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.init_weights()

    def init_weights(self) -> None:
        """Normal 0.02, projections into the residual stream narrower by √(2·layers); in module order."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                into_residual = name.endswith(("attention.out", "mlp.down"))
                scale = 0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02
                nn.init.normal_(module.weight, std=scale)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))
