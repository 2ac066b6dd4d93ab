"""Slurm's forms of our values."""

from __future__ import annotations


def slurm_time(seconds: int) -> str:
    """``D-HH:MM:SS`` with the days left out where there are none. Slurm rounds up to whole minutes."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def slurm_memory(count: int) -> str:
    """Bytes as whole MiB, rounded up: ``2048M``."""
    return f"{-(-count // 2**20)}M"
