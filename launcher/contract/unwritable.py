"""A folder that takes nothing, a full disk: the same kind of error from every verb, with the path and what to do."""

from __future__ import annotations

import errno
import os
from typing import Optional

from .errors import NoSpace, UsageError, ZerunError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_FREE = "free some there (df -h, and your quota), or name another folder"
_ALLOW = (
    "`ls -ld` says whose that is: see that you may write there, or name another folder: ZERUN_RUNS at home, paths.runs "
    "on a cluster"
)


def of_oserror(problem: OSError, where: str = "") -> ZerunError:
    """What an OSError comes to: NoSpace, else UsageError. ``where`` names the machine."""
    path = _shown(problem)
    said = problem.strerror or str(problem)
    message = ": ".join(part for part in (where, path, said) if part)
    if problem.errno in _FULL:
        return NoSpace(message, hint=_FREE)
    return UsageError(message, hint=_ALLOW if problem.errno in _FORBIDDEN else None)


def of_words(said: str, path: str, where: str) -> Optional[ZerunError]:
    """The same by what a program there said of ``path``; None where it speaks of something else."""
    if "No space left" in said or "quota" in said.lower():
        return NoSpace(f"{where}: no space for {path}: {said}", hint=_FREE)
    for number in _FORBIDDEN:
        if os.strerror(number) in said:
            return UsageError(f"{where}: {path}: {said}", hint=_ALLOW)
    return None


def _shown(problem: OSError) -> str:
    """The path, of a file that is written beside its place the folder."""
    found = problem.filename
    if isinstance(found, int) or found is None:
        return ""
    path = os.fsdecode(found)
    name = os.path.basename(path)
    return os.path.dirname(path) if name.startswith(".") and name.endswith(".part") else path
