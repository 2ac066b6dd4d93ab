"""How glibc's heap is used (on CPU): what a step frees is kept, what construction frees is given back.

Stage 3 allocates and frees every unit twice a step, and autograd every activation. glibc gives the top of the heap
back to the kernel when enough of it is free, and the next step pays a page fault, and a page of zeros, for every
4 KiB it gets anew: thousands a step. The heap's high-water mark is the same either way. This is a setting of the
process, not of the engine's own memory, so whoever has chosen one (``MALLOC_TRIM_THRESHOLD_``, ``GLIBC_TUNABLES`` …)
keeps it; other allocators have their own ways, and none of this is asked of them.

Construction is the other way round: it takes and frees whole tensors between pieces that last. An aligned allocation
asks the heap for a little more than it keeps, so that the hole which one leaves is too small for the next of its size:
with a lasting piece behind each hole the heap grows by the whole model. Meanwhile such pieces lie apart from it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers, <malloc.h>
LARGEST_IN_HEAP = 32 * 2**20  # glibc's own upper bound on 64 bits
SMALLEST_APART = 16 * 2**10  # bytes; pages are four
LARGEST_INT = 2**31 - 1

_keeps = False


def keep_freed(device: torch.device) -> bool:
    """Whether this process keeps from now on what it frees."""
    global _keeps
    mallopt = _mallopt()
    if device.type != "cpu" or mallopt is None or _chosen():
        return False
    # Both: to set one ends glibc's own adjustment of the other, which would leave it at 128 KiB.
    _keeps = bool(mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(TRIM_THRESHOLD, LARGEST_INT))
    return _keeps


@contextmanager
def apart() -> Iterator[None]:
    """Inside, what is allocated does not make the heap grow unless it is small, and is given back when it is freed.

    Afterwards the process is as :func:`keep_freed` left it, or as glibc's own adjustment does at its end.
    """
    mallopt = _mallopt()
    if mallopt is None or _chosen() or not mallopt(MMAP_THRESHOLD, SMALLEST_APART):
        yield
        return
    try:
        yield
    finally:
        mallopt(MMAP_THRESHOLD, LARGEST_IN_HEAP)
        mallopt(TRIM_THRESHOLD, LARGEST_INT if _keeps else 2 * LARGEST_IN_HEAP)


def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return None
    return found


def _chosen() -> bool:
    """Whether the environment says anything of glibc's heap: that stays as it is."""
    said = [name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_")]
    return bool(said) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
