"""The reference model is what the planner counts, and what the partition names."""

from __future__ import annotations

import torch

from launcher.contract import partition
from launcher.contract.train import GPT as GPTConfig
from launcher.engine.gpt import GPT
from launcher.engine.model.units import describe


def test_names_shapes_and_units_are_the_partitions() -> None:
    config = GPTConfig(layers=3, hidden=12, heads=3, seq_len=9, vocab=31)
    expected = partition.build(
        partition.gpt_parameters(3, 12, 9, 31),
        ranks=3,
        bucket_bytes=1000,
        modules={f"blocks.{i}": (f"blocks.{i}",) for i in range(3)},
    )
    found = describe(GPT(config), ranks=3, bucket_bytes=1000).layout
    assert found == expected
    assert found.numel == 12 * 3 * 12**2 + 13 * 3 * 12 + (31 + 9) * 12 + 2 * 12


def test_initial_weights_follow_the_seed_and_the_loss_starts_at_chance() -> None:
    config = GPTConfig(layers=2, hidden=32, heads=4, seq_len=16, vocab=64)
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(GPT(config))
    a, b, c = (torch.cat([p.detach().view(-1) for p in m.parameters()]) for m in models)
    assert torch.equal(a, b) and not torch.equal(a, c)
    tokens = torch.randint(0, 64, (8, 17))
    loss = models[0](tokens[:, :-1], tokens[:, 1:])
    assert abs(float(loss.detach()) - torch.log(torch.tensor(64.0)).item()) < 0.1


def test_it_looks_at_the_past_alone() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, hidden=16, heads=2, seq_len=8, vocab=11))
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    first, second = model(tokens), model(changed)
    assert torch.equal(first[0, :5], second[0, :5])
    assert not torch.allclose(first[0, 5:], second[0, 5:])
