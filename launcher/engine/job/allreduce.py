"""The verb ``allreduce``: ranks meet as a job's would, sum a small tensor, and hold the sum against what it must be."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

_ELEMENTS = 2**18
_PATIENCE = datetime.timedelta(seconds=30)


def main() -> int:
    """One rank. Rank 0 prints one JSON line; exit status 0, or 7 for a sum that is wrong."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm may warn a short job as soon as it begins
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    backend = "nccl" if gpus > int(os.environ["LOCAL_RANK"]) else "gloo"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    began = time.monotonic()
    dist.init_process_group(backend, timeout=_PATIENCE)
    met_s = time.monotonic() - began
    # Whole numbers: the sum is exact in any order, and every element tells its place.
    own = (torch.arange(_ELEMENTS, device=device) % 1024 + rank).float()
    wanted = (torch.arange(_ELEMENTS, device=device) % 1024 * ranks + ranks * (ranks - 1) // 2).float()
    dist.all_reduce(own.clone())  # the first one opens every connection
    began = time.monotonic()
    dist.all_reduce(own)
    if backend == "nccl":
        torch.cuda.synchronize(device)
    took_s = time.monotonic() - began
    wrong = int((own != wanted).sum())
    if rank == 0 or wrong:
        told = {"ranks": ranks, "backend": backend, "met_s": met_s, "seconds": took_s, "bytes": 4 * _ELEMENTS}
        told |= {"wrong": wrong, "torch": str(torch.__version__), "address": os.environ["MASTER_ADDR"]}
        print(json.dumps(told), flush=True)
    if wrong:
        print(f"rank {rank}: {wrong} of {_ELEMENTS} sums are wrong", file=sys.stderr, flush=True)
        return 7
    dist.barrier()
    dist.destroy_process_group()
    return 0
