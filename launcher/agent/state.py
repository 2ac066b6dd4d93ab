"""The verb ``state``: what lies in run folders here, told without judging it. Standard library only.

The launcher joins the answers of several places (a cluster without a shared filesystem keeps a run in
pieces), so each answer says what is *here*: records, outcome, which shards of which checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from ..contract.errors import UsageError
from ..contract.folder import rank_of, step_of
from ..contract.plain import PlainError, from_plain
from ..contract.records import Announcement, NodeRecord, Outcome
from .tail_files import is_alive, read_json

LAST_LINES = 20
TRACEBACK_LINES = 60
LAST_BYTES = 16384
LINE_BYTES = 2048
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


def free_bytes(folder: str) -> Optional[int]:
    """Bytes that this user may still write where ``folder`` lies, or will lie."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def run_state(folder: str, only: Optional[int] = None) -> Dict[str, Any]:
    attempts: Dict[str, Any] = {}
    for number in _attempt_numbers(folder):
        if only is None or number == only:
            attempts[str(number)] = _attempt(os.path.join(folder, "attempts", str(number)))
    return {"attempts": attempts, "checkpoints": checkpoints_here(folder), "exists": os.path.isdir(folder)}


def _names(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _attempt_numbers(folder: str) -> List[int]:
    names = _names(os.path.join(folder, "attempts"))
    return sorted(int(n) for n in names if re.fullmatch(r"[1-9][0-9]{0,8}", n))


def _attempt(folder: str) -> Dict[str, Any]:
    records: List[Dict[str, Any]] = []
    last: Dict[str, List[str]] = {}
    problems: List[str] = []
    for name in _names(os.path.join(folder, "nodes")):
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
        "job_id": _job_id(folder, launch if isinstance(launch, dict) else {}),
        "last_lines": last,
        "problems": problems,
    }


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


def _job_id(folder: str, launch: Dict[str, Any]) -> Optional[str]:
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
        with open(path, "rb") as file:
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


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoints_here(folder: str) -> List[Dict[str, Any]]:
    """Every checkpoint folder of the run here, by step.

    ``whole`` and ``problem`` judge what should be here; ``sizes`` (rank → bytes of its file here) and
    ``shards`` (``[rank, node, bytes]`` as the manifest says) let the launcher judge all places together.
    """
    found = []
    here = None if _is_shared(folder) else _nodes_here(folder)
    for name in _names(os.path.join(folder, "checkpoints")):
        step = step_of(name)
        if step is not None:
            found.append(_checkpoint(os.path.join(folder, "checkpoints", name), step, here))
    return sorted(found, key=lambda c: c["step"])


def _is_shared(folder: str) -> bool:
    for number in reversed(_attempt_numbers(folder)):
        launch = read_json(os.path.join(folder, "attempts", str(number), "launch.json"))
        if isinstance(launch, dict):
            return bool(launch.get("shared", True))
    return True


def _nodes_here(folder: str) -> Set[str]:
    """The nodes whose agents wrote into this folder: on a cluster without a shared filesystem, this one."""
    names: Set[str] = set()
    for number in _attempt_numbers(folder):
        nodes = _names(os.path.join(folder, "attempts", str(number), "nodes"))
        names.update(n[: -len(".json")] for n in nodes if n.endswith(".json") and not n.startswith("."))
    return names


def _checkpoint(folder: str, step: int, here: Optional[Set[str]]) -> Dict[str, Any]:
    sizes: Dict[int, int] = {}
    has_manifest = False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                has_manifest = has_manifest or entry.name == "manifest.json"
                rank = rank_of(entry.name)
                if rank is not None and entry.name == f"rank-{rank:05d}.safetensors":
                    sizes[rank] = entry.stat().st_size
    except OSError as problem:
        return _about(step, sizes, None, 0, [], f"cannot be read: {problem.strerror}")
    if not has_manifest:
        return _about(step, sizes, None, 0, [], "no manifest: it was never finished")
    try:
        attempt, shards = read_shards(os.path.join(folder, "manifest.json"), step)
    except (OSError, ValueError) as problem:
        return _about(step, sizes, None, 0, [], f"its manifest cannot be read: {problem}")
    wrong = []
    for rank, node, size in shards:
        if here is not None and node not in here:
            continue
        if rank not in sizes:
            wrong.append(f"rank {rank}'s shard is missing on {node}")
        elif sizes[rank] != size:
            wrong.append(f"rank {rank}'s shard on {node} has {sizes[rank]} bytes of {size}")
    return _about(step, sizes, shards, attempt, wrong, "")


def _about(
    step: int,
    sizes: Dict[int, int],
    shards: Optional[List[Tuple[int, str, int]]],
    attempt: int,
    wrong: List[str],
    problem: str,
) -> Dict[str, Any]:
    right = {rank: size for rank, _, size in shards or ()}
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    problem = problem or "; ".join(wrong[:3]) + more
    return {
        "step": step,
        "whole": shards is not None and not problem,
        "problem": problem or None,
        "bytes": sum(sizes.values()),
        "shards_here": sorted(r for r in sizes if sizes[r] == right.get(r, sizes[r])),
        "manifest": shards is not None,
        "attempt": attempt,
        "sizes": {str(rank): size for rank, size in sorted(sizes.items())},
        "shards": None if shards is None else [list(shard) for shard in shards],
    }


def read_shards(path: str, step: int) -> Tuple[int, List[Tuple[int, str, int]]]:
    """The attempt that wrote a manifest and its shards as (rank, node, bytes); ValueError when it is damaged.

    Reads only these: a whole ``Manifest`` of a large model is much more work, and ``state`` is asked often.
    """
    with open(path, "rb") as file:
        value = json.loads(file.read())
    try:
        if value["step"] != step:
            raise ValueError(f"it says step {value['step']}")
        shards = []
        for shard in value["shards"]:
            rank = int(shard["rank"])
            if shard["file"] != f"rank-{rank:05d}.safetensors":
                raise ValueError(f"it names the file {shard['file']!r} for rank {rank}")
            shards.append((rank, str(shard["node"]), int(shard["bytes"])))
        return int(value["attempt"]), shards
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{type(problem).__name__}: {problem}") from problem
