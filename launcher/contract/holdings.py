"""What of a run lies in a folder, told the same way by an agent on a node and by the launcher at home.

Which files a run may consist of (names that come from elsewhere are held against it), which checkpoints
are there and what is missing of them, and whether two folders are the same one.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from typing import Any, Dict, List, Optional, Set, Tuple

from .damage import damage_in, is_note
from .folder import rank_of, step_of
from .plain import loads, open_file

RECORD_BYTES = 2**20
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_COLLECTED = re.compile(rf"attempts/[1-9][0-9]{{0,8}}/(?:{_NAME}|(?:nodes|logs|metrics)/{_NAME})")
REPLICAS = "replicas.json"  # which of the shards in a checkpoint's folder are copies of another node's
_SHARD = re.compile(r"(?:rank-[0-9]{5,}\.safetensors|manifest\.json)")


def is_collected(name: str) -> bool:
    """Whether ``name`` is one of the files beside checkpoints that ``collect`` brings home."""
    return bool(_COLLECTED.fullmatch(name)) and ".." not in name


def is_checkpoint_file(name: str) -> bool:
    return bool(_SHARD.fullmatch(name))


def record_digest(path: str) -> Optional[str]:
    """Of a record (a small .json, rewritten in place, at the same size perhaps): what tells it from its older self."""
    if not path.endswith(".json"):
        return None
    try:
        with open_file(path) as file:
            data = file.read(RECORD_BYTES + 1)
    except OSError:
        return None
    return hashlib.blake2b(data, digest_size=16).hexdigest() if len(data) <= RECORD_BYTES else None


def identity(folder: str) -> Optional[List[str]]:
    """What only one folder in the world has: the machine's boot, the device and the inode."""
    try:
        found = os.stat(folder)
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return [file.read().strip(), str(found.st_dev), str(found.st_ino)]
    except OSError:
        return None


def read_json(path: str) -> Any:
    """The JSON value in a file; None when it is missing or is not JSON (yet)."""
    try:
        with open_file(path) as file:
            return loads(file.read())
    except (OSError, ValueError):
        return None


def names_in(folder: str) -> List[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def tree_size(folder: str) -> Tuple[int, int]:
    """Bytes of all files below ``folder``, and how many; links count as themselves."""
    size = files = 0
    waiting = [folder]  # no recursion: a program makes folders as deep as it likes
    while waiting:
        at = waiting.pop()
        for name in names_in(at):
            path = os.path.join(at, name)
            try:
                about = os.lstat(path)
            except OSError:
                continue  # went away as we looked
            if stat.S_ISDIR(about.st_mode):
                waiting.append(path)
            else:
                size, files = size + about.st_size, files + 1
    return size, files


def attempt_numbers(folder: str) -> List[int]:
    names = names_in(os.path.join(folder, "attempts"))
    return sorted(int(n) for n in names if re.fullmatch(r"[1-9][0-9]{0,8}", n))


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoints_here(folder: str) -> List[Dict[str, Any]]:
    """Every checkpoint folder of the run here, by step.

    ``whole`` and ``problem`` judge what should be here; ``sizes`` (rank → bytes of its file here) and
    ``shards`` (``[rank, node, bytes]`` as the manifest says) let the launcher judge all places together.
    """
    found = []
    here = None if _is_shared(folder) else _nodes_here(folder)
    for name in names_in(os.path.join(folder, "checkpoints")):
        step = step_of(name)
        if step is not None:
            found.append(_checkpoint(os.path.join(folder, "checkpoints", name), step, here))
    return sorted(found, key=lambda c: c["step"])


def _is_shared(folder: str) -> bool:
    return said_shared(folder) is not False


def said_shared(folder: str) -> Optional[bool]:
    """Whether the newest launch.json here speaks of one filesystem for all nodes; None where there is none."""
    for number in reversed(attempt_numbers(folder)):
        launch = read_json(os.path.join(folder, "attempts", str(number), "launch.json"))
        if isinstance(launch, dict):
            return bool(launch.get("shared", True))
    return None


def _nodes_here(folder: str) -> Set[str]:
    """The nodes whose agents wrote into this folder: on a cluster without a shared filesystem, this one."""
    names: Set[str] = set()
    for number in attempt_numbers(folder):
        nodes = names_in(os.path.join(folder, "attempts", str(number), "nodes"))
        names.update(n[: -len(".json")] for n in nodes if n.endswith(".json") and not n.startswith("."))
    return names


def _checkpoint(folder: str, step: int, here: Optional[Set[str]]) -> Dict[str, Any]:
    sizes: Dict[int, int] = {}
    unfit: Dict[int, str] = {}  # shards that are here, and that nobody should read
    has_manifest = has_notes = False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                has_manifest = has_manifest or entry.name == "manifest.json"
                has_notes = has_notes or is_note(entry.name)
                rank = rank_of(entry.name)
                if rank is not None and entry.name == f"rank-{rank:05d}.safetensors":
                    if entry.is_file(follow_symlinks=False):
                        sizes[rank] = entry.stat(follow_symlinks=False).st_size
                    else:
                        unfit[rank] = "is no plain file"
    except OSError as problem:
        return _about(step, sizes, None, 0, [], f"cannot be read: {problem.strerror}")
    if not has_manifest:
        return _about(step, sizes, None, 0, [], "no manifest: it was never finished")
    try:
        attempt, shards = read_shards(os.path.join(folder, "manifest.json"), step)
    except (OSError, ValueError) as problem:
        return _about(step, sizes, None, 0, [], f"its manifest cannot be read: {problem}")
    unfit.update(damage_in(folder) if has_notes else {})
    wrong = []
    for rank, node, size in shards:
        if rank in unfit:
            sizes.pop(rank, None)
            wrong.append(f"rank {rank}'s shard on {node} {unfit[rank]}")
        elif here is not None and node not in here:
            continue
        elif rank not in sizes:
            wrong.append(f"rank {rank}'s shard is missing on {node}")
        elif sizes[rank] != size:
            wrong.append(f"rank {rank}'s shard on {node} has {sizes[rank]} bytes of {size}")
    about = _about(step, sizes, shards, attempt, wrong, "")
    about["unfit"] = {str(r): unfit[r] for r in sorted(unfit)}
    about["replicas"] = replicas_in(folder, attempt)
    return about


def replicas_in(folder: str, attempt: int) -> Dict[str, str]:
    """Rank → the node that keeps the copy, of the shards here that are copies (agent.replicas wrote the note)."""
    note = read_json(os.path.join(folder, REPLICAS))
    if not isinstance(note, dict) or note.get("attempt") != attempt or not isinstance(note.get("of"), dict):
        return {}
    ranks = [rank for named in note["of"].values() if isinstance(named, list) for rank in named]
    return {str(rank): str(note.get("node")) for rank in ranks}


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
    with open_file(path) as file:
        value = loads(file.read())
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
    except (KeyError, TypeError, OverflowError) as problem:
        raise ValueError(f"{type(problem).__name__}: {problem}") from problem
