"""A Hugging Face Llama with random weights, for jobs/examples/hf.yaml. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def make(size: str = "tiny", seq_len: int = 64) -> nn.Module:
    """A decoder with rotary positions and the embedding tied to the head; made where the engine makes models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = {
        "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4},
        "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
    }
    config = LlamaConfig(
        **shapes[size], vocab_size=256, max_position_embeddings=seq_len, tie_word_embeddings=True, use_cache=False
    )
    model = LlamaForCausalLM(config)
    # In 16 bits a table of angles loses what far positions need; Hugging Face keeps it in fp32 too.
    model.zero_keep_dtype = ("model.rotary_emb.inv_freq",)
    return model


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of a batch of token files: inputs and targets, each (micro, seq_len), targets one token further."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def stream(split: str, start_sample: int, seq_len: int = 64, period: int = 7, **_: Any) -> Iterator[dict[str, Tensor]]:
    """Samples for a model that makes its own loss of them: ``data: {factory: jobs.examples.llama:stream}`` instead of
    tokens, and no ``loss``. A sample is a function of its number, so that a resume goes on where it stopped."""
    number = start_sample
    while True:
        begin = (number * 31 + (0 if split == "train" else 5)) % 256
        tokens = (begin + torch.arange(seq_len) % period * 3) % 256
        yield {"input_ids": tokens, "labels": tokens}
        number += 1
