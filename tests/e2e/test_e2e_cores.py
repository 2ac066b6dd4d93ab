"""A Slurm that binds: ranks get the cores that were asked for, and a run with too few says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_site import Site
from testbed.cluster import Testbed, standing

PROGRAM = """\
name: p
time: 5:00
code: {root: ..}
program: {argv: [python3, -c, "import os; print('cores', len(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])"]}
"""


@pytest.fixture
def binding() -> Iterator[Testbed]:
    """TaskPlugin=task/affinity works in these namespaces, on the CPUs that the machine has. (task/cgroup is not tried:
    the hosts of the testbed mount the freezer hierarchy alone.)"""
    options = ["--cpus", "2", "--gpus", "0", "--memory", "4000", "--task-plugin", "affinity"]
    with standing("c", nodes=1, accounting=False, options=options) as bed:
        yield bed


@pytest.mark.full
@pytest.mark.testbed
def test_one_cpu_a_rank_is_really_one(site: Site, binding: Testbed) -> None:
    site.write(
        "clusters/uni.yaml",
        f"""\
name: uni
backend: slurm
login: {{host: login}}
ssh: {{config: {binding.ssh_config}}}
nodes: {{slots: 1, cpus_per_slot: 1, memory_per_slot: 1GiB}}
paths: {{runs: ~/zerun}}
agent_python: /usr/bin/python3
""",
    )
    site.write("jobs/p.yaml", PROGRAM)
    run = site.zerun("submit", "jobs/p.yaml", "--cluster", "uni", "--follow").stdout.strip()
    assert "cores 1 1" in site.zerun("logs", run).stdout
    assert "1 core for 1 rank on node01: below 2 a rank" in site.zerun("status", run).stdout
    two = site.zerun("submit", "jobs/p.yaml", "-c", "uni", "--set", "cluster.nodes.cpus_per_slot=2", "--follow")
    assert "cores 2 2" in site.zerun("logs", two.stdout.strip()).stdout
    assert "below 2 a rank" not in site.zerun("status", two.stdout.strip()).stdout
