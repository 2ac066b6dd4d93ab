"""The one place where collectives live is handed in: late, it changes no bit; failed, all ranks end and say where."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engine_faults import Cut, Late
from engine_models import MODELS, batches, digest, train, whole_state
from engine_ranks import impatient, moved_on, outcomes, run_ranks, stand_still

from launcher.contract.train import AdamW, Zero
from launcher.engine.comm import Comm, CommError, HostComm, absent, connect
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine


def _engine(stage: int, comm: Comm, same_host: str = "read", **zero: Any) -> ZeroEngine:
    settings = Zero(stage, bucket_bytes=4000, reduce_every="micro_step", same_host=same_host, **zero)
    return ZeroEngine(MODELS["gpt"][0](), EngineConfig(settings, AdamW(1e-2, clip=0.5), accumulation=2), comm=comm)


def _late(rank: int, world: int, same_host: str, seeds: int) -> None:
    steps = batches(2, 2 * world, 37)
    in_time = _engine(1, connect(same_host=same_host), same_host)
    expected = [train(in_time, steps), digest(whole_state(in_time))]
    for stage in range(4):
        for seed in range(seeds):
            late = Late(connect(same_host=same_host), seed)
            engine = _engine(stage, late, same_host)
            assert [train(engine, steps), digest(whole_state(engine))] == expected, (stage, seed)
            assert late.delays > 50


@pytest.mark.parametrize(("world", "seeds"), [(2, 1), pytest.param(3, 3, marks=pytest.mark.full)])
@pytest.mark.parametrize("same_host", ["read", "send"])
def test_messages_that_come_late_change_no_bit(world: int, same_host: str, seeds: int) -> None:
    run_ranks(world, _late, same_host, seeds)


def _cut(
    rank: int, world: int, folder: str, same_host: str, stage: int, number: int
) -> tuple[str, list[str], list[str], float]:
    """What the rank was told, what it had begun and not waited for then, all that it had begun, and when."""
    absent.WITHIN_S = 2.5  # the others fail at about the same time
    # A message from rank to rank has the time that its group was made with.
    timeout = datetime.timedelta(seconds=120 if same_host == "read" else 4)
    inner = connect(dist.new_group(timeout=timeout), same_host=same_host)
    comm = Cut(inner, number)
    engine = _engine(stage, comm, same_host)
    steps = batches(3, 2 * world, 37)
    train(engine, steps[:1])
    engine.comm.gather_small(steps[0], "together")
    comm.armed, comm.counts = rank == 1, True
    if isinstance(inner, HostComm):
        impatient(inner, 1)
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        train(engine, steps[1:])
    took_s = time.monotonic() - started
    if rank == 1:
        stand_still(folder, 0, 2)
    moved_on(folder, rank)
    return str(caught.value), comm.unfinished(), comm.begun, took_s


# Of a step of two micro-steps: a first message, one in the middle of backward, the norm's, one near the end.
CUTS = [
    pytest.param("read", 2, 0, marks=pytest.mark.full),
    ("read", 3, 17),
    pytest.param("send", 3, 17, marks=pytest.mark.full),
    *(
        pytest.param(kind, stage, n, marks=pytest.mark.full)
        for kind in ("read", "send")
        for stage in (1, 3)
        for n in (1, 9, 40)
    ),
]


@pytest.mark.parametrize(("same_host", "stage", "number"), CUTS)
def test_a_message_that_fails_on_one_rank_ends_all_and_is_named(
    tmp_path: Path, same_host: str, stage: int, number: int
) -> None:
    found = outcomes(3, _cut, str(tmp_path), same_host, stage, number)
    assert all(ok for ok, _ in found), found
    told, unfinished, begun, _ = found[1][1]
    assert len(begun) == number + 1 and told == f"rank 1: {begun[-1]}: the cable is cut"
    for rank in (0, 2):
        message, _, own, took_s = found[rank][1]
        name, whom = message.removeprefix(f"rank {rank}: ").split(": ", 1)
        assert own[: number + 1] == begun, "all ranks begin the same"
        # One that rank 1 never began, or had under way when it stood still.
        assert name in {*unfinished, *own[number:]}, (name, unfinished)
        assert whom.startswith("rank 1 did not take part"), message
        assert took_s < 20


def _broke(rank: int, world: int, same_host: str) -> str:
    """Rank 1 fails first, and ends; so the others fail, and say so to each other, before they end."""
    comm = Cut(connect(dist.new_group(timeout=datetime.timedelta(seconds=20)), same_host=same_host), 9)
    engine = _engine(1, comm, same_host)
    comm.counts, comm.armed, comm.theirs = True, rank == 1, True
    with pytest.raises(CommError) as caught:
        train(engine, batches(1, 2 * world, 37))
    if rank == 1:
        raise caught.value
    return f"{comm.begun[9] if len(comm.begun) > 9 else ''}|{caught.value}"


@pytest.mark.parametrize("same_host", ["read", pytest.param("send", marks=pytest.mark.full)])
def test_where_all_fail_the_first_is_named(same_host: str) -> None:
    found = outcomes(3, _broke, same_host)
    assert not found[1][0] and "the cable is cut" in found[1][1]
    for rank in (0, 2):
        ok, told = found[rank]
        assert ok, told
        name, message = told.split("|", 1)
        assert f"rank 1 failed before, at: {name or 'sum'}" in message, told
