"""What a step frees, the next one allocates again: the process keeps it (glibc, on CPU).

Stage 3 allocates and frees every unit twice a step, and autograd every activation. glibc gives the top of the heap
back to the kernel when enough of it is free, and the next step pays a page fault, and a page of zeros, for every
4 KiB it gets anew: thousands a step. The heap's high-water mark is the same either way. This is a setting of the
process, not of the engine's own memory, so whoever has chosen one (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES`` …)
keeps it; other allocators have their own ways, and none of this is asked of them.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers, <malloc.h>
LARGEST_IN_HEAP = 32 * 2**20  # glibc's own upper bound on 64 bits
LARGEST_INT = 2**31 - 1


def keep_freed(device: torch.device) -> bool:
    """Whether this process keeps from now on what it frees."""
    if device.type != "cpu" or not sys.platform.startswith("linux") or _chosen():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    # Both: to set one ends glibc's own adjustment of the other, which would leave it at 128 KiB.
    return bool(mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(TRIM_THRESHOLD, LARGEST_INT))


def _chosen() -> bool:
    said = [name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_")]
    return bool(said) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
