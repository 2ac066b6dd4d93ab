"""The collectives: what they compute, what they count, and how they fail."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_ranks import impatient, moved_on, outcomes, run_ranks, stand_still

from launcher.engine.comm import (
    CommError,
    HostComm,
    NativeComm,
    PeerComm,
    absent,
    barrier,
    connect,
    gather_bytes,
    sum_rows,
)


def _sums(rank: int, world: int, kind: str) -> None:
    comm = {"host": connect, "peer": PeerComm, "native": NativeComm}[kind]()
    assert isinstance(comm, HostComm) == (kind == "host")
    ordered_sums = kind != "native"
    width = 37
    everyone = [torch.randn(world * width, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    ordered = everyone[0].clone()
    for other in everyone[1:]:
        ordered += other
    part = slice(rank * width, (rank + 1) * width)
    scratch = torch.empty((world - 1) * width)
    for add in (False, True):
        out = torch.full((width,), 0.5)
        comm.reduce(everyone[rank].clone(), out, scratch, "a sum", add=add).wait()
        expected = ordered[part] + 0.5 if add else ordered[part]
        if ordered_sums:
            assert torch.equal(out, expected), "sums must be in rank order, to the bit"
        else:
            torch.testing.assert_close(out, expected)
    if ordered_sums:  # into its own place
        flat = everyone[rank].clone()
        comm.reduce(flat, flat[part], scratch, "a sum in place").wait()
        assert torch.equal(flat[part], ordered[part])
    gathered = torch.zeros(world * width)
    gathered[part] = ordered[part]
    comm.gather(gathered, "a gather").wait()
    assert torch.equal(gathered, ordered)
    count = 4 if ordered_sums else 3
    assert comm.traffic.volume_elements == count * world * width
    assert comm.traffic.sent_bytes == count * (world - 1) * width * 4


@pytest.mark.parametrize("kind", ["host", "peer", "native"])
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.filterwarnings("ignore")
def test_reduce_and_gather(world: int, kind: str) -> None:
    run_ranks(world, _sums, kind)


def test_a_sum_of_rows_is_a_loop_of_adds_even_into_a_row() -> None:
    for count in (1, 2, 3, 5, 8):
        for target in (None, *range(count)):
            rows = [torch.randn(1000, generator=torch.Generator().manual_seed(i)) for i in range(count)]
            expected = rows[0].clone()
            for row in rows[1:]:
                expected = expected + row
            out = torch.empty(1000) if target is None else rows[target]
            sum_rows(rows, out)
            assert torch.equal(out, expected)


def _small(rank: int, world: int) -> None:
    comm = connect()
    assert gather_bytes(comm, b"x" * rank, "bytes") == [b"x" * r for r in range(world)]
    counts = [(rank + to) % 3 for to in range(world)]
    send = torch.cat([torch.full((n,), float(10 * rank + to)) for to, n in enumerate(counts)])
    received = comm.exchange(send, counts, [(source + rank) % 3 for source in range(world)], "an exchange")
    assert received.tolist() == [10.0 * s + rank for s in range(world) for _ in range((s + rank) % 3)]
    value = torch.tensor([float(rank)])
    comm.broadcast(value, 2, "a broadcast")
    assert value.item() == 2
    assert comm.traffic.volume_elements == 0, "small messages are counted apart"
    assert comm.traffic.control_bytes > 0


def test_small_messages() -> None:
    run_ranks(3, _small)


def _one_is_late(rank: int, world: int, folder: str) -> str:
    comm = connect(dist.new_group(timeout=datetime.timedelta(seconds=120)))
    impatient(comm, 2)
    if rank == 1:
        stand_still(folder, 0, 2)
        return ""
    flat = torch.zeros(3 * 1000)
    with pytest.raises(CommError) as caught:
        comm.reduce(flat, flat[:1000], torch.empty(2000), "sum of the gradients of unit norm, bucket 0").wait()
    moved_on(folder, rank)
    return str(caught.value)


def test_a_rank_that_never_joins_is_named_within_the_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    (_, message), *_ = outcomes(3, _one_is_late, str(tmp_path))
    assert time.monotonic() - started < 100
    assert "sum of the gradients of unit norm, bucket 0: rank 1 did not take part" in message


def _one_is_late_for_a_small_message(rank: int, world: int, folder: str, what: str) -> str:
    absent.WITHIN_S = 3.0  # the others fail at about the same time
    comm = connect(dist.new_group(timeout=datetime.timedelta(seconds=120)))
    barrier(comm, "together")
    impatient(comm, 1)
    if rank == 1:
        stand_still(folder, 0, 2)
        return ""
    with pytest.raises(CommError) as caught:
        if what == "gradient norm":
            comm.exchange(torch.ones(3), [1] * 3, [1] * 3, what)
        elif what == "end of step 7":
            comm.gather_small(torch.ones(3), what)
        else:
            comm.broadcast(torch.ones(3), 1, what)
    moved_on(folder, rank)
    return str(caught.value)


@pytest.mark.parametrize(
    "what",
    [
        "gradient norm",
        pytest.param("end of step 7", marks=pytest.mark.full),
        pytest.param("buffers", marks=pytest.mark.full),
    ],
)
def test_whoever_misses_a_small_message_is_named_by_all_others(tmp_path: Path, what: str) -> None:
    started = time.monotonic()
    (_, first), _, (_, last) = outcomes(3, _one_is_late_for_a_small_message, str(tmp_path), what)
    assert time.monotonic() - started < 100
    for rank, message in ((0, first), (2, last)):
        assert f"rank {rank}: {what}: rank 1 did not take part" in message, message


def _one_dies(rank: int, world: int) -> str:
    comm = connect()
    if rank == 2:
        os._exit(9)
    flat = torch.zeros(3 * 1000)
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        for _ in range(3):
            comm.gather(flat, "gather of unit blocks.0, bucket 0").wait()
    assert time.monotonic() - started < 20
    return str(caught.value)


def test_a_dead_rank_is_named_with_what_it_missed() -> None:
    found = outcomes(3, _one_dies)
    assert not found[2][0]
    for _, message in found[:2]:
        assert "gather of unit blocks.0, bucket 0: rank 2 did not take part" in message
