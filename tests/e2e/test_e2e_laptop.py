"""The main job on this very machine: direct × local, with real torch ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from e2e_site import GPT, PROGRAM, Site
from testbed.cluster import wait_until


def shards(folder: Path, step: int) -> dict[str, bytes]:
    found = sorted((folder / "checkpoints" / f"step-{step:08d}").glob("rank-*.safetensors"))
    return {path.name: path.read_bytes() for path in found}


def losses(folder: Path, attempt: int, rank: int = 0) -> dict[int, float]:
    lines = (folder / "attempts" / str(attempt) / "metrics" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines)}


def test_stopped_and_resumed_is_bitwise_a_run_never_interrupted(laptop: Site) -> None:
    laptop.write("jobs/whole.yaml", GPT.format(name="whole", nodes=1, stage=2, steps=60, every=6))
    laptop.write("jobs/cut.yaml", GPT.format(name="cut", nodes=1, stage=2, steps=60, every=6))
    whole = laptop.zerun("submit", "jobs/whole.yaml", "--cluster", "here", "--follow").stdout.strip()
    plan = {row["what"].split(",")[0]: row for row in laptop.json("status", whole, "--plan")["plan"]}
    for what in ("parameters", "gradients", "optimizer", "sent"):
        assert plan[what]["planned"] == plan[what]["measured"] > 0, plan[what]
    assert 0.5 < plan["peak of a step"]["measured"] / plan["peak of a step"]["planned"] < 1.2
    assert "planned beside measured" in laptop.zerun("status", whole, "--plan").stdout
    # The same job, cancelled somewhere after its checkpoint of step 6.
    # All of them stay, however far it comes before it is held.
    cut = laptop.zerun("submit", "jobs/cut.yaml", "--cluster", "here", "--set", "checkpoint.keep=100").stdout.strip()
    folder = laptop.run_folder(cut)
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints" / "step-00000006" / "manifest.json").exists():
        assert time.monotonic() < deadline, laptop.zerun("status", cut, code=None).stdout
        time.sleep(0.05)
    cancel_in_time(laptop, cut)
    assert laptop.json("status", cut)["state"] == "cancelled"
    said = laptop.zerun("resume", cut, "--step", "6", "--follow")
    assert "step 6" in said.stderr
    assert laptop.json("status", cut)["state"] == "done"
    assert shards(laptop.run_folder(whole), 60) == shards(folder, 60)
    told = laptop.zerun("resume", cut, code=2)
    assert "done" in told.stderr and "--set steps=N" in told.stderr
    told = laptop.zerun("resume", cut, "--set", "steps=60", "--set", "cluster.nodes.slots=4", code=2)
    assert "--set cluster.nodes.slots=4: a resume keeps the cluster" in told.stderr and "--nodes M" in told.stderr
    told = laptop.zerun("resume", cut, "--set", "steps=50", code=2)
    assert "the checkpoint is of step 60, past the job's 50 steps" in told.stderr
    assert laptop.json("status", cut)["attempt"] == 2, "refused before an attempt is made"
    uninterrupted, resumed = losses(laptop.run_folder(whole), 1), losses(folder, 2)
    assert {s: v for s, v in uninterrupted.items() if s > 6} == resumed
    _resumed_otherwise(laptop, cut)


def cancel_in_time(laptop: Site, run: str) -> None:
    """The ranks stand still until they are told to end: a command takes as long to begin as some do to finish."""
    record = laptop.run_folder(run) / "attempts/1/nodes/localhost.json"
    ranks = [rank["pid"] for rank in json.loads(record.read_bytes())["ranks"]]
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    cancelling = laptop.start("cancel", run)
    try:
        wait_until(lambda: json.loads(record.read_bytes())["state"] != "running", 60, "nobody tells the ranks to end")
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)
        _, said = cancelling.communicate(timeout=60)
    assert cancelling.returncode == 0, said


def _resumed_otherwise(laptop: Site, cut: str) -> None:
    """What a resume sets stays set, and the plan beside its figures is of the job as it then was."""
    for attempt, words in ((3, ("--set", "steps=62", "--set", "zero.stage=3")), (4, ("--set", "steps=64"))):
        laptop.zerun("resume", cut, *words, "--follow")
        told = laptop.json("status", cut, "--plan")
        assert (told["state"], told["attempt"]) == ("done", attempt)
        plan = {row["what"].split(",")[0]: row for row in told["plan"]}
        for what in ("parameters", "gradients", "optimizer", "sent"):
            assert plan[what]["planned"] == plan[what]["measured"] > 0, plan[what]
        assert plan["parameters"]["planned"] == plan["gradients"]["planned"], "stage 3 holds a share of both"


TICKS = """\
import os, time
for i in range(40):
    print("tick", i, flush=True)
    while i > 3 and not os.path.exists("go"):
        time.sleep(0.1)
"""


def test_following_can_end_while_the_run_goes_on(laptop: Site) -> None:
    laptop.write("script.py", TICKS)
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    process = laptop.start("submit", "jobs/p.yaml", "--cluster", "here", "--follow")
    assert process.stdout is not None and process.stderr is not None
    run = process.stdout.readline().decode().strip()
    while b"tick 3" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"zerun logs {run}".encode() in err and f"zerun cancel {run}".encode() in err
    assert laptop.json("status", run)["state"] == "running"
    assert laptop.zerun("wait", run, "--timeout", "0", code=10)
    (laptop.run_folder(run) / "code/go").touch()
    assert laptop.zerun("wait", run).returncode == 0
    lines = laptop.zerun("logs", run, "--rank", "1").stdout.splitlines()
    assert [line for line in lines if line.startswith("1@localhost")] == lines and len(lines) == 40


def test_a_rank_that_exits_7_is_named_and_all_are_stopped(laptop: Site) -> None:
    laptop.write(
        "script.py",
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(1); print('no more', file=sys.stderr); sys.exit(7)\n"
        "time.sleep(600)\n",
    )
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    done = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow", code=1)
    run = done.stdout.strip()
    state = laptop.json("status", run)
    assert (state["state"], state["exit_code"], state["cause"]["rank"]) == ("failed", 1, 1)
    told = laptop.zerun("status", run).stdout
    assert "rank 1" in told and "localhost" in told and "7" in told and "no more" in told and "stopped by us" in told


def test_what_is_shipped_is_what_runs(laptop: Site) -> None:
    """A file edited after submit changes nothing; the user's launcher/ and torch/ shadow nothing of ours."""
    laptop.write("launcher/__init__.py", "raise SystemExit('shadowed')\n")
    laptop.write("torch/__init__.py", "raise SystemExit('shadowed')\n")
    laptop.write("mine/__init__.py", "")
    model = laptop.write(
        "mine/model.py",
        "import torch\nclass M(torch.nn.Module):\n"
        "    def __init__(self, width):\n        super().__init__()\n"
        "        self.e = torch.nn.Embedding(256, width)\n        self.o = torch.nn.Linear(width, 256)\n"
        "        print('as shipped', flush=True)\n"
        "    def forward(self, x):\n        return self.o(self.e(x))\n"
        "def make(width):\n    return M(width)\n"
        "def loss(model, batch):\n"
        "    x, y = batch\n    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())\n",
    )
    laptop.write(
        "jobs/f.yaml",
        GPT.format(name="f", nodes=1, stage=3, steps=2, every=2)
        .replace("model: {kind: gpt, layers: 2, hidden: 33, heads: 3, seq_len: 24, vocab: 256}",
                 "model: {factory: 'mine.model:make', options: {width: 9}, loss: 'mine.model:loss'}\n"
                 "code: {root: ..}").replace("{text: python-stdlib}", "{text: python-stdlib, options: {seq_len: 24}}"),
    )  # fmt: skip
    run = laptop.zerun("submit", "jobs/f.yaml", "--cluster", "here").stdout.strip()
    model.write_text("raise SystemExit('edited')\n")
    done = laptop.zerun("wait", run, code=None)
    logs = laptop.zerun("logs", run).stdout
    assert done.returncode == 0, logs
    assert "as shipped" in logs and "shadowed" not in logs


def test_secrets_are_nowhere_but_in_the_ranks(laptop: Site) -> None:
    value = "planted-5e3c,'\"$x\n=é"
    laptop.environment["MY_TOKEN"] = value
    laptop.write(
        "script.py", "import os, hashlib\nprint(hashlib.sha256(os.environ['MY_TOKEN'].encode()).hexdigest())\n"
    )
    more = "secrets: [MY_TOKEN]"
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=more))
    run = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow").stdout.strip()
    assert hashlib.sha256(value.encode()).hexdigest() in laptop.zerun("logs", run).stdout
    for folder, _, names in os.walk(laptop.folder / "runs"):
        for name in names:
            data = (Path(folder) / name).read_bytes()
            assert b"planted-5e3c" not in data, Path(folder) / name
    del laptop.environment["MY_TOKEN"]
    refused = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", code=2)
    assert "MY_TOKEN" in refused.stderr and refused.stdout == ""


SAVES = """\
import os, pathlib, signal, sys, time
kept = pathlib.Path(os.environ["ZERUN_RUN_DIR"], f"mine-{os.environ['RANK']}")
if int(os.environ["ZERUN_ATTEMPT"]) > 1:
    print("went on from", kept.read_text())
    sys.exit()

def save(*_):
    kept.write_text("7")
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
time.sleep(600)
"""


def test_a_time_limit_ends_with_124(laptop: Site) -> None:
    laptop.write("script.py", "import time\ntime.sleep(600)\n")
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="4s", python="python3", more=""))
    laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow", code=124)
    state: Any = laptop.json("status", "last")
    assert (state["state"], state["exit_code"]) == ("time_limit", 124)


def test_a_program_that_saves_at_its_limit_can_go_on(laptop: Site) -> None:
    laptop.write("script.py", SAVES)
    text = PROGRAM.format(name="p", nodes=1, time="14s", python="python3", more="")
    laptop.write("jobs/p.yaml", text)
    laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow", code=75)
    assert laptop.json("status", "last")["state"] == "stopped"
    again = laptop.zerun("resume", "last", "--follow")
    assert "no checkpoint that zerun knows" in again.stderr and "went on from 7" in again.stderr
    assert laptop.json("status", "last")["state"] == "done"


def test_a_training_job_at_its_limit_saves_and_can_go_on(laptop: Site) -> None:
    text = GPT.format(name="long", nodes=1, stage=1, steps=100000, every=100000).replace("time: 10:00", "time: 40s")
    laptop.write("jobs/long.yaml", text)
    laptop.zerun("submit", "jobs/long.yaml", "--cluster", "here", "--follow", code=75)
    state = laptop.json("status", "last")
    assert state["state"] == "stopped" and len(state["checkpoints"]) == 1


DDP = """\
import os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zerun import ZeroEngine


def main():  # what holds the process group goes before the interpreter does
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    total = model.module.weight.grad.sum()
    own = torch.nn.Linear(4, 3)
    zero = ZeroEngine(own, {"zero": {"stage": 3}, "optimizer": {"lr": 1e-2}})
    zero.backward(own(torch.ones(2, 4) * (rank + 1)).sum())
    info = zero.step()
    assert ZeroEngine.__module__.startswith("_zerun."), ZeroEngine.__module__  # the shipped one
    print(f"rank {rank} of {dist.get_world_size()}: {total:.3f} {info.grad_norm:.3f}", flush=True)


dist.init_process_group("gloo")  # env://, as under torchrun
main()
dist.destroy_process_group()
"""


def test_a_torchrun_style_script_runs_unchanged_and_may_use_the_engine(laptop: Site) -> None:
    laptop.write("script.py", DDP)
    text = PROGRAM.format(name="ddp", nodes=1, time="5:00", python="python", more="")
    laptop.write("jobs/ddp.yaml", text)
    run = laptop.zerun("submit", "jobs/ddp.yaml", "--cluster", "here", "--follow").stdout.strip()
    lines = sorted(line.split("  ", 1)[1] for line in laptop.zerun("logs", run).stdout.splitlines())
    # The mean over ranks of 2·(rank + 1) a weight is 3: 36 in all; with the bias (2 each) its norm is √(12·9 + 3·4).
    assert lines == ["rank 0 of 2: 36.000 10.954", "rank 1 of 2: 36.000 10.954"]
