"""The verb ``left``: how many bytes and files this user may still write somewhere, quotas included.

A quota is asked where there is a command for it: ``lfs quota`` on Lustre, ``quota`` elsewhere. What it says and what
the filesystem has free are both told; what is left is the smaller.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .expand import expand_path

_LIMIT_S = 15.0
_KIB = 1024


class Quota(NamedTuple):
    """Limits are None where there is none. Bytes."""

    used_bytes: int
    limit_bytes: Optional[int]
    used_files: int
    limit_files: Optional[int]


def left(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{paths: {name: path}}`` → ``{name: {path, there, free_bytes, free_files, of_bytes, of_files, quota, by}}``.

    A path is expanded here (``~``, ``$NAME``); one that cannot be is ``{path, problem}``. ``free_*`` is what may still
    be written; ``by`` says who limits it: ``filesystem``, ``quota`` or ``lfs quota``. ``free_files`` is null where
    the filesystem counts none.
    """
    return {str(name): of_path(str(path)) for name, path in request["paths"].items()}


def of_path(path: str) -> Dict[str, Any]:
    try:
        whole = expand_path(path)
    except ValueError as problem:
        return {"path": path, "problem": str(problem)}
    there = os.path.isdir(whole)
    folder = _nearest(whole)
    try:
        found = os.statvfs(folder)
    except OSError as problem:
        return {"path": whole, "problem": f"{folder}: {problem.strerror}"}
    answer: Dict[str, Any] = {
        "path": whole,
        "there": there,
        "free_bytes": found.f_bavail * found.f_frsize,
        "of_bytes": found.f_blocks * found.f_frsize,
        "free_files": found.f_favail if found.f_files else None,
        "of_files": found.f_files or None,
        "quota": None,
        "by": "filesystem",
    }
    asked = _quota(folder)
    if asked is not None:
        by, quota = asked
        answer["quota"] = quota._asdict()
        if quota.limit_bytes is not None and quota.limit_bytes - quota.used_bytes < answer["free_bytes"]:
            answer["free_bytes"], answer["by"] = max(0, quota.limit_bytes - quota.used_bytes), by
        if quota.limit_files is not None:
            rest = max(0, quota.limit_files - quota.used_files)
            if answer["free_files"] is None or rest < answer["free_files"]:
                answer["free_files"] = rest
    return answer


def _nearest(path: str) -> str:
    """The folder itself, or the nearest above it that is there."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _quota(folder: str) -> Optional[Tuple[str, Quota]]:
    """Who was asked and what it said; None where nobody can be asked or no quota is set."""
    kind, device = _mount_of(folder)
    user = str(os.getuid())
    if kind == "lustre" and shutil.which("lfs"):
        found = parse_lfs(_said(["lfs", "quota", "-q", "-u", user, folder]))
        return ("lfs quota", found) if found is not None else None
    if kind in ("tmpfs", "overlay", "") or shutil.which("quota") is None:
        return None
    found = parse_quota(_said(["quota", "-w", "-p", "-f", folder, "-u"]), device)
    return ("quota", found) if found is not None else None


def parse_quota(text: str, device: str) -> Optional[Quota]:
    """``quota -w -p``: ``DEVICE blocks quota limit grace files quota limit grace``, blocks of 1 KiB. A soft limit
    counts: above it writing ends within days. ``device`` picks the line where there are several."""
    rows = [line.split() for line in text.splitlines()]
    rows = [row for row in rows if len(row) >= 8 and re.fullmatch(r"\d+\*?", row[1])]
    row = next((row for row in rows if row[0] == device), rows[0] if len(rows) == 1 else None)
    return _of_words(row[1:]) if row is not None else None


def parse_lfs(text: str) -> Optional[Quota]:
    """``lfs quota -q``: ``PATH kbytes quota limit grace files quota limit grace``; a long path has its own line."""
    words = text.split()
    numbers = next((i for i, word in enumerate(words) if i and re.fullmatch(r"\d+\*?", word)), None)
    return _of_words(words[numbers:]) if numbers is not None and len(words) - numbers >= 7 else None


def _of_words(words: List[str]) -> Optional[Quota]:
    """``blocks soft hard grace files soft hard``; ``*`` marks what is over."""
    try:
        blocks, soft, hard, _, files, file_soft, file_hard = words[:7]
        used, used_files = int(blocks.rstrip("*")), int(files.rstrip("*"))
        limit, file_limit = _least(soft, hard), _least(file_soft, file_hard)
    except ValueError:
        return None
    if limit is None and file_limit is None:
        return None
    return Quota(used * _KIB, None if limit is None else limit * _KIB, used_files, file_limit)


def _least(soft: str, hard: str) -> Optional[int]:
    """The smaller limit; 0 stands for none."""
    limits = [int(text.rstrip("*")) for text in (soft, hard)]
    return min((limit for limit in limits if limit), default=None)


def _mount_of(folder: str) -> Tuple[str, str]:
    """(filesystem type, device) of the mount that ``folder`` lies on."""
    best, found = -1, ("", "")
    real = os.path.realpath(folder)
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            for line in file:
                device, point, kind = line.split(" ")[:3]
                point = point.replace("\\040", " ")
                if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= best:
                    best, found = len(point), (kind, device)
    except (OSError, ValueError):
        pass
    return found


def _said(argv: List[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            universal_newlines=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout  # quota exits 1 above a limit, and tells all the same
