"""Floor 4: how a prepared attempt is started, asked after and ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..specs.models import Cluster
    from .protocol import Backend


def open(cluster: Cluster, runtime: tuple[str, bytes], home_runs: Path) -> Backend:
    """The backend of a cluster. ``runtime`` is the shipped zip: its SHA-256 and its bytes.

    Nothing is connected to before it is needed. Close it when done.
    """
    if cluster.backend == "slurm":
        from .slurm import SlurmBackend

        return SlurmBackend(cluster, runtime)
    from .direct import DirectBackend

    return DirectBackend(cluster, runtime, home_runs)
