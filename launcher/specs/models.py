"""The typed, frozen descriptions: what every key of a cluster and a job means.

Values arrive as text exactly as it was written (specs.load); each field's type decides what it is.
Bytes and bytes a second are integers, durations whole seconds.
"""

from __future__ import annotations

from .checkpoint_model import Checkpoint
from .cluster_model import Cluster, Network, NodeEntry, Nodes, Paths, Ssh
from .data_model import Data
from .description import Description
from .device_model import Device
from .job_model import Batch, Code, Evaluate, Job, Parallel
from .optimizer_model import Optimizer, OptimizerGroup
from .pool_model import Pool
from .program_model import Program
from .slurm_model import Login, Slurm
from .trained_model import FactoryModel, GptModel
from .values import Bytes, Rate, Seconds
from .zero_model import Units, Zero

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
    "OptimizerGroup",
    "Parallel",
    "Paths",
    "Pool",
    "Program",
    "Rate",
    "Seconds",
    "Slurm",
    "Ssh",
    "Units",
    "Zero",
]
