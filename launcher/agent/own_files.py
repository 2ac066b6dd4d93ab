"""The job's own files in a run's folder: its checkpoints, its outputs, and their digests (verb ``digests``)."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Optional

from ..contract.errors import Refused
from ..contract.holdings import attempt_numbers, read_json
from ..contract.kept import Foreign, foreign_here, is_kept, outputs_here
from .digest import digest as digest_here


def _launch(run_dir: str) -> Dict[str, Any]:
    """The newest attempt's launch.json as it stands, {} when there is none yet."""
    for number in reversed(attempt_numbers(run_dir)):
        found = read_json(os.path.join(run_dir, "attempts", str(number), "launch.json"))
        if isinstance(found, dict):
            return found
    return {}


def foreign_of(run_dir: str) -> List[Dict[str, Any]]:
    """The program's own checkpoints here, newest last (contract.kept.foreign_here)."""
    said = _launch(run_dir).get("foreign")
    return foreign_here(run_dir, _foreign(said)) if isinstance(said, dict) else []


def _foreign(said: Dict[str, Any]) -> Optional[Foreign]:
    pattern, whole_when = said.get("pattern"), said.get("whole_when")
    return Foreign(str(pattern), None if whole_when is None else str(whole_when)) if pattern else None


def outputs_of(run_dir: str) -> List[Dict[str, Any]]:
    """Files that match the job's ``outputs``: ``{path, bytes, modified}``."""
    said = _launch(run_dir).get("outputs")
    return outputs_here(run_dir, [str(pattern) for pattern in said]) if isinstance(said, list) else []


def is_own(run_dir: str, name: str) -> bool:
    """Whether ``name`` is a plain file of the job's own, with no link on the way to it."""
    path = os.path.join(run_dir, name)
    inside = os.path.realpath(path) == os.path.join(os.path.realpath(run_dir), name)
    return is_kept(name) and inside and os.path.isfile(path)


def open_own(run_dir: str, name: str) -> int:
    """A descriptor of a file of the job's own. Raises OSError for anything else."""
    if not is_own(run_dir, name):
        raise FileNotFoundError(2, "it is no file of the job's own")
    return os.open(os.path.join(run_dir, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def digests(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, files}`` (relative) → ``{digests: {file: "xxh3:…"}}``, read by the ranks' Python where it has xxhash.

    Raises Refused for a name that is no file of the job's own.
    """
    from .data import read

    run_dir = str(request["run_dir"])
    names = [str(name) for name in request["files"]]
    for name in names:
        if not is_own(run_dir, name):
            raise Refused(f"{name!r} is no file of the job's own in {run_dir}")
    launch = _launch(run_dir)
    paths: Dict[str, Optional[str]] = {os.path.join(run_dir, name): None for name in names}
    if launch.get("python") and os.path.isfile(sys.argv[0]):
        found = read(paths, str(launch["python"]), str(launch.get("setup") or ""))
    else:
        found = dict(digest_here({"files": paths})["digests"])
    return {"digests": {name: found.get(os.path.join(run_dir, name)) for name in names}}
