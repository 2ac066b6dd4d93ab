"""A checkpoint's life on this very machine: damaged and passed over, left behind, exported, begun with, pruned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from e2e_site import GPT, Site

from launcher.contract.weights import read_weights


def _flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.mark.full
def _by_path(laptop: Site, run: str) -> None:
    """A folder of checkpoints that is no run's, as a loop of one's own saves it: the same bytes come of it."""
    own = laptop.folder / "own"
    shutil.copytree(laptop.run_folder(run) / "checkpoints", own)
    newest = max(path.name for path in own.glob("step-*"))
    model = (laptop.folder / "model/model.safetensors").read_bytes()
    ways = (["own", "--step", "6"], ["./own/step-00000006"], [str(own), "--step", "6"])
    for number, (name, *words) in enumerate(ways):
        laptop.zerun("ckpt", "export", name, *words, "--to", str(laptop.folder / f"own{number}"))
        assert (laptop.folder / f"own{number}/model.safetensors").read_bytes() == model
    assert f"step {int(newest[5:])}: " in laptop.zerun("ckpt", "verify", "./own").stdout
    said = laptop.zerun("ckpt", "verify", "./own", "--step", "7", code=2).stderr
    assert "no checkpoint of step 7 in ./own (there: 4, 6, 8" in said
    said = laptop.zerun("ckpt", "export", "./none", "--to", "x", code=2).stderr
    assert "no checkpoint in ./none (there: none)" in said


def test_a_checkpoints_life(laptop: Site) -> None:
    job = GPT.format(name="life", nodes=1, stage=3, steps=16, every=4).replace("keep: 3", "keep: 5, background: true")
    laptop.write("jobs/life.yaml", job)
    run = laptop.zerun("submit", "jobs/life.yaml", "--cluster", "here", "--follow").stdout.strip()
    folder = laptop.run_folder(run)
    assert [c["step"] for c in laptop.json("ckpt", "ls", run) if c["whole"]] == [4, 8, 12, 16]

    # A bit flips. A rank refuses it, says so beside it, and nobody takes it again.
    _flip(folder / "checkpoints/step-00000016/rank-00001.safetensors")
    laptop.zerun("resume", run, "--set", "steps=20", "--follow", code=1)
    told = laptop.zerun("status", run).stdout
    assert "exit code 7" in told and f"zerun resume {run} --step 12" in told
    damaged = laptop.json("ckpt", "ls", run)[-1]
    assert (damaged["state"], damaged["whole"]) == ("damaged", False) and "block 0 of 1" in damaged["problem"]
    said = laptop.zerun("resume", run, "--set", "steps=20", "--follow")
    assert "step 16: rank 1's shard on localhost is damaged" in said.stderr and "step 12: whole, taken" in said.stderr
    assert [c["step"] for c in laptop.json("ckpt", "ls", run) if c["whole"]] == [4, 8, 12, 16, 20]

    # Back to step 4: what came after is left behind, and stays until it is pruned.
    laptop.zerun("resume", run, "--step", "4", "--set", "steps=6", "--follow")
    found = laptop.json("ckpt", "ls", run)
    assert [(c["step"], bool(c["left"])) for c in found] == [
        (4, False), (6, False), (8, True), (12, True), (16, True), (20, True),
    ]  # fmt: skip
    assert "verified" in laptop.zerun("collect", run).stdout and "step 6" in laptop.zerun("ckpt", "verify", run).stdout

    # One whole model of it, in fp32 and in bf16; a new job begins with it where this one ended.
    laptop.zerun("ckpt", "export", run, "--to", str(laptop.folder / "model"))
    _by_path(laptop, run)
    laptop.zerun("ckpt", "export", run, "--to", str(laptop.folder / "half"), "--dtype", "bf16", "--max-shard", "50KB")
    whole, half = read_weights(laptop.folder / "model"), read_weights(laptop.folder / "half")
    assert {n: s.shape for n, s in whole.items()} == {n: s.shape for n, s in half.items()}
    assert {s.tag for s in half.values()} == {"BF16"} and len({s.file for s in half.values()}) > 1
    assert laptop.zerun("ckpt", "export", run, "--to", str(laptop.folder / "model"), code=5)
    begin = ("--set", f"model.weights={laptop.folder}/model", "--set", "steps=1", "--set", "optimizer.lr=1e-30")
    begin += ("--set", "optimizer.warmup=0", "--set", "zero.stage=1")
    other = laptop.zerun("submit", "jobs/life.yaml", "--cluster", "here", *begin, "--follow").stdout.strip()
    outcomes = [
        json.loads((laptop.run_folder(r) / f"attempts/{k}/outcome.json").read_bytes())
        for r, k in ((run, 4), (other, 1))
    ]
    assert outcomes[0]["heldout_loss"] == pytest.approx(outcomes[1]["heldout_loss"], rel=1e-6)
    wrong = laptop.zerun("submit", "jobs/life.yaml", "--cluster", "here", *begin, "--set", "model.hidden=30", code=2)
    assert "shape       embedding.weight: [256, 33] there, [256, 30] in the model" in wrong.stderr

    # What goes is told before it goes; with it what a collect of weights that was killed left.
    part = laptop.run_folder(run) / "weights/..step-00000006.new.77.part"
    part.mkdir(parents=True)
    laptop.zerun("ckpt", "prune", run, code=2)
    assert part.exists()
    told = laptop.zerun("ckpt", "prune", run, "--yes").stderr
    assert f"removed {part} (" in told and not part.exists()
    assert "step 8: whole, but left behind: attempt 4 went on from step 4" in told
    assert [c["step"] for c in laptop.json("ckpt", "ls", run)] == [6]


@pytest.mark.full
def test_what_a_purge_took_is_sent_back_from_home(slurm: Site, testbed: Any) -> None:
    slurm.write("jobs/g.yaml", GPT.format(name="g", nodes=2, stage=2, steps=10, every=5))
    run = slurm.zerun("submit", "jobs/g.yaml", "--cluster", "uni", "--follow").stdout.strip()
    slurm.zerun("collect", run)
    there = testbed.home() / "zerun" / run
    shutil.rmtree(there / "checkpoints/step-00000005")
    (there / "checkpoints/step-00000010/rank-00002.safetensors").unlink()
    (listed,) = slurm.json("ckpt", "ls", run)
    assert listed["whole"] and listed["at_home"]
    told = slurm.zerun("ckpt", "ls", run).stdout.splitlines()[-1]
    assert told.split()[:3] == ["10", "at", "home"] and "whole at home, not on the cluster" in told
    said = slurm.zerun("resume", run, "--set", "steps=12", "--follow").stderr
    assert "step 10: whole at home, taken" in said
    assert "step 10, which is whole here and not on the cluster: 1 shard (" in said and "go to login" in said
    assert [c["whole"] for c in slurm.json("ckpt", "ls", run)] == [True, True]

    # The whole folder of the run, as a purge by age takes it.
    slurm.zerun("collect", run)
    shutil.rmtree(there)
    said = slurm.zerun("resume", run, "--set", "steps=14", "--follow").stderr
    assert "step 12: whole at home, taken" in said and ": 4 shards (" in said
    listed = [(c["step"], c["at_home"]) for c in slurm.json("ckpt", "ls", run) if c["whole"]]
    assert listed == [(10, True), (12, False), (14, False)]
    assert slurm.json("status", run)["exit_code"] == 0
