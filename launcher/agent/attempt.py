"""Which attempt, and which of its nodes: read from launch.json, the command line and Slurm."""

from __future__ import annotations

import socket
from pathlib import Path, PurePosixPath
from typing import Mapping, Optional, Tuple

from ..contract.errors import UsageError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.plain import from_plain, loads


def find_place(spec: LaunchSpec, node: Optional[str], environ: Mapping[str, str]) -> Tuple[int, str]:
    """(node rank, name) of the agent: by ``--node``, or by what Slurm says to its step.

    Raises :class:`UsageError` when neither names a node of the job.
    """
    if node is not None:
        for index, entry in enumerate(spec.nodes):
            if entry.name == node:
                return index, node
        raise UsageError(f"node {node!r} is not in this attempt", hint="launch.json names its nodes")
    index_text = environ.get("SLURM_NODEID", "0" if len(spec.nodes) == 1 else "")
    if not index_text.isdigit() or int(index_text) >= len(spec.nodes):
        raise UsageError(f"no --node, and SLURM_NODEID is {index_text!r} for {len(spec.nodes)} nodes")
    name = environ.get("SLURMD_NODENAME") or spec.nodes[int(index_text)].name or socket.gethostname().split(".")[0]
    return int(index_text), name


def load(run_dir: str, attempt: int) -> LaunchSpec:
    path = Path(RunFolder(PurePosixPath(run_dir)).attempt(attempt).launch)
    try:
        return from_plain(LaunchSpec, loads(path.read_bytes()))
    except (OSError, ValueError) as problem:
        raise UsageError(f"{path}: {problem}") from problem
