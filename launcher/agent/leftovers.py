"""What an agent that was killed left running on its node: ended before the next attempt's ranks start there.

The kernel ends a rank with its agent, but not what the rank had started (``sh -c "python train.py"``), and not a
container. Two attempts at once would write the same checkpoints.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import PurePosixPath
from typing import Callable, List

from ..contract.errors import UsageError
from ..contract.folder import RunFolder
from ..contract.holdings import attempt_numbers, read_json
from ..contract.launch import LaunchSpec
from ..contract.plain import PlainError, from_plain
from ..contract.records import NodeRecord
from . import container, processes
from .attempt import load


def end_leftovers(spec: LaunchSpec, node: str, log: Callable[[str], None]) -> List[str]:
    """Ends what earlier attempts of this run still have on ``node`` without their agent; a line of each, also told to
    ``log``."""
    told = []
    for number in attempt_numbers(spec.run_dir):
        if number < spec.attempt and _was_killed(spec.run_dir, number, node):
            try:
                before = load(spec.run_dir, number)
            except UsageError:
                continue
            ended = processes.end_all(partial(processes.marked, before.token), 0.0)
            container.end(before, range(sum(entry.slots for entry in before.nodes)))
            if ended:
                told.append(f"{len(ended)} processes of attempt {number}, whose agent had been killed, were ended")
                log(told[-1])
    return told


def is_superseded(spec: LaunchSpec) -> bool:
    """Whether the run's next attempt was begun: this one's machine did not answer, and was taken for dead. Under Slurm
    it is the job itself that begins again, when all of the former attempt is over."""
    if os.environ.get("SLURM_JOB_ID"):
        return False
    newer = [number for number in attempt_numbers(spec.run_dir) if number > spec.attempt]
    folder = RunFolder(PurePosixPath(spec.run_dir))
    return any(os.path.exists(str(folder.attempt(number).launch)) for number in newer)


def _was_killed(run_dir: str, attempt: int, node: str) -> bool:
    """An agent that ends by itself writes so last of all."""
    path = RunFolder(PurePosixPath(run_dir)).attempt(attempt).node_record(node)
    try:
        record = from_plain(NodeRecord, read_json(str(path)))
    except PlainError:
        return False
    return record.state != "ended" and not processes.is_alive(record.agent)
