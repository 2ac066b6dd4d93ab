"""The verb ``install``: writes the files of an attempt into the run folder of this machine."""

from __future__ import annotations

import base64
import errno
import os
from pathlib import Path
from typing import Any, Dict, Mapping

from ..contract.errors import NoSpace, Refused
from ..contract.plain import dumps, write_atomically


def install(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, files: {relative: base64}, modes?: {relative: int}, secrets?: {path, values}}`` → ``{}``."""
    with_space(request)
    return {}


def with_space(request: Mapping[str, Any]) -> None:
    """Writes files and secrets. Raises Refused for a path that leaves the run folder, NoSpace."""
    run_dir = Path(str(request["run_dir"]))
    modes = request.get("modes") or {}
    try:
        run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
        for name, text in request["files"].items():
            target = inside(run_dir, str(name))
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, base64.b64decode(text), mode=int(modes.get(name, 0o644)))
        if request.get("secrets"):
            write_secrets(str(request["secrets"]["path"]), request["secrets"]["values"], run_dir)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no space for the run's files in {run_dir}: {problem.strerror}") from problem
        raise


def inside(run_dir: Path, name: str) -> Path:
    """The path of a file of the run; it cannot leave the folder by its name."""
    parts = name.split("/")
    if name.startswith("/") or not name or any(p in ("", ".", "..") for p in parts):
        raise Refused(f"{name!r} is not a file inside the run's folder")
    return run_dir / name


def write_secrets(path: str, values: Mapping[str, str], run_dir: Path) -> None:
    """One file for this user alone, in a folder for this user alone, outside the run's folder."""
    target = Path(path)
    if os.path.commonpath([os.path.normpath(path), os.path.normpath(str(run_dir))]) == os.path.normpath(str(run_dir)):
        raise Refused("secrets do not go into the run's folder")
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.parent.chmod(0o700)
    write_atomically(target, dumps(dict(values)), mode=0o600)
