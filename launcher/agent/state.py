"""The verb ``state``: what lies in run folders here, told without judging it. Standard library only.

The launcher joins the answers of several places (a cluster without a shared filesystem keeps a run in
pieces), so each answer says what is *here*: records, outcome, which shards of which checkpoint.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from typing import Any, Dict, List, Optional

from ..contract.errors import UsageError
from ..contract.holdings import attempt_numbers, checkpoints_here, names_in, read_json
from ..contract.lineage import resumed_from
from ..contract.plain import PlainError, from_plain, loads, open_file
from ..contract.records import Announcement, NodeRecord, Outcome
from .own_files import foreign_of
from .pieces import with_writers
from .space import free_bytes
from .tail_files import is_alive

__all__ = ["checkpoints_here", "state"]

LAST_LINES = 20
TRACEBACK_LINES = 60
LAST_BYTES = 16384
LINE_BYTES = 2048
_MANY_FILES = 256
_TRACEBACK = "Traceback (most recent call last)"


def state(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dirs, attempt}`` (null: every attempt) → ``{now, runs, free_bytes}``; see the module."""
    try:
        folders = [str(d) for d in request["run_dirs"]]
        attempt = None if request.get("attempt") is None else int(request["attempt"])
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"state: the request cannot be read: {problem!r}") from problem
    runs = {folder: run_state(folder, attempt) for folder in folders}
    return {"now": time.time(), "runs": runs, "free_bytes": free_bytes(folders[0]) if folders else None}


def run_state(folder: str, only: Optional[int] = None) -> Dict[str, Any]:
    attempts: Dict[str, Any] = {}
    for number in attempt_numbers(folder):
        if only is None or number == only:
            attempts[str(number)] = _attempt(os.path.join(folder, "attempts", str(number)))
    return {
        "attempts": attempts,
        "checkpoints": checkpoints_here(folder),
        "foreign": [_short(c) for c in with_writers(folder, foreign_of(folder))],
        "resumed": {str(k): step for k, step in resumed_from(folder).items()},
        "exists": os.path.isdir(folder),
    }


def _short(checkpoint: Dict[str, Any]) -> Dict[str, Any]:
    """Without its files' names, because this is asked often; ``sizes`` lets copies on several nodes be counted once."""
    files = checkpoint["files"]
    sizes = {f"{zlib.crc32(os.fsencode(row['path'])):08x}": row["bytes"] for row in files[:_MANY_FILES]}
    told = {k: v for k, v in checkpoint.items() if k not in ("files", "marker")}
    return told if len(files) > _MANY_FILES else {**told, "sizes": sizes}


def _attempt(folder: str) -> Dict[str, Any]:
    records: List[Dict[str, Any]] = []
    last: Dict[str, List[str]] = {}
    problems: List[str] = []
    for name in names_in(os.path.join(folder, "nodes")):
        if name.startswith(".") or not name.endswith(".json"):
            continue
        value = read_json(os.path.join(folder, "nodes", name))
        try:
            record = from_plain(NodeRecord, value)
        except PlainError as problem:
            problems.append(f"nodes/{name}: {problem}")
            continue
        records.append({**value, "alive": is_alive(value["agent"], record.host)})
        first = record.failure.rank if record.failure is not None else None
        for rank in record.ranks:
            failed = rank.ended and rank.status != 0 and not rank.stopped_by_us
            if failed or rank.rank == first:
                last[str(rank.rank)] = last_lines(os.path.join(folder, "logs", f"rank-{rank.rank:05d}.log"))
    launch = read_json(os.path.join(folder, "launch.json"))
    return {
        "records": records,
        "outcome": _checked(Outcome, os.path.join(folder, "outcome.json"), problems),
        "announcement": _checked(Announcement, os.path.join(folder, "rendezvous.json"), problems),
        "claimed": os.path.isdir(os.path.join(folder, "claim")),
        "job_id": job_id(folder, launch if isinstance(launch, dict) else {}),
        "last_lines": last,
        "progress": _progress(folder, launch if isinstance(launch, dict) else {}),
        "problems": problems,
    }


def _progress(folder: str, launch: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Where rank 0 is, by the last whole line of its metrics."""
    try:
        with open_file(os.path.join(folder, "metrics", "rank-00000.jsonl")) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).split(b"\n")
        last = loads(lines[-2]) if len(lines) > 1 else None
    except (OSError, ValueError):
        return None
    if not isinstance(last, dict) or not isinstance(last.get("step"), int):
        return None
    found: Dict[str, Any] = {"step": last["step"]}
    for key in ("loss", "step_time_s", "tokens_per_s"):
        if isinstance(last.get(key), (int, float)) and math.isfinite(last[key]):
            found[key] = float(last[key])
    train = launch.get("train")
    if isinstance(train, dict) and isinstance(train.get("steps"), int):
        found["steps"] = train["steps"]
    return found


def _checked(kind: Any, path: str, problems: List[str]) -> Any:
    """The plain value of a file when it is what it ought to be, else None with the reason in ``problems``."""
    value = read_json(path)
    if value is None:
        return None
    try:
        from_plain(kind, value)
    except PlainError as problem:
        problems.append(f"{os.path.basename(path)}: {problem}")
        return None
    return value


def job_id(folder: str, launch: Dict[str, Any]) -> Optional[str]:
    """Slurm's number of an attempt: of the script that began, else of the submit."""
    if launch.get("job_id"):
        return str(launch["job_id"])
    try:
        with open(os.path.join(folder, "job"), encoding="utf-8", errors="replace") as file:
            return file.read(256).strip() or None
    except OSError:
        return None


def last_lines(path: str) -> List[str]:
    """The end of a log for people: about 20 lines, more when a traceback begins just before them."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - LAST_BYTES))
            data = file.read(LAST_BYTES)
    except OSError:
        return []
    lines = data.split(b"\n")
    if size > LAST_BYTES:
        lines = lines[1:] or lines
    # What a terminal would show of a line that was written over again and again is its last state.
    shown = [line.rstrip(b"\r").split(b"\r")[-1] for line in lines]
    texts = [line[:LINE_BYTES].decode("utf-8", "replace") for line in shown]
    while texts and not texts[-1].strip():
        texts.pop()
    texts = texts[-TRACEBACK_LINES:]
    begin = max(0, len(texts) - LAST_LINES)
    # Chained tracebacks belong together: the first of them tells the cause.
    starts = [i for i in range(begin) if texts[i].lstrip().startswith(_TRACEBACK)]
    return texts[min([begin, *starts]) :]
