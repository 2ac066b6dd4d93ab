"""Any world size, stage and tensor degree reads any other's checkpoint: one table of cells, each of them saved once.

``make test`` loads each in a cover of four cells that has every world size, stage and degree in it; ``full`` in all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from engine_models import batches, digest, odd
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.topology import Topology
from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.comm import Alone, Comm, connect
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.ranks import Ranks
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.tensor.layers import Split, split_of
from launcher.engine.zero import ZeroEngine


class Cell(NamedTuple):
    """Where a checkpoint is written or read: ``tensor`` of ``world`` ranks hold the pieces of one layer."""

    world: int
    tensor: int
    stage: int


CELLS = [Cell(world, 1, stage) for world in (1, 2, 3, 4) for stage in range(4)]
CELLS += [Cell(world, 2, stage) for world in (2, 4) for stage in range(4)]
COVER = [Cell(1, 1, 0), Cell(3, 1, 3), Cell(2, 2, 1), Cell(4, 2, 2)]
# A model with sizes that no degree divides.
UNDIVIDED = [cell for cell in CELLS if cell.tensor == 1]
COVER_UNDIVIDED = [Cell(1, 1, 0), Cell(2, 1, 3), Cell(3, 1, 2), Cell(4, 1, 1)]


def _gpt(ranks: Ranks) -> nn.Module:
    """Split, replicated, frozen and padded parameters, and a buffer."""
    torch.manual_seed(3)
    config = GPTConfig(layers=2, hidden=16, heads=4, seq_len=7, vocab=37)
    model = TensorGPT(config, ranks.tensor) if ranks.degree > 1 else GPT(config)
    model.get_submodule("blocks.1.mlp.up").requires_grad_(False)
    model.register_buffer("shift", torch.linspace(-1, 1, 9))
    return model


def _odd(ranks: Ranks) -> nn.Module:
    """Tied, frozen, unused, used twice (``engine_models``)."""
    return odd()


# (model, vocabulary, precision, optimizer): the second has moments in full precision beside its parameters, a scale of
# the loss and scalars of the optimizer that its manifest has to carry.
KINDS: dict[str, tuple[Callable[[Ranks], nn.Module], int, str, Any]] = {
    "gpt": (_gpt, 37, "fp32", None),
    "odd": (_odd, 13, "fp16", torch.optim.NAdam),
}


def _engine(kind: str, ranks: Ranks, stage: int, bucket: int) -> ZeroEngine:
    build, _, precision, choice = KINDS[kind]
    optimizer = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5)
    config = EngineConfig(Zero(stage, bucket), optimizer, precision=precision)
    return ZeroEngine(build(ranks), config, ranks=ranks, optimizer=choice)


def _step(engine: ZeroEngine, batch: Tensor) -> float:
    """One step on this data rank's rows; the mean loss over data ranks."""
    mine = batch.chunk(engine.comm.size)[engine.comm.rank]
    loss = engine.model(mine[:, :-1], mine[:, 1:])
    engine.backward(loss)
    engine.step()
    return float(engine.comm.gather_small(loss.detach().double().view(1), "loss").mean())


def _whole(rows: Tensor, split: Split | None) -> Tensor:
    """A parameter (or a moment of one) from what each tensor rank has of it, (T, …) → (…), padding left out."""
    if split is None:
        assert all(torch.equal(row, rows[0]) for row in rows), "equal on all tensor ranks"
        return rows[0]
    stretches = []
    for number in range(split.parts):
        beside = torch.cat([row.chunk(split.parts, split.axis)[number] for row in rows], split.axis)
        stretches.append(beside.narrow(split.axis, 0, split.shape[split.axis] // split.parts))
    return torch.cat(stretches, split.axis)


def _bits(engine: ZeroEngine) -> dict[str, str]:
    """On rank 0 a hash of everything that a checkpoint holds, each kind by itself, joined over data and tensor ranks;
    elsewhere nothing. Two messages and no code of the engine's."""
    world, degree = engine.ranks.world, engine.ranks.degree
    kinds = ["parameters", *engine.optimizer.moments]
    own = [
        (flat, kind, torch.cat(flat.own_parameters() if not at else flat.own_moments(at - 1)))
        for flat in engine.units
        for at, kind in enumerate(kinds)
        if not at or flat.moments
    ]
    shards = world.gather_small(torch.cat([run.float() for _, _, run in own]), "shards of all ranks")
    with engine.gathered():  # what forward uses: in 16 bits beside the master
        used = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    working = world.gather_small(torch.cat([t.reshape(-1) for t in used.values()]), "working parameters of all ranks")
    if world.rank:
        return {}
    states: dict[str, dict[str, Tensor]] = {"working": {}, **{kind: {} for kind in kinds}}
    at = 0
    for flat, kind, run in own:
        # (data, tensor, elements of the shard) of this unit and kind
        rows = shards[:, at : at + run.numel()].view(-1, degree, run.numel())
        at += run.numel()
        for placed, tensor in zip(flat.unit.placed, flat.tensors, strict=True):
            local = torch.full((degree, tensor.numel()), float("nan"))
            for rank in range(engine.shard.size):
                for piece in flat.unit.pieces(rank):
                    if piece.parameter is placed.parameter:
                        width = piece.stop - piece.start
                        local[:, piece.start : piece.stop] = rows[rank, :, piece.offset : piece.offset + width]
            assert not bool(local.isnan().any()), f"{placed.parameter.name}: {kind}"
            states[kind][placed.parameter.name] = _whole(local.view(degree, *tensor.shape), split_of(tensor))
    at, split = 0, {name: split_of(p) for name, p in engine.model.named_parameters()}
    for name, value in used.items():
        rows = working[:, at : at + value.numel()].view(-1, degree, *value.shape)
        at += value.numel()
        assert bool((rows == rows[:1]).all()), f"{name}: equal on all data ranks"
        states["working"][name] = _whole(rows[0], split[name])
    found = {kind: digest(state) for kind, state in states.items()}
    found["buffers"] = digest(dict(engine.model.named_buffers()))
    scale = engine.loss_scale
    scalars = [engine.optimizer.updates, engine.optimizer.scalars(), scale.value, scale.good_steps]
    found["scalars"] = json.dumps(scalars)
    return found


class Saved(NamedTuple):
    """A cell's checkpoint, what is in it, the batches that follow and the losses there."""

    cell: Cell
    folder: str
    bits: dict[str, str]
    batches: list[Tensor]
    losses: list[float]


def _ranks(rank: int, made: dict[tuple[int, int], Ranks], world: int, tensor: int) -> None:
    """The first ``world`` of all ranks as if there were no others; all ranks call it."""
    topology = Topology((world,), tensor)

    def group(of: Callable[[int], Sequence[int]], *, passing: bool = False) -> Comm:
        mine: Comm = Alone()
        for members in sorted({tuple(of(r)) for r in range(world)}):
            if len(members) > 1:
                new = dist.new_group(list(members))
                if rank in members:
                    mine = connect(new, passing=passing)
        return mine

    whole = group(lambda _: range(world))
    own_tensor = group(topology.tensor_group, passing=True)
    made[world, tensor] = Ranks(whole, whole if tensor == 1 else group(topology.data_group), own_tensor)


def _save(kind: str, cell: Cell, ranks: Ranks, folder: str) -> Saved:
    """Every cell trains on data of its own, so that no two checkpoints are alike."""
    engine = _engine(kind, ranks, cell.stage, 1000)
    steps = batches(3, 12, KINDS[kind][1], seed=CELLS.index(cell))
    engine.loss_scale.value = min(engine.loss_scale.value, 1024.0)  # fp16: the first step is no overflow
    _step(engine, steps[0])
    for buffer in engine.model.buffers():
        buffer += 1.5 + cell.stage
    engine.save(folder, 7, extra={"note": "é"})
    bits = _bits(engine)
    return Saved(cell, folder, bits, steps[1:], [_step(engine, batch) for batch in steps[1:]])


def _load(kind: str, cell: Cell, ranks: Ranks, everyone: Sequence[Saved]) -> None:
    """All of them into one engine, which holds another's state whenever one is loaded."""
    engine = _engine(kind, ranks, cell.stage, 4000)
    for saved in everyone:
        said = f"{saved.cell} read by {cell}"
        assert engine.load(saved.folder) == (7, {"note": "é"})
        bits = _bits(engine)
        assert bits == (saved.bits if ranks.world.rank == 0 else {}), said
        if saved.cell.stage == cell.stage:  # of every world size and degree one: and it goes on
            losses = [_step(engine, batch) for batch in saved.batches]
            if saved.cell == cell:
                assert losses == saved.losses, said
            else:
                assert losses == pytest.approx(saved.losses, rel=1e-5 if KINDS[kind][2] == "fp32" else 2e-2), said


def _cells(rank: int, world: int, kind: str, folder: str, cells: list[Cell], readers: list[Cell]) -> int:
    """All of it in one world of processes, smaller ones made of its first ranks; returns how many loads there were."""
    made: dict[tuple[int, int], Ranks] = {}
    for size, tensor in sorted({cell[:2] for cell in (*cells, *readers)}):
        _ranks(rank, made, size, tensor)
    rows: list[Saved | None] = []
    for cell in cells:
        mine = rank < cell.world
        rows.append(_save(kind, cell, made[cell[:2]], f"{folder}/{'-'.join(map(str, cell))}") if mine else None)
    first: list[Any] = [rows]
    dist.broadcast_object_list(first, 0)
    assert len({json.dumps(row.bits) for row in first[0]}) == len(cells), "no two alike"
    for cell in readers:
        if rank < cell.world:
            _load(kind, cell, made[cell[:2]], first[0])
    dist.barrier()
    return len(first[0]) * len(readers)


def test_the_cover_has_everything_in_it() -> None:
    assert len(CELLS) == 24 and len(UNDIVIDED) == 16 and set(COVER) <= set(CELLS)
    assert {cell.tensor for cell in COVER} == {1, 2}
    for cover in (COVER, COVER_UNDIVIDED):
        assert {cell.world for cell in cover} == {1, 2, 3, 4} and {cell.stage for cell in cover} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("kind", "cells", "readers"), [("gpt", CELLS, COVER), ("odd", UNDIVIDED, COVER_UNDIVIDED)], ids=["gpt", "odd"]
)
def test_every_cell_is_read_by_a_cover_of_four(
    tmp_path: Path, kind: str, cells: list[Cell], readers: list[Cell]
) -> None:
    assert run_ranks(4, _cells, kind, str(tmp_path), cells, readers) == [4 * len(cells)] * 4


@pytest.mark.full
@pytest.mark.parametrize(("kind", "cells"), [("gpt", CELLS), ("odd", UNDIVIDED)], ids=["gpt", "odd"])
def test_every_cell_is_read_by_every_other(tmp_path: Path, kind: str, cells: list[Cell]) -> None:
    assert run_ranks(4, _cells, kind, str(tmp_path), cells, cells, timeout_s=280) == [len(cells) ** 2] * 4
