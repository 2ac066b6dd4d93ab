"""A folder that becomes another when it is whole, and what is left of those whose command was killed.

``.NAME.PID.part`` lies beside its target. Whoever writes it holds a lock on it, which dies with the command: one that
nobody holds is abandoned, and goes with the next command that writes to the same target.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..contract.errors import Refused
from ..contract.holdings import tree_size
from ..contract.plain import sync_folder
from .moving import size

_PART = re.compile(r"\.(.+)\.[0-9]+\.part")


@contextmanager
def beside(target: Path, notice: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """A folder that becomes ``target`` if all goes well, and is gone otherwise."""
    there = Refused(f"{target} is there already", hint="name a folder that does not exist, or an empty one")
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise there
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_abandoned(target.parent, target.name, notice)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    lock = _make(part)
    try:
        yield part
        sync_folder(part)
        try:
            os.rename(part, target)
        except OSError as problem:
            if problem.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise there from problem  # another command was faster
            raise
        sync_folder(target.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        os.close(lock)


def clear_abandoned(folder: Path, name: str | None = None, notice: Callable[[str], None] = lambda _: None) -> None:
    """Removes this user's abandoned parts of the target ``name`` (None: of all targets) in ``folder``.

    Where the filesystem has no locks (some NFS) nobody can tell, and all stay.
    """
    try:
        found = sorted(os.listdir(folder))
    except OSError:
        return
    for entry in found:
        match = _PART.fullmatch(entry)
        if match is None or name not in (None, match[1]):
            continue
        try:
            handle = _opened(folder / entry)
        except OSError:  # no folder, or not ours to read
            continue
        if handle is None:
            continue
        try:
            if os.fstat(handle).st_uid == os.geteuid() and _locked(handle):
                freed, _ = tree_size(str(folder / entry))
                shutil.rmtree(folder / entry, ignore_errors=True)
                notice(f"removed {folder / entry} ({size(freed)}), which a command that was killed had left")
        finally:
            os.close(handle)


def _make(part: Path) -> int:
    """Makes the folder and takes its lock. Somebody may have taken it for abandoned in between: it is made again."""
    while True:
        with suppress(FileExistsError):
            part.mkdir()
        handle = _opened(part)
        if handle is not None and _locked(handle) is not False:  # without locks nobody clears either
            with suppress(FileNotFoundError):
                if os.stat(part).st_ino == os.fstat(handle).st_ino:
                    return handle
        if handle is not None:
            os.close(handle)
        time.sleep(0.01)


def _opened(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _locked(handle: int) -> bool | None:
    """False when another process holds it, None where there are no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
