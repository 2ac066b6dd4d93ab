"""Ranks for what runs once: forked from a server that has torch loaded, one thread each, gloo on loopback."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 300


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, world, *args)`` on every rank; what each returns (JSON), in rank order. Raises SystemExit when
    one failed, which has said why on stderr."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "launcher.engine.zero"])
    with tempfile.TemporaryDirectory() as folder:
        place = (world, folder)
        ranks = [server.Process(target=_rank, args=(rank, place, function, args)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed; its traceback stands above")
        return [json.loads(Path(folder, f"answer-{rank}").read_text()) for rank in range(world)]


def _rank(rank: int, place: tuple[int, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    world, folder = place
    failed = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a server that somebody else started knows nothing of it
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=LIMIT_S)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit
        )
        answer = function(rank, world, *args)
        Path(folder, f"answer-{rank}").write_text(json.dumps(answer))
        dist.barrier()
        failed = 0
    finally:
        if failed:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)  # no destructor that waits for the others
