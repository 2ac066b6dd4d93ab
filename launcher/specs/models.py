"""The typed, frozen descriptions: what every key of a cluster and a job means.

Values arrive as text exactly as it was written (specs.load); each field's type decides what it is.
Bytes and bytes a second are integers, durations whole seconds.
"""

from __future__ import annotations

from .cluster_model import Cluster, Device, Login, Network, NodeEntry, Nodes, Paths, Slurm, Ssh
from .description import Description
from .job_model import (
    Batch,
    Checkpoint,
    Code,
    Data,
    Evaluate,
    FactoryModel,
    GptModel,
    Job,
    Optimizer,
    Parallel,
    Program,
    Zero,
)
from .values import Bytes, Rate, Seconds

__all__ = [
    "Batch",
    "Bytes",
    "Checkpoint",
    "Cluster",
    "Code",
    "Data",
    "Description",
    "Device",
    "Evaluate",
    "FactoryModel",
    "GptModel",
    "Job",
    "Login",
    "Network",
    "NodeEntry",
    "Nodes",
    "Optimizer",
    "Parallel",
    "Paths",
    "Program",
    "Rate",
    "Seconds",
    "Slurm",
    "Ssh",
    "Zero",
]
