"""Slurm's forms of our values."""

from __future__ import annotations

from ..specs.units import slurm_clock


def slurm_time(seconds: int) -> str:
    """``D-HH:MM:SS`` with the days left out where there are none. Slurm rounds up to whole minutes."""
    return slurm_clock(seconds)


def slurm_memory(count: int) -> str:
    """Bytes as whole MiB, rounded up: ``2048M``."""
    return f"{-(-count // 2**20)}M"
