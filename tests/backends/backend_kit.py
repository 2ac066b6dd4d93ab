"""Clusters on the testbed and small submissions for the backends' tests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.cluster import Testbed

from launcher.backends.protocol import Submission
from launcher.bundles import Bundle, runtime_bundle
from launcher.contract.launch import LaunchSpec, Node, Program
from launcher.contract.plain import dumps
from launcher.specs import cluster_from_plain
from launcher.specs.models import Cluster

RUNTIME: Bundle = runtime_bundle()
PYTHON = "/usr/bin/python3"


def cluster_of(testbed: Testbed, backend: str, user: str = "trainer", **more: Any) -> Cluster:
    keys: dict[str, Any] = {
        "name": "lab",
        "backend": backend,
        "paths": {"runs": "~/zerun runs/$USER"},
        "agent_python": PYTHON,
        "python": PYTHON,
        "ssh": {"config": str(testbed.ssh_config_of(user))},
    }
    if backend == "slurm":
        keys |= {"login": {"host": "login"}, "slurm": {"partition": "train"}, "nodes": {"slots": 2}}
        if testbed.accounting:
            keys["slurm"]["account"] = "lab"
    else:
        keys |= {"nodes": {"names": f"node[01-{len(testbed.nodes):02d}]", "slots": 2}}
    return cluster_from_plain(keys | more)


def submission(
    runs: str, body: str, *, options: Sequence[str] = (), nodes: int = 1, secret: Mapping[str, str] | None = None
) -> Submission:
    """A batch script with ``body``, by its own unique name."""
    run = f"try-{secrets.token_hex(4)}"
    name = f"zerun-{run}"
    lines = [f"#SBATCH --job-name={name}", *(f"#SBATCH {o}" for o in options), "#SBATCH --output=/dev/null"]
    script = "\n".join(["#!/bin/bash", *lines, body, ""]).encode()
    spec = launch(runs, run, tuple(Node("", 2) for _ in range(nodes)), ("true",), secret=secret)
    return _submission(run, name, spec, script, secret or {})


def program(
    runs: str, argv: Sequence[str], names: Sequence[str], *, slots: int = 1, shared: bool = True, **more: Any
) -> Submission:
    """A program on nodes of a direct cluster."""
    run = f"try-{secrets.token_hex(4)}"
    spec = launch(runs, run, tuple(Node(n, slots) for n in names), tuple(argv), shared=shared, **more)
    return _submission(run, f"zerun-{run}", spec, b"#!/bin/sh\n", more.get("secret") or {})


def launch(
    runs: str,
    run: str,
    nodes: tuple[Node, ...],
    argv: tuple[str, ...],
    *,
    shared: bool = True,
    secret: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> LaunchSpec:
    return LaunchSpec(
        run=run,
        attempt=1,
        run_dir=f"{runs}/{run}",
        runtime=f"{runs}/.blobs/{RUNTIME.name}",
        nodes=nodes,
        shared=shared,
        token=secrets.token_hex(16),
        python=PYTHON,
        agent_python=PYTHON,
        program=Program(argv),
        env=dict(env or {}),
        secrets=tuple(secret or ()),
        secrets_file=f"{runs}/.secrets/{run}.json" if secret else None,
    )


def _submission(run: str, name: str, spec: LaunchSpec, script: bytes, secret: Mapping[str, str]) -> Submission:
    files = {"attempts/1/script": script, "attempts/1/launch.json": dumps(spec), "run.json": b"{}\n"}
    return Submission(run, 1, name, spec, script, files, {RUNTIME.name: RUNTIME.data}, secret)


def runtime() -> tuple[str, bytes]:
    return RUNTIME.digest, RUNTIME.data


def home(tmp_path: Path) -> Path:
    return tmp_path / "runs"
