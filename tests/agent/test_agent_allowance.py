"""What the agent and its ranks may use: really bound and really limited processes, and trees of cgroup files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from agent_job import MakeJob

from launcher.agent.allowance import here, memory_limit, ranges
from launcher.contract.launch import Node
from launcher.runs.cramped import cramped

SAY = "import json; from launcher.agent.allowance import here; print(json.dumps(here()))"


def test_a_bound_and_limited_process_says_so() -> None:
    first = min(os.sched_getaffinity(0))
    command = f"ulimit -v 3000000; exec taskset -c {first} {sys.executable} -c '{SAY}'"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert json.loads(done.stdout) == [1, str(first), 3000000 * 1024, "RLIMIT_AS"]
    assert here().cores == len(os.sched_getaffinity(0)) and here().memory_bytes
    assert [ranges(cpus) for cpus in ([0, 1, 2, 8], [3], [])] == ["0-2,8", "3", ""]


def test_every_group_above_limits_too(tmp_path: Path) -> None:
    """As the kernel lays them out: v2 with a job's and a step's group, v1's word for none, a container's."""

    def tree(files: dict[str, str], own: str) -> tuple[int | None, str]:
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        root.mkdir(exist_ok=True)
        (root / "own").write_text(own)
        return memory_limit(str(root), str(root / "own"))

    v2 = {"memory.max": "max\n", "slurm/job_1/memory.max": "2000000\n", "slurm/job_1/step_0/memory.max": "max\n"}
    assert tree(v2, "0::/slurm/job_1/step_0\n") == (2_000_000, "cgroup v2")
    v1 = {"memory/memory.limit_in_bytes": "9223372036854771712\n", "memory/slurm/u1/memory.limit_in_bytes": "3000000\n"}
    assert tree(v1, "7:cpu,cpuacct:/slurm\n4:memory:/slurm/u1/job\n0::/\n") == (3_000_000, "cgroup v1")
    inside = {"memory.max": "4000000\n"}  # /proc tells a path of the host that the container does not see
    assert tree(inside, "0::/docker/abc\n") == (4_000_000, "cgroup v2")
    assert tree({}, "")[1] in ("machine", "RLIMIT_AS", "RLIMIT_DATA")


def test_the_agents_record_says_it_and_too_few_cores_are_noted(job: MakeJob) -> None:
    one = job("true", nodes=(Node("localhost", 3),))
    first = min(os.sched_getaffinity(0))
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {first})
    try:
        assert one.run() == 0
    finally:
        os.sched_setaffinity(0, everywhere)
    record = one.record()
    assert (record.cores, record.cpus) == (1, str(first)) and record.memory_bytes and record.memory_by
    assert cramped([record])[0].startswith("1 core for 3 ranks on localhost: below 2 a rank")
    assert cramped([]) == ()
