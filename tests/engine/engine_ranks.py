"""Starts real ranks for a test: processes forked from a server that has torch loaded, gloo on loopback."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    # torch._dynamo: recomputation loads it, which takes seconds a process.
    ["torch", "torch.distributed", "torch._dynamo", "launcher.engine.job.loop", "launcher.engine.zero"]
)


def _rank(rank: int, world: int, store: str, function: Callable[..., Any], args: tuple[Any, ...], pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=30),
        )
        pipe.send((rank, True, function(rank, world, *args)))
    except BaseException:
        pipe.send((rank, False, traceback.format_exc()))
        pipe.close()
        os._exit(1)  # no destructor that waits for the others
    pipe.close()
    try:
        dist.barrier()
        dist.destroy_process_group()
    except RuntimeError:
        os._exit(1)  # another rank failed and says so itself


def impatient(comm: Any, timeout_s: float) -> None:
    """Its messages are waited for so long from now on: ranks on a busy machine may be later than that to meet."""
    import torch.distributed as dist

    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), comm.group)
    if hasattr(comm, "timeout_s"):
        comm.timeout_s = timeout_s


def stand_still(folder: str, *others: int) -> None:
    """What a rank does until all of these have :func:`moved_on`; longer than any of them waits for a message."""
    end = time.monotonic() + 60
    while not all(Path(folder, f"{rank}-moved-on").exists() for rank in others) and time.monotonic() < end:
        time.sleep(0.02)


def moved_on(folder: str, rank: int) -> None:
    Path(folder, f"{rank}-moved-on").touch()


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """``function(rank, world, *args)`` on ``world`` ranks; their results in rank order.

    Raises AssertionError with the traceback of every rank that failed.
    """
    done = outcomes(world, function, *args, timeout_s=timeout_s)
    bad = [f"rank {i}: {value}" for i, (ok, value) in enumerate(done) if not ok]
    assert not bad, "\n".join(bad)
    return [value for _, value in done]


def outcomes(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[tuple[bool, Any]]:
    """Like :func:`run_ranks`, but a rank's failure is a result: (whether it succeeded, value or traceback)."""
    found: list[tuple[bool, Any]] = [(False, "no answer")] * world
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        pipes, processes = [], []
        for rank in range(world):
            receive, send = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(target=_rank, args=(rank, world, store, function, args, send))
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        deadline = time.monotonic() + timeout_s
        open_pipes = list(pipes)
        while open_pipes and time.monotonic() < deadline:
            for pipe in multiprocessing.connection.wait(open_pipes, timeout=deadline - time.monotonic()):
                try:
                    rank, ok, value = pipe.recv()  # type: ignore[union-attr]
                    found[rank] = (ok, value)
                except EOFError:
                    open_pipes.remove(pipe)  # type: ignore[arg-type]
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    return found
