"""Locks that die with the command that holds them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hold(path: Path) -> Iterator[bool]:
    """Holds the lock for the length of a with-block; gives False when another process holds it.

    A lock is a courtesy, not the truth: where the filesystem has none (some NFS), everybody gets True.
    """
    with _opened(path, os.O_RDWR | os.O_CREAT) as handle:
        yield handle is None or _taken(handle, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether some process holds it now."""
    with _opened(path, os.O_RDONLY) as handle:
        return handle is not None and not _taken(handle, fcntl.LOCK_SH)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int | None]:
    try:
        handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError:  # not there yet, or not ours to write
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _taken(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
