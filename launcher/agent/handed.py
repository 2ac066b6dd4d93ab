"""The verb ``handed``: what other nodes have of a program's own checkpoint, brought here and proven.

What comes waits in ``RUN/.handed/K`` and takes its place once attempt K has unpacked its code: a folder that is there
before would step aside. The file that makes the checkpoint whole goes last.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from ..contract.errors import NoSpace, Refused, VerificationFailed
from ..contract.kept import is_kept, marker_of
from ..contract.launch import LaunchSpec
from ..contract.plain import sync_folder
from .pieces import digests_of
from .shardstream import fetch
from .space import free_bytes

FOLDER = ".handed"
_SPARE_BYTES = 64 * 2**20

Row = Dict[str, Any]  # of a file: path, bytes, digest, modified


def handed(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, attempt, token, python, setup, sources: [{addresses, port, files: [row]}], pushed: [row]}`` →
    ``{files, bytes}``.

    Brings the files of ``sources``, and proves them and those that were ``pushed`` here. Raises NoSpace (before
    anything comes), Unreachable, VerificationFailed; nothing of it is left then.
    """
    base = Path(str(request["run_dir"])) / FOLDER
    folder, pushed = base / str(int(request["attempt"])), [_checked(row) for row in request["pushed"]]
    coming = [_checked(row) for source in request["sources"] for row in source["files"]]
    if not pushed:
        shutil.rmtree(base, ignore_errors=True)  # of a resume that never began
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(str(folder), coming)
        for source in request["sources"]:
            places = [(str(address), int(source["port"])) for address in source["addresses"]]
            for row in source["files"]:
                beside = folder / row["path"]
                beside.parent.mkdir(parents=True, exist_ok=True)
                fetch(places, str(request["token"]), row, row["path"], str(beside))
        rows = [*coming, *pushed]
        _prove(folder, rows, request)
        now = time.time() - 1.0  # or a clock that is ahead elsewhere would say that the coming attempt wrote it
        for row in rows:
            os.utime(folder / row["path"], (min(row["modified"], now),) * 2)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {"files": len(rows), "bytes": sum(row["bytes"] for row in rows)}


def place(spec: LaunchSpec) -> int:
    """Puts what waits for this attempt where it belongs; what waits for another is forgotten. Returns how many files.

    Raises Refused where a link leads out of the run's folder, OSError.
    """
    run_dir = os.path.realpath(spec.run_dir)
    base = Path(run_dir) / FOLDER
    folder = base / str(spec.attempt)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    foreign = spec.foreign
    marker = marker_of(spec.resume_from or "", foreign.whole_when) if foreign and foreign.whole_when else None
    if marker in names:
        _forget(run_dir, marker)
    for name in sorted(names, key=lambda name: name == marker):
        target = Path(run_dir) / name
        there = target.parent
        while not os.path.lexists(there):
            there = there.parent
        if os.path.realpath(there) != str(there) or not is_kept(name):
            raise Refused(f"{target} is not inside the run's folder: a link is in the way")
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, target)
        sync_folder(target.parent)
    shutil.rmtree(base, ignore_errors=True)
    return len(names)


def _forget(run_dir: str, marker: str) -> None:
    """Until all is in its place: were this killed, an earlier attempt's mark would call a mixture whole."""
    path = Path(run_dir) / marker
    if os.path.realpath(path.parent) == str(path.parent) and is_kept(marker):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            sync_folder(path.parent)


def _checked(row: Row) -> Row:
    if not is_kept(str(row["path"])):
        raise Refused(f"{row['path']!r} is no file of the job's own")
    return row


def _check_room(folder: str, rows: List[Row]) -> None:
    wanted, free = sum(int(row["bytes"]) for row in rows), free_bytes(folder)
    if wanted and free is not None and wanted + _SPARE_BYTES > free:
        raise NoSpace(f"{wanted} bytes are to come, {free} are free at {folder}")


def _prove(folder: Path, rows: List[Row], request: Mapping[str, Any]) -> None:
    wanted: Dict[str, Optional[str]] = {}
    for row in rows:
        wanted[str(folder / row["path"])] = str(row["digest"]).partition(":")[0]
    found = digests_of(wanted, request)
    for row in rows:
        told = found.get(str(folder / row["path"]))
        if told is None:
            algorithm = str(row["digest"]).partition(":")[0]
            raise VerificationFailed(f"{row['path']} came, and nothing here computes {algorithm} to prove it")
        if told != row["digest"]:
            raise VerificationFailed(f"{row['path']} came as {told}, it is {row['digest']} where it was written")
