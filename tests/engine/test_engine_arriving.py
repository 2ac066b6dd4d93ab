"""Updated parameters that arrive during the next forward: later, never other ones, and never read too early."""

from __future__ import annotations

import contextlib
import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import MODELS, batches, digest, train, whole_state
from engine_ranks import run_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

from launcher.contract.errors import UsageError
from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.comm import HostComm, Pending, connect, gather_bytes
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine

WORLD = 3


def _engine(name: str, overlap: bool | None, stage: int = 2, **more: Any) -> ZeroEngine:
    settings = EngineConfig(Zero(stage, 1000, overlap_gather=overlap), AdamW(lr=1e-2, weight_decay=0.1, clip=0.5))
    return ZeroEngine(MODELS[name][0](), settings, **more)


def _same_bits(rank: int, world: int) -> None:
    for name, stage, choice in [("gpt", 1, None), ("gpt", 2, torch.optim.RMSprop), ("odd", 2, None)]:
        steps = batches(4, 2 * world, MODELS[name][1])
        found = []
        for overlap in (False, True):
            engine = _engine(name, overlap, stage, optimizer=choice)
            assert (engine.arriving is not None) == overlap
            found.append((train(engine, steps), digest(whole_state(engine)), engine.comm.traffic.volume_elements))
        assert found[0] == found[1], name


def test_not_a_bit_and_not_a_message_differs() -> None:
    run_ranks(WORLD, _same_bits)


def _in_time(rank: int, world: int) -> None:
    engine = _engine("gpt", None)
    steps = batches(3, world, MODELS["gpt"][1])
    train(engine, steps[:1])
    roots = [flat for flat in engine.units if not flat.unit.modules]
    blocks = {flat.unit.modules[0]: flat for flat in engine.units if flat.unit.modules}
    assert len(blocks) == 2 and len(roots) == 2
    seen: list[tuple[str, list[str]]] = []

    def look(name: str) -> Any:
        return lambda *_: seen.append((name, [flat.unit.name for flat in engine.units if flat.under_way]))

    for name in ("embedding", *blocks):
        engine.model.get_submodule(name).register_forward_pre_hook(look(name))
    assert all(flat.under_way for flat in engine.units), "step() returned before they were there"
    train(engine, steps[1:2])
    first, second = blocks.values()
    # A block is waited for by its own forward: what comes after it is still on its way.
    assert seen == [
        ("embedding", [first.unit.name, second.unit.name]),
        (first.unit.modules[0], [second.unit.name]),
        (second.unit.modules[0], []),
    ]
    engine.model.get_submodule("position")(torch.arange(2))  # by hand, past the model's forward
    assert not any(flat.under_way for flat in roots) and first.under_way


def test_each_unit_is_waited_for_where_it_is_used() -> None:
    run_ranks(2, _in_time)


def _handed_out(rank: int, world: int, folder: str) -> None:
    batch = batches(4, world, MODELS["gpt"][1])
    plain, late = _engine("gpt", False), _engine("gpt", True)
    for engine in (plain, late):
        train(engine, batch[:2])
    expected = whole_state(plain)
    assert digest(dict(late.model.state_dict())) == digest(dict(plain.model.state_dict()))
    late.finish_gathering()
    assert not any(flat.under_way for flat in late.units)
    train(late, batch[2:3])
    train(plain, batch[2:3])
    late.save(Path(folder), 3)
    train(late, batch[3:])
    late.load(Path(folder), 3)  # messages of the step before must not arrive in what was loaded
    assert digest(whole_state(late)) == digest(whole_state(plain)) != digest(expected)
    train(late, batch[3:])
    train(plain, batch[3:])
    late.finish_gathering()
    assert digest({n: p.detach() for n, p in late.model.named_parameters()}) == digest(whole_state(plain))


def test_what_is_handed_out_is_whole(tmp_path: Path) -> None:
    run_ranks(2, _handed_out, str(tmp_path))


def _profiled(rank: int, world: int) -> None:
    engine = _engine("gpt", True, comm=connect(same_host="send"))
    for number in range(12):
        with profile(activities=[ProfilerActivity.CPU]):
            train(engine, batches(1, world, MODELS["gpt"][1], seed=number))
            assert not any(flat.under_way for flat in engine.units)
    train(engine, batches(1, world, MODELS["gpt"][1]))
    assert all(flat.under_way for flat in engine.units)


def test_no_message_outlives_torchs_profiler() -> None:
    run_ranks(2, _profiled)


class _Noted(nn.Module):
    """Counts what a batch had; every rank's first is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _with_buffers(rank: int, world: int) -> list[tuple[float, ...]]:
    found = []
    for overlap in (False, True):
        engine = ZeroEngine(_Noted(), EngineConfig(Zero(2, 64, overlap_gather=overlap), SGD(lr=0.1, momentum=0.9)))
        losses = []
        for number in range(4):
            loss = engine.model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank)))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        found.append((*losses, *(float(b.double().sum()) for b in engine.model.buffers())))
    return found


def test_buffers_cross_the_messages_under_way() -> None:
    for plain, late in run_ranks(2, _with_buffers):
        assert plain == late


@pytest.mark.parametrize("stage", [0, 3])
def test_there_is_nothing_to_overlap_at_other_stages(stage: int) -> None:
    with pytest.raises(UsageError, match=f"goes with stages 1 and 2, not with {stage}"):
        EngineConfig(Zero(stage, overlap_gather=True), SGD(lr=0.1, momentum=0.0))
    model = MODELS["gpt"][0]()
    assert ZeroEngine(model, EngineConfig(Zero(stage), SGD(lr=0.1, momentum=0.0))).arriving is None


def _one_reads(rank: int, world: int, profiled: bool) -> None:
    """Rank 0 alone reads, or is profiled, and then all meet by a message that is not the engine's."""
    comm = connect(dist.new_group(timeout=datetime.timedelta(seconds=20)))
    assert isinstance(comm, HostComm)
    engine = _engine("gpt", True, 1, comm=comm)
    gather = comm.gather
    if rank == 0:  # its parameters are ready later than the other's, who cannot read them while they are made

        def late(flat: torch.Tensor, what: str) -> Pending:
            time.sleep(0.02)
            return gather(flat, what)

        comm.gather = late  # type: ignore[method-assign]
    for batch in batches(2, 2 * world, 37):
        mine = batch[2 * rank : 2 * rank + 2]
        engine.backward(engine.model(mine[:, :-1], mine[:, 1:]))
        with profile(activities=[ProfilerActivity.CPU]) if profiled and rank == 0 else contextlib.nullcontext():
            engine.step()
        if rank == 0 and not profiled:
            found = digest(engine.model.state_dict())
        dist.barrier()
        if not profiled:
            assert rank or found == digest(engine.model.state_dict())
        engine.finish_gathering()
        assert len(set(gather_bytes(comm, digest(whole_state(engine)).encode(), "digests"))) == 1


@pytest.mark.parametrize("profiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_one_rank_may_read_while_the_others_are_elsewhere(profiled: bool) -> None:
    run_ranks(2, _one_reads, profiled)
