"""``stop``: ends every process of one attempt on this node, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, Optional

from ..contract.folder import AttemptFolder, RunFolder
from ..contract.plain import PlainError, from_plain, loads
from ..contract.records import ProcessId
from . import container, processes
from .attempt import load
from .processes import Stat

_CLEAN_UP_S = 6.0  # an agent may need it after the grace of its ranks


def stop(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, attempt, grace_s}`` → ``{stopped: n}``, n processes that ran before and do not now.

    The agent is asked first: it knows its descendants, and tells the agents of other nodes. What is
    left without one (it was killed) carries the attempt's token in its environment.
    """
    run_dir, attempt, grace_s = str(request["run_dir"]), int(request["attempt"]), float(request.get("grace_s", 10.0))
    spec = load(run_dir, attempt)
    folder = RunFolder(PurePosixPath(spec.run_dir)).attempt(attempt)
    before: Dict[int, Stat] = {}
    agents = _agents(folder, spec.run_dir, attempt)
    for agent in agents:
        for stat in [agent, *processes.descendants([agent.pid])]:
            before[stat.pid] = stat
        processes.send(agent, signal.SIGTERM)
    _wait(agents, min(grace_s, spec.grace_s) + 0.5)
    for agent in _same({stat.pid: stat for stat in agents}):
        processes.send(agent, signal.SIGQUIT)  # no more grace; it still ends its descendants and says so
    _wait(agents, _CLEAN_UP_S)

    def left() -> List[Stat]:
        found = {stat.pid: stat for stat in [*processes.marked(spec.token), *_same(before)]}
        return list(found.values())

    for stat in left():
        before.setdefault(stat.pid, stat)
    processes.end_all(left, 0.0 if agents else min(grace_s, 2.0))
    container.end(spec, range(sum(node.slots for node in spec.nodes)))  # those of an agent that was killed
    if spec.secrets_file:
        with contextlib.suppress(OSError):
            os.unlink(spec.secrets_file)
    return {"stopped": len(before) - len(_same(before))}


def _same(before: Dict[int, Stat]) -> List[Stat]:
    """Those of ``before`` that still run, and are still the same processes."""
    now = [(stat, processes.read_stat(stat.pid)) for stat in before.values()]
    return [
        stat
        for stat, found in now
        if found is not None and not found.dead and found.started_ticks == stat.started_ticks
    ]


def _wait(agents: List[Stat], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end and _same({stat.pid: stat for stat in agents}):
        time.sleep(0.05)


def _agents(folder: AttemptFolder, run_dir: str, attempt: int) -> List[Stat]:
    """This attempt's agents that live on this machine.

    The folder may be shared with other nodes, whose pids mean other processes here: what counts is a
    process that was started as this attempt's agent.
    """
    found = []
    for path in sorted(Path(folder.nodes).glob(".*.agent")):
        agent = _read(path)
        if agent is None or not processes.is_alive(agent):
            continue
        stat = processes.read_stat(agent.pid)
        if stat is not None and _is_agent(processes.arguments(agent.pid), run_dir, attempt):
            found.append(stat)
    return found


def _read(path: Path) -> Optional[ProcessId]:
    try:
        return from_plain(ProcessId, loads(path.read_bytes()))
    except (OSError, PlainError, ValueError):
        return None


def _is_agent(argv: List[bytes], run_dir: str, attempt: int) -> bool:
    """``PYTHON [options] RUNTIME agent --run-dir D --attempt K …``"""
    words = [word.decode("utf-8", "surrogateescape") for word in argv]
    if "agent" not in words:
        return False
    rest = words[words.index("agent") + 1 :]
    options = {word: rest[i + 1] for i, word in enumerate(rest[:-1])}
    same_folder = os.path.realpath(options.get("--run-dir", "")) == os.path.realpath(run_dir)
    return same_folder and options.get("--attempt") == str(attempt)
