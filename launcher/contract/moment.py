"""A time as people read it. Times come out of files that others wrote, so any number must do."""

from __future__ import annotations

import time


def moment(at: float) -> str:
    """``at``, in seconds since the epoch, on this machine's calendar: ``2026-01-31 14:25:02``."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OSError, OverflowError, ValueError):  # beyond every calendar, or no number at all
        return "an unknown time"
