"""The verb ``runs``: which runs lie on this machine, and enough of each to take it up on another laptop.

Standard library only.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pwd
import re
from typing import Any, Dict, List

from ..contract.folder import is_safe_name
from ..contract.holdings import attempt_numbers, names_in, read_json
from ..contract.plain import PlainError, from_plain, to_plain
from ..contract.records import ProcessId
from .state import job_id

_USER = re.compile(r"\$(?:\{(?:USER|LOGNAME)\}|(?:USER|LOGNAME)(?![A-Za-z0-9_]))")


def runs(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{runs, written, all_users, known}`` → ``{runs: [{name, folder, owner, about, attempts}], closed: [folder]}``.

    ``runs`` is the folder here, ``written`` as the description has it: with ``all_users`` its ``$USER`` (or ``~``)
    stands for everybody. Runs that are ``known`` come without ``about``; ``closed`` are those nobody else may read.
    """
    known = set(request.get("known") or [])
    folders = [str(request["runs"])]
    if request.get("all_users"):
        folders += [f for f in _of_everybody(str(request["written"])) if f not in folders]
    found: List[Dict[str, Any]] = []
    closed: List[str] = []
    for folder in folders:
        for name in names_in(folder):
            path = os.path.join(folder, name)
            if not is_safe_name(name) or os.path.islink(path) or not os.path.isdir(path):
                continue
            if not os.access(path, os.R_OK | os.X_OK):
                closed.append(path)
            elif os.path.isdir(os.path.join(path, "attempts")):
                found.append(_run(path, name, name in known))
    return {"runs": found, "closed": closed}


def _of_everybody(written: str) -> List[str]:
    pattern = _USER.sub("*", written)
    if pattern == "~" or pattern.startswith("~/"):
        pattern = os.path.join(os.path.dirname(os.path.expanduser("~")), "*") + pattern[1:]
    return sorted(glob.glob(os.path.expandvars(pattern)))


def _run(path: str, name: str, known: bool) -> Dict[str, Any]:
    about = None if known else read_json(os.path.join(path, "run.json"))
    return {
        "name": name,
        "folder": path,
        "owner": _owner(path),
        "about": about if isinstance(about, dict) else None,
        "attempts": {} if known else {str(k): _attempt(path, k) for k in attempt_numbers(path)[-1:]},
    }


def _owner(path: str) -> str:
    uid = os.stat(path).st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _attempt(path: str, number: int) -> Dict[str, Any]:
    """What the journal of the laptop that submitted it says, as far as it lies here too."""
    folder = os.path.join(path, "attempts", str(number))
    launch = read_json(os.path.join(folder, "launch.json"))
    launch = launch if isinstance(launch, dict) else {}
    told = launch.get("nodes")
    nodes: List[Any] = told if isinstance(told, list) else []
    slots = [node.get("slots") for node in nodes if isinstance(node, dict)]
    agents: Dict[str, Any] = {}
    for record in (read_json(os.path.join(folder, "nodes", n)) for n in names_in(os.path.join(folder, "nodes"))):
        with contextlib.suppress(PlainError):
            record = record if isinstance(record, dict) else {}
            agents[str(record.get("node"))] = to_plain(from_plain(ProcessId, record.get("agent")))
    return {
        "num_nodes": max(1, len(nodes)),
        "ranks": sum(s for s in slots if isinstance(s, int)),
        "runtime": os.path.basename(str(launch.get("runtime") or "")),
        "resume_step": launch.get("resume_step"),
        "job": job_id(folder, launch),
        "inside": _inside(folder),
        "agents": agents,
        "at": _written_at(os.path.join(folder, "launch.json")),
    }


def _inside(folder: str) -> Any:
    """The shell of an attempt that was started inside an allocation."""
    told = read_json(os.path.join(folder, "here"))
    return told.get("pid") if isinstance(told, dict) else None


def _written_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
