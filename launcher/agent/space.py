"""How much may still be written somewhere. Alone in its file, so that asking loads nothing else."""

from __future__ import annotations

import os
from typing import Optional


def free_bytes(folder: str) -> Optional[int]:
    """Bytes that this user may still write where ``folder`` lies, or will lie."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
