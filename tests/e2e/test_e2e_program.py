"""A script of the user's own: stopped, resumed, its checkpoints and outputs brought home; and what frameworks see."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from e2e_site import PROGRAM, Site
from testbed.network import cut_between

OWN = """\
import os, pathlib, signal, sys, time

rank, run = int(os.environ["RANK"]), pathlib.Path(os.environ["ZERUN_RUN_DIR"])
begun = os.environ.get("ZERUN_RESUME_FROM")


def save(step, whole):
    folder = pathlib.Path("ck") / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.pt").write_bytes(bytes([rank]) * 5000)
    if rank == 0 and whole:
        (folder / "DONE").touch()


if begun:
    all = {path.name: path.read_bytes() for path in sorted(pathlib.Path(begun).iterdir())}
    told = ", ".join(f"{name} {len(data)}x{data[:1].hex()}" for name, data in all.items())
    print(f"rank {rank} goes on from {os.path.relpath(begun, run)}: {told}", flush=True)
    data = os.environ["ZERUN_DATA_TRAIN"]
    print(f"rank {rank} reads {data.startswith('/scratch/trainer/fast/')} {len(open(data, 'rb').read())}", flush=True)
    sys.exit()
samples = pathlib.Path("samples", "deep")
samples.mkdir(parents=True)
(samples / f"rank-{rank}.txt").write_text(f"sample of {rank}")
(run / "out").mkdir(exist_ok=True)
(run / "out" / f"table-{rank}.csv").write_text("a,b")
if rank == 0:
    (samples / "passwd").symlink_to("/etc/passwd")
    pathlib.Path("samples", "etc").symlink_to("/etc")
save(9, True)
save(10, True)


def stopped(*_):
    save(30, False)  # torn
    save(20, True)
    (run / "out" / f"stop-file-{rank}").write_text(str(os.path.exists(os.environ["ZERUN_STOP_FILE"])))
    sys.exit(75)


signal.signal(signal.SIGUSR1, stopped)
print("ready", flush=True)
time.sleep(600)
"""
JOB = """\
name: own
nodes: 2
slots_per_node: 1
time: 18s
code: {root: ..}
program: {argv: [python, train.py], stop_signal: USR1, stop_grace: 10s}
checkpoint: {foreign: "ck/*", whole_when: DONE}
data: {tokens: held.bin, stage_to: node_local}
outputs: ["samples/**", "$ZERUN_RUN_DIR/out/*"]
"""


@pytest.mark.full
def test_a_programs_checkpoints_are_listed_brought_home_proven_and_handed_back(rack: Site, testbed: Any) -> None:
    rack.write("train.py", OWN)
    rack.write("held.bin", "token" * 1800)
    cluster = rack.folder / "clusters" / "rack.yaml"
    cluster.write_text(cluster.read_text().replace("shared: false", "shared: false, node_local: /scratch/$USER/fast"))
    rack.write("jobs/own.yaml", JOB)
    submitted = rack.zerun("submit", "jobs/own.yaml", "--cluster", "rack", "--follow", code=75)
    run = submitted.stdout.strip()
    assert " sent" in submitted.stderr and json.loads((rack.run_folder(run) / "code.json").read_text())["files"] >= 3
    assert rack.json("status", run)["state"] == "stopped"
    found = [(c["name"], c["step"], c["whole"], c["bytes"]) for c in rack.json("ckpt", "ls", run)]
    assert found == [
        ("code/ck/step-9", 9, True, 10_000), ("code/ck/step-10", 10, True, 10_000),
        ("code/ck/step-20", 20, True, 10_000), ("code/ck/step-30", 30, False, 10_000),
    ]  # fmt: skip
    assert "DONE is not there: it was never finished" in rack.zerun("ckpt", "ls", run).stdout
    got = rack.json("collect", run)
    home = rack.run_folder(run)
    assert (got["name"], got["verified_shards"]) == ("code/ck/step-20", 3)
    assert (home / "code/ck/step-20/rank-1.pt").read_bytes() == bytes([1]) * 5000
    brought = {str(p.relative_to(home)) for top in ("code", "out") for p in (home / top).rglob("*") if not p.is_dir()}
    kept = {f"code/ck/step-20/{name}" for name in ("DONE", "rank-0.pt", "rank-1.pt")}
    outputs = {f"out/{name}-{rank}{end}" for rank in (0, 1) for name, end in (("table", ".csv"), ("stop-file", ""))}
    assert brought == kept | outputs | {f"code/samples/deep/rank-{rank}.txt" for rank in (0, 1)}
    assert (home / "out/stop-file-0").read_text() == "True"
    assert rack.json("collect", run)["moved_files"] == 0
    assert "3 files" in rack.zerun("ckpt", "verify", run).stdout
    # A byte that changed at home is found; one that changed on its node is what the node has.
    with open(home / "code/ck/step-20/rank-0.pt", "r+b") as file:
        file.write(b"X")
    assert "rank-0.pt (from node01) is not xxh3:" in rack.zerun("ckpt", "verify", run, code=7).stderr
    earlier = rack.json("collect", run, "--checkpoint", "9")
    assert earlier["name"] == "code/ck/step-9"
    assert "no checkpoint of step 4" in rack.zerun("resume", run, "--step", "4", code=2).stderr
    # On one node more: each gets all of it, also what one node alone had written, before its ranks start.
    again = rack.zerun("resume", run, "--nodes", "3", "--follow")
    assert "code/ck/step-30: DONE is not there" in again.stderr and "code/ck/step-20: whole, taken" in again.stderr
    logs = rack.zerun("logs", run).stdout
    assert "code/ck/step-20, from node to node: 1 file (4.9 KiB) node02 → node01; 2 files" in again.stderr
    for rank in range(3):
        assert f"rank {rank} goes on from code/ck/step-20: DONE 0x, rank-0.pt 5000x00, rank-1.pt 5000x01" in logs
        assert f"rank {rank} reads True 9000" in logs
    assert json.loads((home / "attempts/2/launch.json").read_text())["resume_from"] == "code/ck/step-20"
    assert [c["bytes"] for c in rack.json("ckpt", "ls", run) if c["step"] == 20] == [10_000], "copies are counted once"
    # Whoever has it now is not of the attempt, and the others do not reach it: by way of home, proven there too.
    with contextlib.ExitStack() as cut:
        for node in ("node01", "node02"):
            testbed.exec(node, ["rm", "-rf", f"/scratch/trainer/zerun/{run}/code/ck"])
            cut.enter_context(cut_between(testbed, node, "node03"))
        again = rack.zerun("resume", run, "--step", "20", "--nodes", "2", "--follow")
    assert "code/ck/step-20: not from node to node to node01: " in again.stderr
    assert "code/ck/step-20: 3 files (9.8 KiB) come here first" in again.stderr
    logs = rack.zerun("logs", run).stdout
    assert all(f"rank {r} goes on from code/ck/step-20: DONE 0x, rank-0.pt 5000x00" in logs for r in (0, 1))


FRAMEWORKS = """\
import os

import torch

# What srun leaves in a step of Slurm's once SLURM_NTASKS*, SLURM_PROCID and SLURM_LOCALID are gone.
os.environ.update(SLURM_JOB_ID="7", SLURM_JOB_NAME="zerun-x", SLURM_NODEID="0", SLURM_NNODES="1", SLURM_STEP_ID="0")
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

assert TorchElasticEnvironment.detect() and not SLURMEnvironment.detect()
fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
mean = fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="mean")
print(f"lightning: rank {fabric.global_rank} of {fabric.world_size}, mean {mean:.1f}", flush=True)
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
told = f"{accelerator.process_index} of {accelerator.num_processes}, {accelerator.distributed_type.value}"
total = accelerator.reduce(torch.tensor(float(accelerator.process_index)), "sum")
print(f"accelerate: rank {told}, sum {total:.1f}", flush=True)
torch.distributed.destroy_process_group()
"""
DEEPSPEED = """\
import deepspeed, torch

deepspeed.init_distributed("gloo")
model = torch.nn.Linear(8, 8)
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
optimizer = torch.optim.AdamW(model.parameters())  # its own is compiled at the first start
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
print(f"deepspeed: rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}, "
      f"{engine.global_steps} steps at stage {engine.zero_optimization_stage()}", flush=True)
"""


def has(python: str, *modules: str) -> bool:
    said = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, {modules!r})))"
    return subprocess.run([python, "-c", said], capture_output=True).returncode == 0


def run_script(site: Site, text: str, *, python: str = "python", env: str = "") -> list[str]:
    """The lines of both ranks of a script that nothing of ours was put into."""
    site.write("script.py", text)
    more = f"env: {{{env}}}" if env else ""
    site.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python=python, more=more))
    done = site.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow", code=None)
    assert done.stdout, done.stderr
    lines = [line.split("  ", 1)[-1] for line in site.zerun("logs", done.stdout.strip()).stdout.splitlines()]
    assert done.returncode == 0, "\n".join(lines)
    return sorted(lines)


@pytest.mark.full
@pytest.mark.skipif(not has(sys.executable, "lightning", "accelerate"), reason="needs the extra `frameworks`")
def test_lightning_and_accelerate_find_their_ranks_by_themselves(laptop: Site) -> None:
    lines = run_script(laptop, FRAMEWORKS)
    for rank in (0, 1):
        assert f"lightning: rank {rank} of 2, mean 0.5" in lines
        assert f"accelerate: rank {rank} of 2, MULTI_CPU, sum 1.0" in lines


DEEPSPEED_PYTHON = os.environ.get("ZERUN_DEEPSPEED_PYTHON", sys.executable)


@pytest.mark.full
@pytest.mark.skipif(
    not has(DEEPSPEED_PYTHON, "deepspeed"),
    reason="deepspeed is not installed: ZERUN_DEEPSPEED_PYTHON names a Python with it",
)
def test_a_deepspeed_script_trains_under_zerun(laptop: Site) -> None:
    lines = run_script(laptop, DEEPSPEED, python=DEEPSPEED_PYTHON, env="DS_ACCELERATOR: cpu")
    assert [line for line in lines if line.startswith("deepspeed: ")] == [
        f"deepspeed: rank {rank} of 2, 3 steps at stage 2" for rank in (0, 1)
    ]
