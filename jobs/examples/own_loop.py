"""ZeroEngine in a loop of one's own: the model below is any nn.Module.

    torchrun --nproc-per-node 2 jobs/examples/own_loop.py          under torchrun, without zerun's launcher
    program: {argv: [python, jobs/examples/own_loop.py]}           as a job of zerun

It saves when it is asked to stop, and goes on from there when it is resumed.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from zerun import ZeroEngine


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    zero = ZeroEngine(model, {"zero": {"stage": 3}, "optimizer": {"lr": 0.01, "clip": 1.0}, "accumulation": 2})
    folder = os.path.join(os.environ.get("ZERUN_RUN_DIR", "."), "checkpoints")
    resume = os.environ.get("ZERUN_RESUME_FROM")
    step = zero.load(resume)[0] if resume else 0
    stop = torch.zeros(1)  # agreed: one rank sees the file a moment before the others, and they would wait for it
    while step < 50 and not stop:
        for micro in range(2):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed((step * 2 + micro) * world + rank))
            loss = (model(x)[:, 0] - x.sum(1).sin()).square().mean()
            zero.backward(loss)
        info = zero.step()
        step += 1
        stop[0] = os.path.exists(os.environ.get("ZERUN_STOP_FILE", "/nonexistent"))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}  loss {loss.item():.4f}  norm {info.grad_norm:.3f}  {zero.memory()}", flush=True)
    zero.save(folder, step)
    dist.destroy_process_group()
    if step < 50:
        sys.exit(75)  # asked to end, and saved: the run is told as stopped, and `zerun resume` goes on


if __name__ == "__main__":
    main()
