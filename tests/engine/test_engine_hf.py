"""A Hugging Face model under the engine: tied embedding, rotary buffers, outputs with ``.loss``, a deferred build."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from typing import Any

import pytest
import torch
from engine_job import ROOT
from engine_ranks import run_ranks
from torch.utils.data import default_collate

from launcher.engine.job.sources import default_loss
from launcher.engine.zero import ZeroEngine

STEPS = 4


def _train(rank: int, world: int) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(ROOT))
    from jobs.examples import llama

    def batch(step: int, first: int, count: int) -> Any:
        stream = llama.stream("train", step * 4, seq_len=16, period=5)
        return default_collate(list(itertools.islice(stream, first, first + count)))

    torch.manual_seed(3)
    whole = llama.make("tiny", 16)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    plain = []
    for step in range(STEPS):
        loss = whole(**batch(step, 0, 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(float(loss))
    found: dict[str, Any] = {"plain": plain}
    for stage in (2, 3):
        torch.manual_seed(3)
        zero = ZeroEngine(lambda: llama.make("tiny", 16), {"zero": {"stage": stage}, "optimizer": {"lr": 1e-2}})
        model: Any = zero.model
        rotary = model.model.rotary_emb.inv_freq
        assert rotary.device.type == "cpu" and torch.equal(rotary, whole.model.rotary_emb.inv_freq)
        losses = []
        for step in range(STEPS):
            loss = default_loss(zero.model, batch(step, rank * 4 // world, 4 // world))
            zero.backward(loss)
            zero.step()
            losses.append(float(loss.detach()))
        with zero.gathered():
            assert model.lm_head.weight is model.model.embed_tokens.weight, "still tied"
            far = max(
                float((a - b).abs().max()) for a, b in zip(whole.parameters(), zero.model.parameters(), strict=True)
            )
        found[f"stage {stage}"] = losses, far
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `hf` (make test installs it)"
)
def test_a_llama_trains_partitioned_as_it_does_whole() -> None:
    ranks = run_ranks(2, _train)
    for stage in (2, 3):
        means = [sum(losses) / 2 for losses in zip(*(r[f"stage {stage}"][0] for r in ranks), strict=True)]
        assert means == pytest.approx(ranks[0]["plain"], rel=1e-4)
        assert means[-1] < means[0]
        assert all(r[f"stage {stage}"][1] < 1e-4 for r in ranks)
