"""The verb ``data``: are a job's files here, how large are they, and what are their digests.

A file is read once: what was found is kept beside the runs by path, size, modification time and inode.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

from ..contract.errors import ZerunError
from ..contract.holdings import read_json
from ..contract.plain import dumps, write_atomically
from . import environment
from .digest import digest as digest_here
from .space import free_bytes


def data(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{files: [{path, algorithm?}], python, setup, cache, fresh?}`` → ``{files: [{path, bytes, digest, problem}],
    free_bytes: {folder: bytes}}``; ``problem`` is a sentence where a file cannot be used, else null.

    ``python`` (after ``setup``, as for the ranks) reads the files; ``fresh`` reads them whatever was kept.
    """
    kept_at = str(request["cache"])
    kept = read_json(kept_at)
    kept = kept if isinstance(kept, dict) else {}
    asked = [(str(f["path"]), f.get("algorithm")) for f in request["files"]]
    rows = [_look(path) for path, _ in asked]
    wanted: Dict[str, Optional[str]] = {}
    for (path, algorithm), row in zip(asked, rows):
        known = kept.get(path)
        same = isinstance(known, dict) and known.get("identity") == row["identity"] and not request.get("fresh")
        if row["problem"] is None and isinstance(known, dict) and same and _fits(known, algorithm):
            row["digest"] = known["digest"]
        elif row["problem"] is None:
            wanted[path] = algorithm
    found = read(wanted, str(request["python"]), str(request.get("setup") or "")) if wanted else {}
    for row in rows:
        if row["path"] in wanted:
            row["digest"] = found.get(row["path"])
            if row["digest"] is None:
                row["problem"] = f"no {wanted[row['path']]} here: {request['python']} -m pip install xxhash"
            elif _look(row["path"])["identity"] == row["identity"]:
                kept[row["path"]] = {"identity": row["identity"], "digest": row["digest"]}
            else:
                row["problem"] = "changed while it was read"
    if found:
        with contextlib.suppress(OSError):  # what cannot be kept is read again
            Path(kept_at).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept_at, dumps(kept))
    folders = sorted({os.path.dirname(row["path"]) for row in rows})
    return {"files": rows, "free_bytes": {folder: free_bytes(folder) for folder in folders}}


def _fits(known: Dict[str, Any], algorithm: Optional[str]) -> bool:
    return algorithm is None or str(known.get("digest")).startswith(f"{algorithm}:")


def _look(path: str) -> Dict[str, Any]:
    row: Dict[str, Any] = {"path": path, "bytes": None, "digest": None, "problem": None, "identity": None}
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            row["problem"] = "is no plain file"
        elif not os.access(path, os.R_OK):
            row["problem"] = "cannot be read: Permission denied"
        row["bytes"], row["identity"] = about.st_size, [about.st_size, about.st_mtime_ns, about.st_ino]
    except FileNotFoundError:
        row["problem"] = "is not there"
    except OSError as problem:
        row["problem"] = f"cannot be looked at: {problem.strerror}"
    return row


def read(files: Mapping[str, Optional[str]], python: str, setup: str) -> Dict[str, Optional[str]]:
    """The digests of ``files`` (path → algorithm or null), by the ranks' Python; by this one if that has none."""
    shell = environment.shell_after_setup(setup)
    argv = [*shell, os.path.expanduser(python), os.path.abspath(sys.argv[0]), "digest"]
    request = json.dumps({"files": dict(files)}).encode()
    site = environment.site(os.environ)
    done = subprocess.run(argv, input=request, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=site)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {}
    if "error" in answer:
        raise ZerunError(str(answer["error"]), hint=answer.get("hint"))
    if "digests" in answer:
        return dict(answer["digests"])
    return dict(digest_here({"files": dict(files)})["digests"])
