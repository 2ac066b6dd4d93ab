"""The verb ``inventory``: which files of a run lie here and how large they are, for bringing them home.

Names are relative to the run folder. Symbolic links, half-written files (``.name.part``), shipped code
and data are left out: code is at home already, data is made or lies elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from typing import Any, Dict, List, Optional

from ..contract.errors import UsageError
from ..contract.folder import step_of
from .state import checkpoints_here

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_COLLECTED = re.compile(rf"attempts/[1-9][0-9]{{0,8}}/(?:{_NAME}|(?:nodes|logs|metrics)/{_NAME})")
_SHARD = re.compile(r"(?:rank-[0-9]{5,}\.safetensors|manifest\.json)")


def is_collected(name: str) -> bool:
    """Whether ``name`` is one of the files beside checkpoints that ``collect`` brings home."""
    return bool(_COLLECTED.fullmatch(name)) and ".." not in name


def is_checkpoint_file(name: str) -> bool:
    return bool(_SHARD.fullmatch(name))


def inventory(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, checkpoint}`` → ``{files, checkpoint, rsync, identity}``; sizes in bytes.

    ``checkpoint`` is ``newest`` (the newest that is whole as far as this place can tell), a step or null.
    ``identity`` tells whether this folder and another are the same one.
    """
    try:
        run_dir, wanted = str(request["run_dir"]), request.get("checkpoint")
        wanted = wanted if wanted in (None, "newest") else int(wanted)
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"inventory: the request cannot be read: {problem!r}") from problem
    attempts = os.path.join(run_dir, "attempts")
    files = [f for f in _files(run_dir, attempts) if is_collected(f["path"])]
    return {
        "files": files,
        "checkpoint": _checkpoint(run_dir, wanted),
        "rsync": shutil.which("rsync") is not None,
        "identity": identity(run_dir),
    }


def identity(folder: str) -> Optional[List[str]]:
    """What only one folder in the world has: the machine's boot, the device and the inode."""
    try:
        found = os.stat(folder)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return [file.read().strip(), str(found.st_dev), str(found.st_ino)]
    except OSError:
        return None


def _files(run_dir: str, folder: str) -> List[Dict[str, Any]]:
    found = []
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(at, name)
            try:
                facts = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode):
                found.append({"path": os.path.relpath(path, run_dir), "bytes": facts.st_size})
    return found


def _checkpoint(run_dir: str, wanted: Any) -> Optional[Dict[str, Any]]:
    if wanted is None:
        return None
    folder = os.path.join(run_dir, "checkpoints")
    if wanted == "newest":
        whole = [c["step"] for c in checkpoints_here(run_dir) if c["whole"]]
        if not whole:
            return None
        wanted = whole[-1]
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if step_of(name) == wanted:
            files = _files(os.path.join(folder, name), os.path.join(folder, name))
            return {"step": wanted, "files": [f for f in files if is_checkpoint_file(f["path"])]}
    return None
