"""What is done every day beside the main job: a cluster looked at from another laptop, runs found again and removed."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from e2e_site import PROGRAM, Site, describe_rack, describe_slurm

SHORT = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['ZERUN_ATTEMPT'], flush=True)\n"


def another_laptop(site: Site, tmp_path: Path) -> Site:
    folder = tmp_path / "other"
    (folder / "clusters").mkdir(parents=True)
    return dataclasses.replace(site, folder=folder)


def test_another_laptop_finds_the_runs_of_a_slurm_account(
    slurm: Site, testbed: Any, node_python: str, tmp_path: Path
) -> None:
    testbed.exec("login", ["rm", "-rf", f"/home/{testbed.user}/zerun"])  # runs of the tests before would be found too
    slurm.write("script.py", SHORT)
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more="tags: [trial]"))
    run = slurm.zerun("submit", "jobs/p.yaml", "-c", "uni", "--tag", "x1", "--follow").stdout.strip()
    other = describe_slurm(another_laptop(slurm, tmp_path), testbed, node_python, testbed.user)

    listed = other.zerun("ls", "-c", "uni", "--json", "--tag", "x1", "--tag", "trial", "--since", "10m")
    assert f"taken up here, from another laptop: {run}" in listed.stderr
    (row,) = json.loads(listed.stdout)
    assert (row["run"], row["state"], row["owner"], row["tags"]) == (run, "done", testbed.user, ["trial", "x1"])
    assert other.json("ls", "--state", "failed") == [] and other.json("ls", "--tag", "no") == []
    assert "rank 1 of 1" in other.zerun("logs", run).stdout
    other.zerun("collect", run)
    assert (other.run_folder(run) / "attempts/1/logs/rank-00001.log").read_bytes() == b"rank 1 of 1\n"

    # Nothing is removed that nobody agreed to; then what is at home; then what is there.
    assert "--yes" in other.zerun("rm", run, code=2).stderr
    said = other.zerun("rm", run, "--yes")
    assert "what lies on uni stays" in said.stderr and not other.run_folder(run).exists()
    assert slurm.json("status", run)["state"] == "done"
    there = testbed.home() / "zerun" / run
    assert there.is_dir()
    said = slurm.zerun("rm", run, "--remote", "--yes")
    assert f"/zerun/{run}" in said.stderr and "removed" in said.stdout and not there.exists()
    assert slurm.json("ls") == [] and other.json("ls", "-c", "uni") == []


def test_a_run_in_pieces_is_taken_up_and_resumed_elsewhere(
    rack: Site, testbed: Any, node_python: str, tmp_path: Path
) -> None:
    rack.write("script.py", SHORT + "import time\ntime.sleep(0 if os.environ['ZERUN_ATTEMPT'] == '2' else 300)\n")
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=""))
    run = rack.zerun("submit", "jobs/p.yaml", "-c", "rack").stdout.strip()
    other = describe_rack(another_laptop(rack, tmp_path), testbed, node_python, testbed.user)
    assert [s["state"] for s in other.json("ls", "-c", "rack") if s["run"] == run] == ["running"]
    assert "zerun cancel" in other.zerun("rm", run, "--remote", "--yes", code=2).stderr
    other.zerun("cancel", run, code=None)
    assert rack.json("status", run)["state"] == "cancelled"
    # What was shipped came along when it was taken up: a node that lost it gets it from this laptop.
    testbed.exec("node02", ["rm", "-rf", f"/scratch/{testbed.user}/zerun/.blobs"])
    resumed = other.zerun("resume", run, "--follow")
    assert "3@node02  rank 3 of 2" in resumed.stderr
    # The first laptop hears of it, and removes what lies on both nodes; asked at a terminal, it takes y for yes.
    now = rack.json("status", run)
    assert (now["attempt"], now["state"]) == (2, "done"), now
    assert ask(rack, "n", "rm", run, "--remote") == 0 and rack.run_folder(run).is_dir()
    assert ask(rack, "y", "rm", run, "--remote") == 0 and not rack.run_folder(run).exists()
    for node in ("node01", "node02"):
        assert run.encode() not in testbed.exec(node, ["ls", f"/scratch/{testbed.user}/zerun"]).stdout


IN_ALLOCATION = """\
set -eu
run=$(zerun submit jobs/p.yaml --cluster here --here --follow)
zerun status $run
sleeping=$(zerun submit jobs/s.yaml --cluster here --here)
until zerun logs $sleeping | grep -q 'rank 3'; do sleep 0.5; done
zerun status $sleeping | head -1
zerun cancel $sleeping | head -1
squeue -h -j $SLURM_JOB_ID -o 'allocation %T'
squeue -h -s -j $SLURM_JOB_ID -o 'step %j' | grep zerun || echo 'no step is left'
zerun submit jobs/p.yaml --cluster here --here --set nodes=3 || echo "refused with $?"
"""


def test_a_job_runs_inside_an_allocation_and_leaves_it_standing(slurm: Site, testbed: Any) -> None:
    text = (slurm.folder / "clusters/uni.yaml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("login:", "ssh:"))]
    slurm.write("clusters/here.yaml", "\n".join(lines).replace("~/zerun", f"/home/{testbed.user}/inside"))
    slurm.write("script.py", SHORT)
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=""))
    slurm.write("sleep/script.py", SHORT + "import time\ntime.sleep(300)\n")
    sleeping = PROGRAM.format(name="s", nodes=2, time="5:00", python="python3", more="")
    slurm.write("jobs/s.yaml", sleeping.replace("root: ..", "root: ../sleep"))
    command = [
        "env", "-C", str(slurm.folder), "LANG=C.UTF-8", f"XDG_CONFIG_HOME={slurm.folder}/config",
        f"PATH={Path(sys.executable).parent}:/usr/bin:/bin",
        "salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--partition=train",
        "bash", "-c", IN_ALLOCATION,
    ]  # fmt: skip
    done = testbed.exec("login", command, user=None, timeout_s=240)
    told, words = done.stdout.decode(), done.stderr.decode()
    assert all(f"rank {i} of 1" in words for i in range(4)), words
    for line in (r"p-\S+  done since", r"s-\S+  running since", r"s-\S+  cancelled since", "allocation RUNNING",
                 "no step is left", "refused with 2"):  # fmt: skip
        assert re.search(line, told), (line, told, words)
    assert "the job wants 3 nodes" in words
    outside = slurm.zerun("submit", "jobs/p.yaml", "-c", "uni", "--here", code=2)
    assert "--here: cluster uni is not the one whose allocation this shell is in" in outside.stderr


def ask(site: Site, answer: str, *argv: str) -> int:
    """The exit code of a command whose question, at a terminal, gets this answer."""
    ours, theirs = pty.openpty()
    command = [str(Path(sys.executable).with_name("zerun")), *argv]
    environment = {**os.environ, **site.environment}
    process = subprocess.Popen(
        command, cwd=site.folder, env=environment, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    os.close(theirs)
    os.write(ours, answer.encode() + b"\n")
    _, said = process.communicate(timeout=120)
    os.close(ours)
    assert b"[y/N]" in said, said
    return process.returncode
