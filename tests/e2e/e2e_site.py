"""A user's project on a laptop, and the clusters of the testbed as that user would describe them.

Everything here goes through the ``zerun`` command in processes of its own, as a person would use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

GPT = """\
name: {name}
nodes: {nodes}
slots_per_node: 2
time: 10:00
model: {{kind: gpt, layers: 2, hidden: 33, heads: 3, seq_len: 24, vocab: 256}}
data: {{text: python-stdlib}}
zero: {{stage: {stage}}}
optimizer: {{lr: 3e-3, clip: 1.0, warmup: 2}}
batch: {{global: 16, micro: 1}}
steps: {steps}
seed: 5
evaluate: {{every: 1000, tokens: 2048}}
checkpoint: {{every: {every}, keep: 3}}
"""
PROGRAM = """\
name: {name}
nodes: {nodes}
slots_per_node: 2
time: {time}
code: {{root: ..}}
program: {{argv: [{python}, script.py], stop_grace: 5s}}
{more}
"""


@dataclass
class Site:
    """A folder with clusters/ and jobs/; ``zerun(...)`` runs the command in it."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *argv: str, **more: Any) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("zerun")), *argv]
        return subprocess.Popen(
            command, cwd=self.folder, env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
        )  # fmt: skip

    def zerun(self, *argv: str, code: int | None = 0, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs to the end; ``code`` is the exit status expected (None: any)."""
        process = self.start(*argv)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"zerun {' '.join(argv)} took over {timeout_s} s:\n{out!r}\n{err!r}") from None
        done = subprocess.CompletedProcess(argv, process.returncode, out.decode(), err.decode())
        said = f"zerun {' '.join(argv)} → {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, said
        return done

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self.zerun(*argv, "--json", code=code).stdout)

    def run_folder(self, run: str) -> Path:
        return self.folder / "runs" / run


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "project"
    (folder / "clusters").mkdir(parents=True)
    (folder / "jobs").mkdir()
    config = tmp_path / "config"
    config.mkdir()
    return Site(folder, {"XDG_CONFIG_HOME": str(config), "ZERUN_RUNS": "", "ZERUN_CLUSTER": ""})


@pytest.fixture
def laptop(site: Site) -> Site:
    """The laptop cluster: direct, on this very machine."""
    site.write(
        "clusters/here.yaml",
        "name: here\nbackend: direct\nnodes: {names: localhost, slots: 2}\nenv: {OMP_NUM_THREADS: '1'}\n",
    )
    return site


@pytest.fixture
def slurm(site: Site, testbed: Any, node_python: str) -> Site:
    """The testbed's Slurm, reached over SSH as a bash user."""
    return describe_slurm(site, testbed, node_python, testbed.user)


def describe_slurm(site: Site, testbed: Any, node_python: str, user: str) -> Site:
    site.write(
        "clusters/uni.yaml",
        f"""\
name: uni
backend: slurm
login: {{host: login}}
ssh: {{config: {testbed.ssh_config_of(user)}}}
slurm: {{partition: train}}
nodes: {{names: "node[01-04]", slots: 2, cpus_per_slot: 1, memory_per_slot: 1GiB}}
paths: {{runs: ~/zerun}}
python: {node_python}
agent_python: /usr/bin/python3
env: {{OMP_NUM_THREADS: '1'}}
""",
    )
    return site


@pytest.fixture
def rack(site: Site, testbed: Any, node_python: str) -> Site:
    """The testbed's nodes as machines without a scheduler and without a shared disk."""
    return describe_rack(site, testbed, node_python, testbed.user)


def describe_rack(site: Site, testbed: Any, node_python: str, user: str) -> Site:
    site.write(
        "clusters/rack.yaml",
        f"""\
name: rack
backend: direct
nodes: {{names: "node[01-04]", slots: 2}}
ssh: {{config: {testbed.ssh_config_of(user)}}}
paths: {{runs: /scratch/$USER/zerun, shared: false}}
python: {node_python}
agent_python: /usr/bin/python3
env: {{OMP_NUM_THREADS: '1'}}
""",
    )
    return site


@pytest.fixture
def leftovers(testbed: Any) -> Callable[[str], list[str]]:
    """What still runs of a run anywhere on the testbed."""

    def look(run: str) -> list[str]:
        return [f"{host}: {line}" for host in testbed.nodes for line in testbed.processes(host, run)]

    return look
