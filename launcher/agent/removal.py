"""The verb ``remove``: what a run takes up on this machine, and its end. Standard library only."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Dict, List

from ..contract import shipped
from ..contract.errors import Refused, UsageError
from ..contract.folder import is_safe_name
from ..contract.holdings import attempt_numbers, names_in, read_json, tree_size
from ..contract.plain import PlainError, from_plain
from ..contract.pruning import remove_tree
from ..contract.records import NodeRecord
from . import processes
from .tail_files import is_alive


def remove(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, really}`` → ``{bytes, files, removed, shipped: {bytes, files}}``; nothing goes unless ``really``.

    ``shipped``: code that was sent for this run or older ones, and that no other run needs (contract.shipped).

    Raises Refused for what is no run's folder, UsageError while an agent of the run lives here.
    """
    folder = str(request["run_dir"])
    if not os.path.lexists(folder):
        return {"bytes": 0, "files": 0, "removed": False, "shipped": {"bytes": 0, "files": 0}}
    _must_be_a_run(folder)
    alive = _living(folder)
    if alive:
        raise UsageError(f"the agent of {os.path.basename(folder)} on {', '.join(alive)} still lives")
    left = _left_running(folder)
    if left:
        raise UsageError(
            f"{os.path.basename(folder)} still has {len(left)} running here (their agent was killed): "
            f"{', '.join(str(stat.pid) for stat in left[:8])}",
            hint=f"zerun cancel {os.path.basename(folder)} ends them: without the run's files nothing could",
        )
    size, files = tree_size(folder)
    unneeded = shipped.unused(*os.path.split(folder))
    if request.get("really"):
        # Renamed first: a removal that is cut leaves nothing that looks like a run.
        gone = os.path.join(os.path.dirname(folder), f".removed-{os.path.basename(folder)}")
        os.rename(folder, gone)
        remove_tree(gone)
        _forget_secrets(folder)
        shipped.clear_unused(*os.path.split(folder))
    code = {"bytes": sum(found.bytes for found in unneeded), "files": len(unneeded)}
    return {"bytes": size, "files": files, "removed": bool(request.get("really")), "shipped": code}


def _must_be_a_run(folder: str) -> None:
    if os.path.islink(folder) or not is_safe_name(os.path.basename(folder)) or not os.path.isabs(folder):
        raise Refused(f"{folder} is no run's folder: nothing is removed")
    if not os.path.isdir(os.path.join(folder, "attempts")) and not os.path.isfile(os.path.join(folder, "run.json")):
        raise Refused(f"{folder} holds no run: nothing is removed")


def _living(folder: str) -> List[str]:
    found = []
    for number in attempt_numbers(folder):
        nodes = os.path.join(folder, "attempts", str(number), "nodes")
        for name in names_in(nodes):
            try:
                record = from_plain(NodeRecord, read_json(os.path.join(nodes, name)))
            except PlainError:
                continue
            if is_alive(read_json(os.path.join(nodes, name))["agent"], record.host):
                found.append(record.node)
    return sorted(set(found))


def _left_running(folder: str) -> List[processes.Stat]:
    """What an agent that was killed could not end: it is found by the attempt's token, which goes with the files."""
    found: List[processes.Stat] = []
    for number in attempt_numbers(folder):
        launch = read_json(os.path.join(folder, "attempts", str(number), "launch.json"))
        token = launch.get("token") if isinstance(launch, dict) else None
        if isinstance(token, str) and token:
            found += processes.marked(token)
    return found


def _forget_secrets(folder: str) -> None:
    path = os.path.join(os.path.dirname(folder), ".secrets", f"{os.path.basename(folder)}.json")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
