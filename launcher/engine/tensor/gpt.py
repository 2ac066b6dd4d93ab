"""The reference GPT over tensor-parallel layers: the same names and first values as ``engine.gpt``.

Attention is split by heads, the MLP by its inner width, embedding and loss by vocabulary; norms, positions
and the biases of the projections back are whole on every rank of the tensor group. Modules are built in
the order of the undivided model and draw the same random numbers; each weight is whole for a moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...contract.errors import UsageError
from ...contract.train import GPT as GPTConfig
from ..comm import Comm
from ..gpt import GPT, MLP, Attention, Block
from .layers import (
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    cut,
    into,
    own_randomness,
    side_by_side,
    split_of,
    vocabulary_cross_entropy,
)


class TensorAttention(Attention):
    """The heads of this rank."""

    def __init__(self, config: GPTConfig, comm: Comm) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        self.heads = config.heads // comm.size
        self.dropout = config.dropout
        self.qkv = ColumnLinear(nn.Linear(config.hidden, 3 * config.hidden), comm, parts=3)  # type: ignore[assignment]
        self.out = RowLinear(nn.Linear(config.hidden, config.hidden), comm)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) → the same."""
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        with own_randomness(self.comm, x.device, active=dropout > 0):
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        return out


class TensorMLP(MLP):
    """This rank's part of the inner width."""

    def __init__(self, config: GPTConfig, comm: Comm) -> None:
        nn.Module.__init__(self)
        self.up = ColumnLinear(nn.Linear(config.hidden, 4 * config.hidden), comm)  # type: ignore[assignment]
        self.down = RowLinear(nn.Linear(4 * config.hidden, config.hidden), comm)  # type: ignore[assignment]


class TensorBlock(Block):
    def __init__(self, config: GPTConfig, comm: Comm) -> None:
        nn.Module.__init__(self)
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = TensorAttention(config, comm)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = TensorMLP(config, comm)
        self.drop = nn.Dropout(config.dropout)


class TensorGPT(GPT):
    """``GPT(config)``, cut over the ranks of ``comm``. Raises :class:`UsageError` where it does not divide."""

    def __init__(self, config: GPTConfig, comm: Comm) -> None:
        nn.Module.__init__(self)
        if config.hidden % config.heads:
            raise ValueError(f"model.hidden {config.hidden} does not divide by model.heads {config.heads}")
        if config.heads % comm.size:
            raise UsageError(f"parallel.tensor: {comm.size} does not divide model.heads {config.heads}")
        self.config, self.comm = config, comm
        self.embedding = VocabularyEmbedding(  # type: ignore[assignment]
            nn.Embedding(config.vocab, config.hidden), comm
        )
        self.position = nn.Embedding(config.seq_len, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TensorBlock(config, comm) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """``GPT.init_weights``, number for number: each weight is drawn whole, cut and dropped."""
        for name, module in self.named_modules():
            if isinstance(module, (ColumnLinear, RowLinear, VocabularyEmbedding, nn.Embedding)):
                into_residual = name.endswith(("attention.out", "mlp.down"))
                scale = 0.02 / math.sqrt(2 * self.config.layers) if into_residual else 0.02
                split = split_of(module.weight)
                if split is None:
                    nn.init.normal_(module.weight, std=scale)
                else:
                    whole = torch.empty(split.shape, dtype=module.weight.dtype, device=module.weight.device)
                    module.weight.copy_(cut(nn.init.normal_(whole, std=scale), split, self.comm))
            if isinstance(module, (ColumnLinear, RowLinear)):
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        x = into(self.norm(x), self.comm, "gradient of the head")
        logits = functional.linear(x, self.embedding.weight)
        if targets is None:
            return side_by_side(logits, self.comm, self.config.vocab)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return vocabulary_cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.reshape(-1), self.comm, self.config.vocab
        )
