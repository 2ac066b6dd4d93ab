"""Laptop → SSH → Slurm: the main job on four nodes, and everything that goes wrong with jobs."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_site import GPT, PROGRAM, Site, describe_slurm

VALUES = {
    "COMMA": "a,b,,c",
    "QUOTES": "it's \"so\" `no`",
    "DOLLAR": "$HOME ${X} $(id) \\n \\",
    "LINES": "one\ntwo\n\nthree ",
    "ACCENT": "é ü 漢",
    "EQUALS": "k=v=w",
    "PERCENT": "%j %t 100%",
    "BANG": "!! !x",
}
TELL = """\
import hashlib, json, os
names = json.loads(os.environ["NAMES"])
print(json.dumps({n: hashlib.sha256(os.environb[n.encode()]).hexdigest() for n in names}), flush=True)
print(json.dumps(sorted(k for k in os.environ if k in (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))), flush=True)
"""


def wait_for_checkpoint(site: Site, run: str, step: int, timeout_s: float = 150) -> None:
    end = time.monotonic() + timeout_s
    while True:
        found = site.json("ckpt", "ls", run)
        if any(c["step"] >= step and c["whole"] for c in found):
            return
        assert time.monotonic() < end, site.zerun("status", run, code=None).stdout
        time.sleep(0.5)


def test_four_nodes_then_resumed_on_two(slurm: Site, testbed: Any, leftovers: Callable[[str], list[str]]) -> None:
    slurm.write("jobs/g.yaml", GPT.format(name="g", nodes=4, stage=2, steps=4000, every=20))
    run = slurm.zerun("submit", "jobs/g.yaml", "--cluster", "uni").stdout.strip()
    wait_for_checkpoint(slurm, run, 20)
    told = slurm.json("status", run)
    assert (told["state"], told["ranks"], len(told["nodes"])) == ("running", 8, 4)
    slurm.zerun("cancel", run, code=None)
    assert slurm.json("status", run)["state"] == "cancelled"
    assert leftovers(run) == []
    step = max(c["step"] for c in slurm.json("ckpt", "ls", run) if c["whole"])
    said = slurm.zerun("resume", run, "--nodes", "2", "--follow", "--set", f"steps={step + 40}")
    assert f"step {step}" in said.stderr
    state = slurm.json("status", run)
    assert (state["state"], state["attempt"], state["ranks"]) == ("done", 2, 4)
    slurm.zerun("collect", run)
    folder = slurm.run_folder(run)
    assert len(list((folder / "attempts/1/logs").glob("rank-*.log"))) == 8
    assert len(list((folder / "attempts/2/metrics").glob("rank-*.jsonl"))) == 4
    slurm.zerun("ckpt", "verify", run)
    manifest = json.loads(max((folder / "checkpoints").glob("*/manifest.json")).read_bytes())
    assert len(manifest["shards"]) == 4 and manifest["global_batch"] == 16
    big = [p for p in folder.rglob("rank-*") if p.is_file()]
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in big}
    again = slurm.json("collect", run)
    assert (again["moved_files"], again["moved_bytes"]) == (0, 0), "records too are known by their bytes"
    assert len(big) > 16 and before == {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in big}
    rank = max((folder / "checkpoints").glob("*/rank-00002.safetensors"))
    data = bytearray(rank.read_bytes())
    data[len(data) // 2] ^= 1
    rank.write_bytes(data)
    damaged = slurm.zerun("ckpt", "verify", run, code=7)
    assert "rank 2" in damaged.stderr + damaged.stdout and "block 0" in damaged.stderr + damaged.stdout
    slurm.zerun("collect", run)
    slurm.zerun("ckpt", "verify", run)


@pytest.mark.parametrize("user", ["trainer", "tess", "nora"])
def test_values_arrive_byte_equal(site: Site, testbed: Any, node_python: str, user: str) -> None:
    """Through YAML, the script, sbatch, srun and the agent, also where the login shell is tcsh or prints."""
    describe_slurm(site, testbed, node_python, user)
    site.write("script.py", TELL)
    env = {**VALUES, "NAMES": json.dumps(sorted(VALUES))}
    more = f"env: {json.dumps(env)}"
    site.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=more))
    run = site.zerun("submit", "jobs/p.yaml", "--cluster", "uni", "--follow").stdout.strip()
    want = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in VALUES.items()}
    lines = site.zerun("logs", run).stdout.splitlines()
    told = [json.loads(line.split("  ", 1)[1]) for line in lines if "{" in line]
    assert told == [want] * 4
    names = [json.loads(line.split("  ", 1)[1]) for line in lines if '["' in line]
    assert names[0] == [
        "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "TORCHELASTIC_RUN_ID",
        "WORLD_SIZE",
    ]  # fmt: skip


def test_a_killed_rank_is_named_and_nothing_is_left(
    slurm: Site, testbed: Any, leftovers: Callable[[str], list[str]], wait_until: Callable[..., None]
) -> None:
    slurm.write(
        "script.py",
        "import os, signal, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '500'], start_new_session=True)\n"
        "if os.environ['RANK'] == '5':\n    time.sleep(2); os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(500)\n",
    )
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=4, time="5:00", python="python3", more=""))
    began = time.monotonic()
    run = slurm.zerun("submit", "jobs/p.yaml", "--cluster", "uni", "--follow", code=1).stdout.strip()
    assert time.monotonic() - began < 120, "of the others' 500 s"
    state = slurm.json("status", run)
    assert (state["state"], state["cause"]["rank"], state["cause"]["signal"]) == ("failed", 5, 9)
    wait_until(lambda: leftovers(run) == [], 30, "agents stay")  # they leave after their last word
    told = slurm.zerun("status", run).stdout
    assert "rank 5" in told and "node03" in told and "SIGKILL" in told and "stopped by us" in told


def test_a_job_over_its_time_limit(
    slurm: Site, leftovers: Callable[[str], list[str]], wait_until: Callable[..., None]
) -> None:
    slurm.write("script.py", "import time\ntime.sleep(500)\n")
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="1", python="python3", more=""))
    run = slurm.zerun("submit", "jobs/p.yaml", "--cluster", "uni").stdout.strip()
    slurm.zerun("wait", run, code=124, timeout_s=200)
    assert slurm.json("status", run)["state"] == "time_limit"
    wait_until(lambda: leftovers(run) == [], 30, "agents stay")


def test_what_slurm_refuses_is_told_in_its_own_words_and_leaves_nothing(slurm: Site, testbed: Any) -> None:
    """Also what sbatch would queue for ever: more nodes than the partition allows."""
    slurm.write("script.py", "pass\n")
    slurm.write("jobs/p.yaml", PROGRAM.format(name="refused", nodes=2, time="1", python="python3", more=""))
    for wrong, words in (("account=nobody", "Invalid account"), ("partition=tiny", "configuration is not available")):
        done = slurm.zerun("submit", "jobs/p.yaml", "--cluster", "uni", "--set", f"cluster.slurm.{wrong}", code=2)
        assert "Slurm refuses the job" in done.stderr and words in done.stderr
    assert slurm.json("ls") == [] and not list((testbed.home() / "zerun").glob("refused-*"))
    testbed.exec("login", ["scontrol", "update", "nodename=node04", "state=drain", "reason=test"], user=None)
    try:
        four = slurm.zerun("submit", "jobs/p.yaml", "--cluster", "uni", "--set", "nodes=4")
        assert "down or drained now: node04" in four.stderr, "it may wait for them: no refusal"
        slurm.zerun("cancel", four.stdout.strip(), code=None)
        assert slurm.json("status", four.stdout.strip())["state"] == "cancelled"
    finally:
        testbed.exec("login", ["scontrol", "update", "nodename=node04", "state=resume"], user=None)


def test_the_cluster_is_checked(slurm: Site) -> None:
    done = slurm.zerun("cluster", "check", "uni", code=None)
    assert "login" in done.stdout and "train" in done.stdout, done.stdout + done.stderr


def test_on_the_login_node_itself(slurm: Site, testbed: Any) -> None:
    """The same job from a shell on the login node: no SSH, sbatch is right there."""
    shared = testbed.home() / "here"
    text = (slurm.folder / "clusters/uni.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("login:", "ssh:"))]
    slurm.write("clusters/here.yaml", "\n".join(lines).replace("~/zerun", f"/home/{testbed.user}/here"))
    slurm.write("script.py", "import os\nprint('rank', os.environ['RANK'], flush=True)\n")
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=""))
    command = [
        "env", "-C", str(slurm.folder), "LANG=C.UTF-8", f"XDG_CONFIG_HOME={slurm.folder}/config",
        str(Path(sys.executable).with_name("zerun")), "submit", "jobs/p.yaml", "--cluster", "here", "--follow",
    ]  # fmt: skip
    done = testbed.exec("login", command, user=None, timeout_s=240)
    assert done.returncode == 0, done
    run = done.stdout.decode().strip()
    assert (shared / run / "attempts/1/nodes").is_dir()
    told = done.stderr.decode()
    assert all(f"rank {i}" in told for i in range(4)), told
