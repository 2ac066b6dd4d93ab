"""Tensor-parallel layers against the undivided ones: values, gradients, losses, randomness, messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from engine_models import batches, relative
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.errors import UsageError
from launcher.contract.train import GPT as GPTConfig
from launcher.engine.comm import connect
from launcher.engine.gpt import GPT
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import (
    all_reduce,
    cut,
    joined,
    own_randomness,
    split_of,
    vocabulary_cross_entropy,
)

SMALL = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37)  # 37: neither 2 nor 3 nor 4 divides it


def _pair(comm: Any, config: GPTConfig, dtype: torch.dtype = torch.float64) -> tuple[GPT, TensorGPT]:
    torch.manual_seed(3)
    whole = GPT(config).to(dtype)
    after = torch.rand(())
    torch.manual_seed(3)
    split = TensorGPT(config, comm).to(dtype)
    assert torch.equal(torch.rand(()), after), "the same random numbers were drawn, and no more"
    return whole, split


def _model(rank: int, world: int) -> None:
    comm = connect()
    whole, split = _pair(comm, SMALL)
    wholes = dict(whole.named_parameters())
    for name, mine in split.named_parameters():
        how = split_of(mine)
        expected = wholes[name].detach()
        assert torch.equal(mine, expected if how is None else cut(expected, how, comm)), name
        assert how is None or torch.equal(joined(mine, how, comm), expected)
    (batch,) = batches(1, 3, 37)
    loss, found = (m(batch[:, :-1], batch[:, 1:]) for m in (whole, split))
    assert relative(found.detach(), loss.detach()) < 1e-13
    assert len({float(x) for x in comm.gather_small(found.detach(), "test")}) == 1
    loss.backward()
    found.backward()
    for name, mine in split.named_parameters():
        how, expected = split_of(mine), wholes[name].grad
        assert mine.grad is not None and expected is not None
        if how is None:
            everyone = comm.gather_small(mine.grad, "test")
            assert all(torch.equal(other, mine.grad) for other in everyone), "replicas have the same bits"
            assert relative(mine.grad, expected) < 1e-11, name
        else:
            assert relative(joined(mine.grad, how, comm), expected) < 1e-11, name
            assert (
                mine.grad.numel()
                == -(-expected.shape[how.axis] // world) * expected.numel() // expected.shape[how.axis]
            )
    table = split.embedding.weight
    if rank == world - 1:
        assert not table[37 - rank * table.shape[0] :].any(), "padding is zero"
        assert table.grad is not None and not table.grad[37 - rank * table.shape[0] :].any()
    with torch.no_grad():
        assert relative(split(batch[:, :-1]), whole(batch[:, :-1])) < 1e-12


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_split_model_is_the_undivided_one(world: int) -> None:
    run_ranks(world, _model)


def _messages(rank: int, world: int) -> None:
    """Two sums a block and one for the embedding forward; two a block and one for the head backward."""
    comm = connect()
    split = TensorGPT(SMALL, comm)
    (batch,) = batches(1, 3, 37)
    stream = 3 * 7 * 16
    before = comm.traffic.volume_elements
    loss = split(batch[:, :-1], batch[:, 1:])
    assert comm.traffic.volume_elements - before == 2 * stream * (2 * SMALL.layers + 1)
    before = comm.traffic.volume_elements
    loss.backward()
    assert comm.traffic.volume_elements - before == 2 * stream * (2 * SMALL.layers + 1)


def test_messages_are_those_that_the_planner_counts() -> None:
    run_ranks(2, _messages)


def _loss(rank: int, world: int) -> None:
    """Words in all slices, padding on the last, a slice without any word, logits that would overflow."""
    comm = connect()
    for vocab, scale in ((37, 1.0), (2, 1.0), (16, 1000.0)):
        generator = torch.Generator().manual_seed(vocab)
        whole = (torch.randn(11, vocab, generator=generator, dtype=torch.float64) * scale).requires_grad_()
        targets = torch.randint(0, vocab, (11,), generator=generator)
        expected = nn.functional.cross_entropy(whole, targets)
        expected.backward()
        width = -(-vocab // world)
        padded = nn.functional.pad(whole.detach(), (0, width * world - vocab), value=7e7)
        mine = padded[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        found = vocabulary_cross_entropy(mine, targets, comm, vocab)
        found.backward()
        assert float((found - expected).detach().abs()) < 1e-12 * max(1.0, float(expected.detach()))
        assert whole.grad is not None and mine.grad is not None
        gradient = nn.functional.pad(whole.grad, (0, width * world - vocab))
        assert torch.allclose(mine.grad, gradient[:, rank * width : (rank + 1) * width], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("world", [4])
def test_loss_over_a_split_vocabulary(world: int) -> None:
    run_ranks(world, _loss)


def _random(rank: int, world: int) -> None:
    comm = connect()
    config = dataclasses.replace(SMALL, dropout=0.3)
    # Residual dropout is outside the split regions: the ranks agree, and with the undivided model.
    whole, split = _pair(comm, config)
    for model in (whole, split):
        for block in model.blocks:
            block.attention.dropout = 0.0
    (batch,) = batches(1, 3, 37)
    losses = []
    for model in (whole, split):
        torch.manual_seed(11)
        losses.append(model(batch[:, :-1], batch[:, 1:]).detach())
    assert relative(losses[1], losses[0]) < 1e-13
    # Inside, every rank draws its own numbers; after it the shared generator goes on as one.
    torch.manual_seed(11)
    with own_randomness(comm, torch.device("cpu")):
        inside = torch.rand(4)
    outside = torch.rand(4)
    everyone = comm.gather_small(torch.stack([inside, outside]), "test")
    assert len({tuple(row.tolist()) for row in everyone[:, 0]}) == world
    assert len({tuple(row.tolist()) for row in everyone[:, 1]}) == 1
    torch.manual_seed(11)
    with own_randomness(comm, torch.device("cpu")):
        assert torch.equal(torch.rand(4), inside)
    # The same heads with and without a neighbour drop other scores, but the stream stays one.
    _, split = _pair(comm, config)
    torch.manual_seed(11)
    seen: list[torch.Tensor] = []
    split.blocks[-1].register_forward_hook(lambda m, i, out: seen.append(out.detach()))
    split(batch[:, :-1], batch[:, 1:])
    stream = comm.gather_small(seen[0], "test")
    assert all(torch.equal(other, stream[0]) for other in stream)


def test_dropout_agrees_where_it_must_and_differs_where_it_should() -> None:
    run_ranks(2, _random)


def _sum(rank: int, world: int) -> None:
    comm = connect()
    for shape in ((5,), (3, 7), (8,)):
        values = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 10.0**i for i in range(world)]
        expected = values[0].clone()
        for value in values[1:]:
            expected += value
        mine = values[rank].clone()
        assert torch.equal(all_reduce(comm, mine, "test"), expected)
        assert torch.equal(mine, values[rank])


@pytest.mark.parametrize("world", [3])
def test_sums_are_in_rank_order(world: int) -> None:
    run_ranks(world, _sum)


def _groups(rank: int, world: int) -> tuple[int, ...]:
    ranks = Ranks.connect(2)
    assert (ranks.world.rank, ranks.data.rank, ranks.tensor.rank) == (rank, rank // 2, rank % 2)
    assert (ranks.world.size, ranks.data.size, ranks.tensor.size) == (world, world // 2, 2)
    for comm, members in ((ranks.data, range(rank % 2, world, 2)), (ranks.tensor, [rank // 2 * 2, rank // 2 * 2 + 1])):
        assert comm.gather_small(torch.tensor([rank]), "test")[:, 0].tolist() == list(members)
    with pytest.raises(UsageError, match=r"parallel.tensor: 4 ranks cannot form tensor groups of 3"):
        Ranks.connect(3)
    return tuple(ranks.tensor.gather_small(torch.tensor([rank]), "test")[:, 0].tolist())


def test_neighbours_form_a_tensor_group() -> None:
    assert run_ranks(4, _groups) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_heads_that_do_not_divide_are_refused() -> None:
    class Three:
        size, rank = 3, 0

    with pytest.raises(UsageError, match=r"parallel.tensor: 3 does not divide model.heads 4"):
        TensorGPT(SMALL, Three())  # type: ignore[arg-type]
