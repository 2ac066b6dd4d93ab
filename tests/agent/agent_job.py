"""Real agents with real ranks: a runtime folder that Python runs like the shipped zip, and short programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from launcher.contract.launch import LaunchSpec, Node, Program
from launcher.contract.plain import dumps, from_plain
from launcher.contract.records import NodeRecord, ProcessId

PACKAGE = Path(__file__).resolve().parents[2] / "launcher"


def until(check: Callable[[], Any], limit_s: float = 40.0) -> Any:
    """What ``check`` returns, once it is true. Fails when that takes longer than ``limit_s``."""
    end = time.monotonic() + limit_s
    while True:
        found = check()
        if found:
            return found
        assert time.monotonic() < end, f"not true within {limit_s} s: {check}"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text[text.rfind(")") + 2] not in "ZX"


@dataclass
class Job:
    """One attempt in a temporary place, and the agents that a test starts for it."""

    spec: LaunchSpec
    python: str = sys.executable
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.spec.run_dir) / "attempts" / str(self.spec.attempt)

    def write(self, **changes: Any) -> Job:
        self.spec = replace(self.spec, **changes)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "launch.json").write_bytes(dumps(self.spec))
        return self

    def with_settings(self, *lines: str) -> Job:
        """Agents and verbs begin with these lines of Python, in which ``agent`` is the package: limits of the clock
        that a busy machine would pass are set where they decide nothing."""
        modules = sorted({line.split(".")[1] for line in lines})
        main = Path(self.spec.runtime) / "__main__.py"
        beginning = ["from _zerun import agent", *(f"import _zerun.agent.{module}" for module in modules), *lines]
        main.write_text("\n".join([*beginning, main.read_text()]))
        return self

    def agent(self, node: str = "localhost", *more: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        argv = [self.python, self.spec.runtime, "agent", "--run-dir", self.spec.run_dir, "--attempt", "1"]
        argv += ["--node", node, *more] if node else []
        self.agents[node] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=env)
        return self.agents[node]

    def run(self, limit_s: float = 40.0) -> int:
        return self.agent().wait(limit_s)

    def verb(self, verb: str, **request: Any) -> tuple[int, dict[str, Any]]:
        request = {"run_dir": self.spec.run_dir, "attempt": 1, **request}
        done = subprocess.run(
            [self.python, self.spec.runtime, verb], input=json.dumps(request).encode(), capture_output=True, timeout=60
        )
        assert done.stdout, done.stderr.decode()
        return done.returncode, json.loads(done.stdout)

    def record(self, node: str = "localhost") -> NodeRecord:
        return from_plain(NodeRecord, json.loads((self.folder / "nodes" / f"{node}.json").read_bytes()))

    def state(self, node: str = "localhost") -> str:
        try:
            return self.record(node).state
        except FileNotFoundError:
            return ""

    def log(self, rank: int) -> bytes:
        path = self.folder / "logs" / f"rank-{rank:05d}.log"
        return path.read_bytes() if path.exists() else b""

    def owners(self) -> list[ProcessId]:
        paths = (self.folder / "nodes").glob(".*.agent")
        return [from_plain(ProcessId, json.loads(path.read_bytes())) for path in paths]


MakeJob = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[MakeJob]:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    (runtime / "__main__.py").write_text("import sys\nfrom _zerun.agent.main import main\nsys.exit(main())\n")
    (runtime / "_zerun").symlink_to(PACKAGE)
    made: list[Job] = []
    low = 20000 + os.getpid() % 100 * 100

    def make(*argv: str, nodes: tuple[Node, ...] = (Node("localhost", 1),), **changes: Any) -> Job:
        run_dir = tmp_path / "runs" / "run-1"
        run_dir.mkdir(parents=True, exist_ok=True)
        spec = LaunchSpec(
            run="run-1",
            attempt=1,
            run_dir=str(run_dir),
            runtime=str(runtime),
            nodes=nodes,
            shared=True,
            token=os.urandom(16).hex(),
            # All are called run-1, and a run's name says which port it tries first: beside another process's jobs a
            # program found its port taken in the moment between the agent's letting go and its own binding.
            ports=(low, low + 99),
            python=sys.executable,
            agent_python=sys.executable,
            program=Program(argv),
        )
        made.append(Job(spec).write(**changes))
        return made[-1]

    yield make
    for one in made:
        for agent in one.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
                agent.wait()
        if any(lives(owner.pid) for owner in one.owners()):
            one.verb("stop", grace_s=1)
