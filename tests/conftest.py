"""Fixtures that every room shares: a real cluster to test against.

The cluster (tests/testbed/testbed): a login node and 4 nodes, each in its own network namespace with sshd, and
a real Slurm 22.05 with accounting. Tests that use it carry ``@pytest.mark.testbed`` (the fixtures add it).
It needs root and Debian's packages, which it installs; without root such tests are skipped by name and counted
in the summary, and with ``CI=true`` or ``ZERUN_REQUIRE_TESTBED=1`` their absence is a failure.

``testbed``        session, a :class:`testbed.cluster.Testbed`:
    .ssh_config                  OpenSSH client configuration for ``login`` and ``node01``…``node04`` as ``trainer``;
                                 write it into a cluster's ``ssh: {config: …}``
    .ssh_config_of(user, jump=)  the same for ``tess`` (tcsh that prints) and ``nora`` (bash whose rc prints);
                                 ``jump=True``: nodes only through ``login`` (ProxyJump)
    .exec(host, argv, user="trainer")   run something on a host, not by ssh; ``user=None`` is root
    .home(user)                  where this machine's root sees the cluster's /home/USER
    .processes(host, needle)     what runs there: to show that cancel left nothing
    .kill/.start/.cut/.mend(host), .shape(host, "200mbit")   a power cut, a pulled cable, a slow link: undo it after
    On the hosts: /home is shared by all, /scratch (tmpfs) is each node's own. Users are not root and cannot read
    root's home. Slurm: partitions train (default, 60 min), urgent (preempts train), tiny (1 node, 2 min: a job on 2
    nodes is accepted and never starts), closed (down); 16 CPUs, 8000 MiB and gpu:2 a node; memory is granted
    (CR_CPU_Memory, 100 MiB a CPU by default); account ``lab`` (an unknown one is refused), qos ``normal``, ``patient``.
``testbed_bare``   session: 1 node, Slurm without accounting, which forgets a job 2 s after its end.
``node_python``    session: path of a Python with torch, safetensors, numpy, xxhash that cluster users can run.
                   Use it as ``python:`` and (or /usr/bin/python3) as ``agent_python:`` of a cluster.
``wait_until``     wait_until(condition, timeout_s, message): for what takes its time.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from testbed import cluster

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: Ctrl-C is tested all the same
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that run side by side on this machine must not take each other's slots away.
_LEASES = tempfile.mkdtemp(prefix="zerun-test-leases-")
_lease_folders = itertools.count()
_FIXTURES = {"testbed", "testbed_bare"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the cluster carries the mark and runs last. Each process raises a cluster of its own."""
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.testbed)
    items.sort(key=lambda item: item.get_closest_marker("testbed") is not None)


def pytest_sessionfinish() -> None:
    shutil.rmtree(_LEASES, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    os.environ["ZERUN_LEASES"] = f"{_LEASES}/{next(_lease_folders)}"
    if item.get_closest_marker("testbed") is None:
        return
    reason = cluster.why_not()
    if reason is None:
        return
    if cluster.required():
        pytest.fail(f"{reason}, and ZERUN_REQUIRE_TESTBED or CI says that they must run", pytrace=False)
    pytest.skip(reason)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "testbed" in r.keywords]
    if skipped:
        terminalreporter.section("REAL-CLUSTER TESTS WERE NOT RUN", sep="!", yellow=True, bold=True)
        for report in skipped:
            terminalreporter.write_line(f"not run: {report.nodeid}")
        terminalreporter.write_line(f"{len(skipped)} real-cluster tests were skipped; run as root to run them.")


@pytest.fixture(scope="session")
def testbed() -> Iterator[cluster.Testbed]:
    with cluster.standing("a") as standing:
        yield standing


@pytest.fixture(scope="session")
def testbed_bare() -> Iterator[cluster.Testbed]:
    with cluster.standing("b", nodes=1, accounting=False, options=["--min-job-age", "2", "--gpus", "0"]) as standing:
        yield standing


@pytest.fixture(scope="session")
def node_python() -> str:
    return cluster.make_node_python()


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    return cluster.wait_until


@pytest.fixture(scope="session")
def project() -> Path:
    """The root of the project's tree."""
    return Path(__file__).parents[1]
