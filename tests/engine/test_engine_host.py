"""Ranks of one host that read each other's memory: how they meet, what they compute, how they fail, what they leave."""

from __future__ import annotations

import ctypes
import datetime
import errno
import gc
import os
import signal
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import MODELS, batches, digest, engine_of, train, whole_state
from engine_ranks import impatient, moved_on, outcomes, run_ranks, stand_still
from torch import Tensor

from launcher.contract.train import AdamW, Zero
from launcher.engine.comm import Comm, CommError, HostComm, PeerComm, absent, connect, host, neighbours
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine

SECOND = datetime.timedelta(seconds=1)


def _host(timeout_s: float = 30.0) -> HostComm:
    comm = connect(dist.new_group(timeout=timeout_s * SECOND))
    assert isinstance(comm, HostComm)
    return comm


def _flat(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


# --- meeting --------------------------------------------------------------------------------------------


def _other_namespace() -> None:
    """This rank's new sockets are in a network of their own; those that gloo has stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x40000000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNET


def _refused(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


def _meets(rank: int, world: int, why: str) -> str:
    neighbours._PATIENCE_S = 60.0
    if rank == 1:
        if why == "network":
            _other_namespace()
        elif why == "no call":
            neighbours._READ = None
        elif why == "refused":
            neighbours._READ = _refused
        else:
            neighbours._host = lambda: b"another"  # type: ignore[assignment]
    started = time.monotonic()
    engine = engine_of("odd", stage=2)
    assert type(engine.comm) is PeerComm
    assert time.monotonic() - started < 40, "nobody waits for whom it cannot meet"
    train(engine, batches(2, 6, 13))
    return digest(whole_state(engine))


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace of one's own needs root")


@pytest.mark.parametrize(
    "why",
    [
        pytest.param("network", marks=AS_ROOT),
        "refused",
        pytest.param("no call", marks=pytest.mark.full),
        pytest.param("host", marks=pytest.mark.full),
    ],
)
def test_where_one_rank_cannot_all_go_by_sockets(why: str) -> None:
    assert len(set(run_ranks(3, _meets, why))) == 1


def _stranger(name: str, says: bytes) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(name)
    if says:
        stranger.send(says)
    return stranger


def _strangers(rank: int, world: int) -> None:
    """They come before the others: one says nothing, one what is too short, one guesses, one guesses another's rank."""
    strangers: list[socket.socket] = []
    invite = neighbours._Meeting.invite

    def invited(meeting: Any) -> bytes:
        said = invite(meeting)
        name = meeting._listener.getsockname()
        for says in (b"", b"hello", bytes(44), neighbours._HELLO.pack(b"x" * 32, world - 1, 0)):
            strangers.append(_stranger(name, says))
        strangers.pop().close()
        return said

    neighbours._Meeting.invite = invited  # type: ignore[method-assign]
    neighbours._PATIENCE_S = 60.0
    started = time.monotonic()
    comm = _host()
    assert time.monotonic() - started < 40, "a stranger that says nothing is not waited for"
    flat = torch.zeros(world)
    flat[rank] = rank + 1
    comm.gather(flat, "a gather").wait()
    assert flat.tolist() == [1.0, 2.0, 3.0]
    for stranger in strangers:
        stranger.close()


def test_strangers_are_turned_away_and_break_no_meeting() -> None:
    run_ranks(3, _strangers)


# --- bits -----------------------------------------------------------------------------------------------


def _sums(rank: int, world: int) -> None:
    """Every kind of sum, by memory and by sockets, with pieces that divide nothing."""
    memory, sockets = _host(), connect(same_host="send")
    assert type(sockets) is PeerComm
    for piece in (1, 8, 40, 1 << 18):
        host.PIECE_BYTES = piece
        for width in (1, 7, 11):
            for dtype, wide in (
                (torch.float32, torch.float32),
                (torch.bfloat16, torch.float32),
                (torch.float16, torch.float16),
            ):
                for add in (False, True):
                    told = [_one_sum(c, width, dtype, wide, add) for c in (memory, sockets)]
                    assert torch.equal(*told), (piece, width, dtype, wide, add)
                place = [_in_place(c, width, dtype) for c in (memory, sockets)]
                assert torch.equal(*place), (piece, width, dtype)


def _one_sum(comm: Comm, width: int, dtype: torch.dtype, wide: torch.dtype, add: bool) -> Tensor:
    flat, out = _flat(comm.rank, width * comm.size, dtype), _flat(comm.rank, width, wide, seed=1)
    whole = flat.clone()
    # The least scratch that is allowed, with something behind it that must stay.
    room = comm.scratch_numel(flat.numel(), dtype, flat.device)
    scratch = torch.full((room + 5,), 3.0, dtype=dtype)
    comm.reduce(flat, out, scratch[:room], "a sum", add=add).wait()
    assert scratch[room:].tolist() == [3.0] * 5
    own = slice(comm.rank * width, (comm.rank + 1) * width)
    flat[own] = whole[own]
    assert torch.equal(flat, whole), "only the own part may be clobbered"
    return out


def _in_place(comm: Comm, width: int, dtype: torch.dtype) -> Tensor:
    flat = _flat(comm.rank, width * comm.size, dtype, seed=2)
    scratch = torch.empty(comm.scratch_numel(flat.numel(), dtype, flat.device), dtype=dtype)
    own = flat[comm.rank * width : (comm.rank + 1) * width]
    comm.reduce(flat, own, scratch, "a sum in place").wait()
    comm.gather(flat, "a gather").wait()
    comm.all_reduce(flat, "both").wait()
    return flat


@pytest.mark.parametrize("world", [3, *(pytest.param(w, marks=pytest.mark.full) for w in (2, 4))])
def test_sums_have_the_bits_of_messages(world: int) -> None:
    run_ranks(world, _sums)


def _trained(rank: int, world: int, precision: str, accumulating: tuple[str, ...]) -> None:
    host.PIECE_BYTES = 300  # a part has several pieces, the last of which is shorter
    steps = batches(2, 2 * world, 37)
    for reduce_every in accumulating:
        found = set()
        for stage in range(4):
            for same_host in ("read", "send"):
                zero = Zero(stage, bucket_bytes=2000, reduce_every=reduce_every, same_host=same_host)
                config = EngineConfig(zero, AdamW(1e-2, clip=0.5), accumulation=2, precision=precision)
                engine = ZeroEngine(MODELS["gpt"][0](), config)
                assert isinstance(engine.comm, HostComm) == (same_host == "read")
                train(engine, steps)
                found.add(digest(whole_state(engine)))
        assert len(found) == 1, (reduce_every, precision)


@pytest.mark.parametrize(
    ("world", "precision", "accumulating"),
    [
        (3, "bf16", ("micro_step",)),
        *(
            pytest.param(world, precision, ("micro_step", "step"), marks=pytest.mark.full)
            for world in (2, 3, 4)
            for precision in ("fp32", "bf16", "fp16")
        ),
    ],
)
def test_stages_have_the_bits_of_messages(world: int, precision: str, accumulating: tuple[str, ...]) -> None:
    run_ranks(world, _trained, precision, accumulating)


# --- many messages --------------------------------------------------------------------------------------


def _many(rank: int, world: int, count: int) -> None:
    """One rank begins all before it waits for any, while the others come late; then small messages, by gloo, pass
    before anybody waits."""
    comm = _host(20)
    flats = [torch.full((world,), -1.0) for _ in range(count)]
    for number, flat in enumerate(flats):
        flat[rank] = number + rank
    if rank != 1:
        time.sleep(0.5)
    pendings = [comm.gather(flat, f"gather {number}") for number, flat in enumerate(flats)]
    assert comm.gather_small(torch.tensor([rank]), "a small one")[:, 0].tolist() == list(range(world))
    for pending in reversed(pendings) if rank == 0 else pendings:
        pending.wait()
    for number, flat in enumerate(flats):
        assert flat.tolist() == [float(number + r) for r in range(world)]
    assert not comm._under_way and not comm._early


def test_thousands_of_messages_under_way_are_neither_lost_nor_waited_for() -> None:
    run_ranks(3, _many, 1500, timeout_s=60)


def _in_between(rank: int, world: int) -> None:
    """Rank 0 waits for a message while the other is in a small one of gloo, and in one that is not ours."""
    comm = _host(10)
    for number in range(2):
        flat = torch.zeros(world)
        flat[rank] = 1
        if rank == 0:
            time.sleep(0.3)  # so that the other has begun, and found nothing to read yet
        pending = comm.gather(flat, "a gather")
        if rank == 0 or number:
            pending.wait()
        comm.gather_small(torch.zeros(1), "a small one")
        pending.wait()
        assert flat.tolist() == [1.0, 1.0]


def test_who_waits_in_a_small_message_reads_meanwhile() -> None:
    run_ranks(2, _in_between)


# --- failing --------------------------------------------------------------------------------------------


def _killed(rank: int, world: int, folder: str) -> tuple[str, float]:
    comm = _host(60)
    if rank == 2:
        # Who forks (a loader's workers) leaves its sockets open in them.
        if os.fork() == 0:
            stand_still(folder, 0, 1)
            os._exit(0)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    flat = torch.zeros(3 * 100)
    pending = comm.gather(flat, "gather of unit blocks.0, bucket 0")
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        pending.wait()
    took_s = time.monotonic() - started
    moved_on(folder, rank)
    return str(caught.value), took_s


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    *found, (ok, _) = outcomes(3, _killed, str(tmp_path))
    assert not ok
    for rank, (_, told) in enumerate(found):
        message, took_s = told
        assert f"rank {rank}: gather of unit blocks.0, bucket 0: rank 2 did not take part (its process" in message
        assert took_s < 20, "far below 60 s"


def _other_message(rank: int, world: int, kind: str) -> str:
    comm = _host(10)
    numel = 300 if kind == "size" and rank == 1 else 600
    what = "gather of unit b" if kind == "name" and rank == 1 else "gather of unit a"
    with pytest.raises(CommError) as caught:
        comm.gather(torch.zeros(numel), what).wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["size", "name"])
def test_ranks_at_different_messages_are_told(kind: str) -> None:
    first, second = run_ranks(2, _other_message, kind)
    assert "rank 0: gather of unit a: rank 1 is at another message" in first
    assert f"rank 1: gather of unit {'b' if kind == 'name' else 'a'}: rank 0 is at another message" in second
    assert ("600 bytes" in first and "1,200" in first) == (kind == "size")


def _stands_still(rank: int, world: int, folder: str, count: int) -> tuple[str, float]:
    absent.WITHIN_S = 0.3
    comm = _host()
    impatient(comm, 0.6)
    if rank == 1:
        stand_still(folder, 0)
        return "", 0.0
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        pendings = [comm.gather(torch.zeros(2 * 10), f"gather {number}") for number in range(count)]
        for pending in pendings:
            pending.wait()
    took_s = time.monotonic() - started
    moved_on(folder, rank)
    return str(caught.value), took_s


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.full), 2000])
def test_a_rank_that_stands_still_is_named_within_the_timeout(tmp_path: Path, count: int) -> None:
    (_, (message, took_s)), _ = outcomes(2, _stands_still, str(tmp_path), count)
    assert "gather 0: rank 1 did not take part (no answer in 0.6 s)" in message
    assert took_s < 20, "far below the 30 s of the group"


# --- what is left ---------------------------------------------------------------------------------------


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _nothing_grows(rank: int, world: int) -> None:
    ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one touch could make 2 MiB resident
    comm = _host()
    flat, out = torch.ones(world * 50_000), torch.empty(50_000)
    scratch = torch.empty(comm.scratch_numel(flat.numel(), flat.dtype, flat.device))

    def messages(count: int) -> None:
        for _ in range(count):
            comm.reduce(flat, out, scratch, "a sum").wait()
            comm.gather(flat, "a gather").wait()

    messages(50)
    comm.gather_small(torch.zeros(1), "together")
    before, files = _resident(), _descriptors()
    messages(200)
    assert _descriptors() == files
    assert _resident() - before < 1 << 20, "400 messages of 400 KB each"
    assert not comm._under_way and not comm._early


def _groups_go(rank: int, world: int) -> None:
    warnings.simplefilter("always")
    told: list[str] = []
    warnings.showwarning = lambda message, *_: told.append(str(message))  # type: ignore[assignment]
    group = dist.new_group()
    connect(group).gather_small(torch.zeros(1), "first")  # what torch opens for a group stays
    gc.collect()
    before = _descriptors()
    for number in range(50):
        comm = connect(group)
        flat = torch.zeros(world)
        flat[rank] = number
        pending = comm.gather(flat, f"gather {number}")
        pending.wait()
        assert flat.tolist() == [float(number)] * world
        del comm, pending
    gc.collect()
    assert _descriptors() == before
    assert not told, "sockets are closed, not left to whoever finds them"


def test_neither_messages_nor_groups_leave_anything() -> None:
    run_ranks(2, _nothing_grows)
    run_ranks(3, _groups_go)


def _still_in_a_small_one(rank: int, world: int, folder: str) -> tuple[str, float]:
    absent.WITHIN_S = 0.3
    comm = _host()
    impatient(comm, 1)
    flat = torch.zeros(world)
    if rank == 1:
        stand_still(folder, 0)
        return "", 0.0
    comm.gather(flat, "a gather")
    started = time.monotonic()
    with pytest.raises(CommError) as caught:
        comm.gather_small(flat, "end of step 7")
    took_s = time.monotonic() - started
    moved_on(folder, rank)
    return str(caught.value), took_s


@pytest.mark.full
def test_a_small_message_beside_one_under_way_has_its_timeout(tmp_path: Path) -> None:
    (_, (message, took_s)), _ = outcomes(2, _still_in_a_small_one, str(tmp_path))
    assert "rank 0: end of step 7: rank 1 did not take part" in message
    assert took_s < 20
