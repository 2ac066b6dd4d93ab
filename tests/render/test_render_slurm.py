"""The rendered batch script on a real Slurm: what it grants, starts and passes on. The agent is a stand-in."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from render_cases import launched, load
from testbed.cluster import Testbed

from launcher.render import render
from launcher.specs.models import Cluster

Wait = Callable[..., None]

# claim says which attempt it is; agent writes down what it was given, then does as the test says.
AGENT = r"""#!/bin/bash
if [ "$2" = claim ]; then echo 1; exit; fi
out="$4/seen-$SLURM_NODEID"
{
  printf 'arguments=%s\n' "$*"
  printf 'tasks=%s\n' "$SLURM_NTASKS"
  printf 'cpus=%s\n' "$(nproc)"
  printf 'gpus=%s\n' "${CUDA_VISIBLE_DEVICES-none}"
  printf 'node=%s\n' "$SLURMD_NODENAME"
  printf 'leaked=%s\n' "${LEAKED-no}"
  scontrol show job "$SLURM_JOB_ID" | tr ' ' '\n' | grep -E '^(TRES|NumNodes|Requeue|MinMemoryNode)='
  printf 'step=%s\n' "$(scontrol show step "$SLURM_JOB_ID.0" | tr ' ' '\n' | grep ^TRES=)"
} >"$out.part"
mv "$out.part" "$out"
. "$4/act"
"""
RUN = "100% it's é/run-1"


@pytest.fixture
def run(testbed: Testbed) -> Iterator[Path]:
    """The run's folder as the tests see it; the cluster sees it at /home/trainer."""
    top = testbed.home() / "render"
    folder = top / RUN
    (folder / "attempts/1/logs").mkdir(parents=True)
    (folder / "act").write_text("exit 0\n")
    (top / "agent").write_text(AGENT)
    (top / "agent").chmod(0o755)
    yield folder
    shutil.rmtree(top)


def submit(testbed: Testbed, run: Path, *environment: str, **wishes: str) -> str:
    job, cluster = load("slurm", "slurm-site", ["nodes=2", "slots_per_node=2", "batch.micro=4"])
    plain = cluster.model_dump(by_alias=True, exclude_none=True)
    plain["slurm"] = {"account": "lab", "gpus_by": "gres", **wishes}
    plain["nodes"] = {"slots": 2, "cpus_per_slot": 3, "memory_per_slot": 300 * 2**20}
    plain["agent_python"] = "/home/trainer/render/agent"
    cluster = Cluster.model_validate(plain)
    plan, launch = launched(job, cluster, run_dir=f"/home/trainer/render/{RUN}")
    (run / "script").write_bytes(render(plan, cluster, launch))
    testbed.exec("login", ["chown", "-R", "trainer", "/home/trainer/render"], user=None)
    path = f"/home/trainer/render/{RUN}/script"
    said = testbed.exec("login", ["env", *environment, "sbatch", "--parsable", path])
    return said.stdout.decode().strip()


def state(testbed: Testbed, job: str) -> dict[str, str]:
    text = testbed.exec("login", ["scontrol", "show", "job", job]).stdout.decode()
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def ended(testbed: Testbed, job: str) -> bool:
    return state(testbed, job)["JobState"] not in {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}


def seen(run: Path) -> list[dict[str, str]]:
    return [dict(line.split("=", 1) for line in (run / f"seen-{n}").read_text().splitlines()) for n in (0, 1)]


def test_one_agent_a_node_with_what_was_asked_for(testbed: Testbed, run: Path, wait_until: Wait) -> None:
    """Also where sbatch itself runs inside another job, whose variables srun would take for options."""
    leaks = ["SLURM_NTASKS_PER_NODE=5", "SLURM_EXPORT_ENV=NONE", "SLURM_MEM_PER_CPU=1", "SLURM_DISTRIBUTION=plane=3",
             "SLURM_HINT=nomultithread", "SLURM_GPUS_PER_TASK=2", "SLURM_KILL_BAD_EXIT=1", "LEAKED=yes"]  # fmt: skip
    job = submit(testbed, run, *leaks)
    wait_until(lambda: ended(testbed, job), 60, "the job does not end")
    log = run / f"attempts/1/logs/slurm-{job}.out"
    assert state(testbed, job)["JobState"] == "COMPLETED", log.read_text() if log.exists() else state(testbed, job)
    nodes = seen(run)
    assert len({node["node"] for node in nodes}) == 2
    for node in nodes:
        here = f"/home/trainer/render/{RUN}"
        runtime = f"{here.rpartition('/')[0]}/.blobs/0123abcd.zip"
        assert node["arguments"] == f"{runtime} agent --run-dir {here} --attempt 1"
        assert node["tasks"] == "2" and node["NumNodes"] == "2" and node["Requeue"] == "0"
        assert node["leaked"] == "no"
        assert node["gpus"] == "0,1"
        # Of the job and of its step: 2 nodes × 2 slots × 3 CPUs, × 300 MiB.
        assert {"cpu=12", "mem=1200M", "node=2"} <= set(node["TRES"].split(","))
        assert {"cpu=12", "mem=1200M", "node=2"} <= set(node["step"].removeprefix("TRES=").split(","))
    assert log.read_text() == ""


def test_the_worst_exit_of_the_agents_is_the_jobs(testbed: Testbed, run: Path, wait_until: Wait) -> None:
    """An agent that failed ends nobody else: the others stop their ranks by themselves and write it down."""
    (run / "act").write_text('[ "$SLURM_NODEID" = 1 ] && exit 3\nsleep 2; touch "$4/first-went-on"; exit 0\n')
    job = submit(testbed, run)
    wait_until(lambda: ended(testbed, job), 60, "the job does not end")
    assert state(testbed, job)["ExitCode"] == "3:0"
    assert (run / "first-went-on").exists()


@pytest.mark.parametrize("option", [[], ["--batch"]])
def test_the_stop_signal_reaches_every_agent(option: list[str], testbed: Testbed, run: Path, wait_until: Wait) -> None:
    """From Slurm to the steps before the time limit, or through the batch shell."""
    (run / "act").write_text("trap 'exit 75' USR2; touch \"$4/up-$SLURM_NODEID\"; while :; do sleep 0.1; done\n")
    job = submit(testbed, run)
    wait_until(lambda: len(list(run.glob("up-*"))) == 2, 60, "the agents do not start")
    testbed.exec("login", ["scancel", *option, "--signal=USR2", job])
    wait_until(lambda: ended(testbed, job), 30, "the job does not end")
    assert state(testbed, job)["ExitCode"] == "75:0"
