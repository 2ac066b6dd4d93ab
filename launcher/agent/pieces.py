"""The verb ``pieces``: what of a program's own checkpoint lies here, which attempt wrote it, and its digests."""

from __future__ import annotations

import os
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ..contract.holdings import attempt_numbers, names_in, read_json
from ..contract.kept import files_of
from .data import read
from .digest import digest as digest_here
from .space import free_bytes


def pieces(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, name, marker, python, setup}`` → ``{files: [{path, bytes, modified, digest, attempt}], free_bytes}``;
    ``attempt`` as :func:`with_attempts` has it."""
    run_dir, name, marker = str(request["run_dir"]), str(request["name"]), request.get("marker")
    found = files_of(run_dir, name)
    if marker and str(marker) not in [row["path"] for row in found]:
        found += files_of(run_dir, str(marker))
    told = digests_of({os.path.join(run_dir, row["path"]): None for row in found}, request)
    files = [{**row, "digest": told.get(os.path.join(run_dir, row["path"]))} for row in with_attempts(run_dir, found)]
    at = run_dir if os.path.isdir(run_dir) else os.path.dirname(run_dir)
    return {"files": files, "free_bytes": free_bytes(at)}


def with_attempts(run_dir: str, rows: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Each file's row with ``attempt``: the newest that had begun on this node, by its own clock, when the file was
    written last; 0 when none had, or it came from elsewhere."""
    begun = _begun(run_dir) if rows else []
    return [{**row, "attempt": _attempt_at(begun, row["modified"])} for row in rows]


def _attempt_at(begun: Sequence[Tuple[int, float]], modified: float) -> int:
    return max([k for k, at in begun if at <= modified], default=0)


def with_writers(run_dir: str, found: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The program's checkpoints here with ``written_by``, the newest attempt that wrote a piece of each here, and
    ``whole_by``, the newest that may have written the file that makes it whole. Where no such file is asked for, a
    checkpoint is whole by being there, and nothing is told.

    A file that came from another node bears the time at which it was written there, and changed when it was put here,
    once its attempt had begun: it was written before that one.
    """
    begun = _begun(run_dir) if any(row["marker"] or not row["whole"] for row in found) else []
    told = []
    for row in found:
        marker = row["marker"]
        pieces = [r for r in row["files"] if marker is None or r["path"] != marker["path"]]
        more = {}
        if marker is not None:
            by, came = _attempt_at(begun, marker["modified"]), _attempt_at(begun, marker["changed"])
            more["whole_by"] = max(by, came - 1) if came > by else by
        if marker is not None or not row["whole"]:
            more["written_by"] = max([_attempt_at(begun, r["modified"]) for r in pieces], default=0)
        told.append({**row, **more})
    return told


def digests_of(paths: Mapping[str, Optional[str]], request: Mapping[str, Any]) -> Dict[str, Optional[str]]:
    """By the ranks' Python, after ``setup``."""
    if paths and request.get("python") and os.path.isfile(sys.argv[0]):
        return read(paths, str(request["python"]), str(request.get("setup") or ""))
    return dict(digest_here({"files": dict(paths)})["digests"])


def _begun(run_dir: str) -> List[Tuple[int, float]]:
    """When each attempt began on this node, by its record here."""
    found = []
    for number in attempt_numbers(run_dir):
        folder = os.path.join(run_dir, "attempts", str(number), "nodes")
        records = [read_json(os.path.join(folder, name)) for name in names_in(folder) if name.endswith(".json")]
        times = [r["started_at"] for r in records if isinstance(r, dict) and isinstance(r.get("started_at"), float)]
        found += [(number, min(times))] if times else []
    return found
