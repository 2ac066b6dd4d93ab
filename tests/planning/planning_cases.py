"""Small descriptions that the tests of planning and rendering vary."""

from __future__ import annotations

from typing import Any

from launcher.specs.models import Cluster, Job

JOB: dict[str, Any] = {
    "name": "small",
    "nodes": 2,
    "model": {"kind": "gpt", "layers": 2, "hidden": 64, "heads": 4, "seq_len": 32},
    "data": {"text": "python-stdlib"},
    "zero": {"stage": 2},
    "optimizer": {"lr": 1e-3, "clip": 1.0, "warmup": 5},
    "batch": {"global": 16, "micro": 2},
    "steps": 10,
    "evaluate": {"every": 5, "tokens": 4096},
    "checkpoint": {"every": 5, "keep": 2},
}
DIRECT: dict[str, Any] = {
    "name": "lab",
    "backend": "direct",
    "nodes": {"names": "node[01-04]", "slots": 2},
    "paths": {"runs": "/scratch/runs", "shared": False},
}
SLURM: dict[str, Any] = {
    "name": "site",
    "backend": "slurm",
    "slurm": {"partition": "train"},
    "nodes": {"names": "gpu[01-04]", "slots": 2},
    "paths": {"runs": "/lustre/runs"},
}


def job(**changes: Any) -> Job:
    """The small job with some keys changed; None leaves a key out."""
    return Job.model_validate(_changed(JOB, changes))


def direct(**changes: Any) -> Cluster:
    return Cluster.model_validate(_changed(DIRECT, changes))


def slurm(**changes: Any) -> Cluster:
    return Cluster.model_validate(_changed(SLURM, changes))


def _changed(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in {**base, **changes}.items() if v is not None}
