"""The first day on a cluster nobody described yet: discovered, checked, filled in, submitted to a pool, set up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_site import GPT, Site
from testbed.cluster import wait_until

JOB = """\
name: p
pool: {pool}
nodes: 1
slots_per_node: 2
time: 1:00
code: {{root: ..}}
setup: |
  export FROM_JOB=$FROM_CLUSTER:job
  export EARLY=job
env: {{LATE: job, LITERAL: "~/$HOME"}}
program: {{argv: [python3, script.py], stop_grace: 5s}}
"""
SCRIPT = """\
import json
import os
names = ("FROM_JOB", "EARLY", "LATE", "LITERAL", "RANK", "PLANTED", "HOME")
print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)
"""
FILLED = """\
  runs: ~/zerun
  node_local: $SLURM_TMPDIR/x
setup: |
  echo made ready on $(hostname)
  export FROM_CLUSTER=${UNSET_BEFORE}cluster EARLY=cluster LATE=cluster
env: {LATE: cluster, OMP_NUM_THREADS: '1'}
"""


def test_a_cluster_is_discovered_and_a_job_runs_in_one_of_its_pools(site: Site, testbed: Any) -> None:
    site.environment["PLANTED"] = "from the submitter"
    config = str(testbed.ssh_config)
    out = site.zerun("cluster", "discover", "login", "--ssh-config", config, "--out", "clusters/uni.yaml")
    assert "to fill in" in out.stderr
    text = (site.folder / "clusters/uni.yaml").read_text()
    for told in ("MaxNodes: a job gets at most 1", "partition closed is DOWN", "preemptible: true", "account: lab"):
        assert told in text, text
    shown = site.json("cluster", "show", "uni")
    assert list(shown["pools"]) == ["train", "urgent", "tiny"] and shown["pool"] == "train"
    assert (shown["pools"]["train"]["slots"], shown["pools"]["train"]["time_max"]) == (2, "3600s")
    assert shown["pools"]["urgent"]["preemptible"] is False
    site.write("clusters/uni.yaml", text.replace("  runs: ~/zerun\n", FILLED).replace("MiB ", "KiB "))
    checked = site.zerun("cluster", "check", "uni", code=None).stdout
    assert "pool tiny: sbatch --test-only" in checked and "home_free_files" in checked
    assert "node_local known inside a job alone" in checked

    site.write("script.py", SCRIPT)
    site.write("jobs/p.yaml", JOB.format(pool="tniy"))
    wrong = site.zerun("submit", "jobs/p.yaml", "-c", "uni", code=2)
    assert "jobs/p.yaml:2:7:" in wrong.stderr and "did you mean 'tiny'" in wrong.stderr
    site.write("jobs/p.yaml", JOB.format(pool="tiny"))
    long = site.zerun("submit", "jobs/p.yaml", "-c", "uni", "--set", "time=5:00", code=2)
    assert "pool tiny allows 00:02:00; enough is in pool train and urgent" in long.stderr
    said = site.zerun("submit", "jobs/p.yaml", "-c", "uni", "--follow")
    assert "would start 20" in said.stderr and "in partition tiny" in said.stderr
    run = said.stdout.strip()
    lines = sorted(site.zerun("logs", run).stdout.splitlines())
    want = "FROM_JOB=cluster:job EARLY=job LATE=job LITERAL=~/$HOME RANK={} PLANTED=None HOME=/home/trainer"
    assert [line.split("  ", 1)[1] for line in lines] == [want.format(0), want.format(1)]
    folder = testbed.home() / "zerun" / run / "attempts/1"
    (setup,) = (folder / "logs").glob("setup-*.log")  # on whichever node was free
    assert setup.read_text() == f"made ready on {setup.stem.removeprefix('setup-')}\n"
    assert "#SBATCH --requeue" in (folder / "script").read_text(), "tiny can be preempted"

    broken = ("--set", "pool=urgent", "--set", "setup=no-such-tool")
    failed = site.zerun("submit", "jobs/p.yaml", "-c", "uni", *broken, "--follow", code=1).stdout.strip()
    told = site.zerun("status", failed).stdout
    assert "line 1 of the job's setup (--set setup) failed with status 127: no-such-tool" in told, told


def test_a_setup_that_fails_is_told_by_its_file_and_line(laptop: Site) -> None:
    text = (
        JOB.format(pool="x").replace("pool: x\n", "").replace("  export EARLY=job", "  module-that-is-not-there load x")
    )
    laptop.write("jobs/p.yaml", text)
    laptop.write("script.py", SCRIPT)
    said = laptop.zerun("submit", "jobs/p.yaml", "-c", "here", code=1)
    words = "jobs/p.yaml:8 failed with status 127: module-that-is-not-there load x"
    assert words in said.stderr and "command not found (see setup-localhost.log)" in said.stderr
    assert words in laptop.zerun("status", "last").stdout


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Any]:
    """A disk of its own as paths.runs: ``small("size=900k")`` → its folder."""
    folder = tmp_path / "small"

    def mount(options: str) -> Path:
        folder.mkdir()
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", folder]).returncode:
            pytest.skip("a small disk needs a tmpfs of our own (root)")
        return folder

    yield mount
    subprocess.run(["umount", folder], check=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("size=900k", "checkpoints take 1.31 MB"),
        pytest.param("size=90m,nr_inodes=40", "more can be made (inodes)", marks=pytest.mark.full),
    ],
)
def test_checkpoints_without_room_are_refused_before_anything_is_made(
    laptop: Site, small: Any, options: str, words: str
) -> None:
    """A checkpoint of this model is 435 kB by the plan's arithmetic; on disk 438 kB, and 9 kB of manifest."""
    folder = small(options)
    laptop.environment["ZERUN_RUNS"] = str(folder)
    job = GPT.format(name="g", nodes=1, stage=2, steps=5, every=2).replace("keep: 3", "keep: 2")
    laptop.write("jobs/g.yaml", job)
    planned = laptop.json("plan", "jobs/g.yaml", "-c", "here")
    assert (planned["checkpoints_at_once"], planned["disk_bytes"]) == (3, 3 * planned["checkpoint_bytes"])
    refused = laptop.zerun("submit", "jobs/g.yaml", "-c", "here", code=6)
    assert words in refused.stderr and (" are left" in refused.stderr or "inodes" in options)
    assert words in laptop.zerun("plan", "jobs/g.yaml", "-c", "here", "--room", code=6).stderr
    assert not list(folder.glob("g-*"))
    if "inodes" not in options:
        return
    shutil.rmtree(folder / ".blobs", ignore_errors=True)
    subprocess.run(["mount", "-o", "remount,nr_inodes=4000", folder], check=True)
    run = laptop.zerun("submit", "jobs/g.yaml", "-c", "here", "--follow").stdout.strip()
    lying = [sum(f.stat().st_size for f in c.iterdir()) for c in (folder / run / "checkpoints").iterdir() if c.is_dir()]
    assert len(lying) == 2
    assert all(0.97 < planned["checkpoint_bytes"] / size <= 1 for size in lying), lying


@pytest.mark.full
def test_a_preemptible_pool_goes_on_when_its_nodes_come_back(slurm: Site, testbed: Any) -> None:
    """Slurm takes the nodes for a job of a higher partition; the laptop is away meanwhile."""
    text = (slurm.folder / "clusters/uni.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("nodes:", "slurm:"))]
    pool = (
        '{partition: train, nodes: "node[01-04]", slots: 2, cpus_per_slot: 1, memory_per_slot: 1GiB, preemptible: true}'
    )
    slurm.write("clusters/uni.yaml", "\n".join([*lines, f"pools: {{train: {pool}}}", ""]))
    slurm.write("jobs/g.yaml", GPT.format(name="g", nodes=4, stage=2, steps=4000, every=10))
    submitted = slurm.zerun("submit", "jobs/g.yaml", "-c", "uni")
    assert "pool train is preemptible" in submitted.stderr and "newest whole checkpoint" in submitted.stderr
    run = submitted.stdout.strip()
    wait_until(lambda: any(c["whole"] for c in slurm.json("ckpt", "ls", run)), 120, "no checkpoint", every_s=1.0)
    urgent = ["sbatch", "--parsable", "-A", "lab", "-p", "urgent", "-N4", "--exclusive", "-t", "3", "--wrap=sleep 5"]
    testbed.exec("login", urgent)
    folder = testbed.home() / "zerun" / run

    def again() -> bool:
        job = (folder / "attempts/1/job").read_text().strip()
        testbed.exec("login", ["scontrol", "update", f"JobId={job}", "StartTime=now"], user=None, check=False)
        return (folder / "attempts/2/nodes/node01.json").exists()

    wait_until(again, 120, "no second attempt", every_s=2.0)
    launch = json.loads((folder / "attempts/2/launch.json").read_bytes())
    assert launch["resume_step"] and launch["resume_step"] % 10 == 0 and launch["restart_count"] == 1
    state = slurm.json("status", run)
    assert (state["state"], state["attempt"]) == ("running", 2)
    slurm.zerun("cancel", run, code=None)
    assert slurm.json("status", run)["state"] == "cancelled"
