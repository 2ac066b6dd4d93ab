"""Which checkpoints belong to the line that a run is on: a resume from an earlier step leaves later ones behind.

::

    attempt 1   50   100   150   200            (resume --step 50)
    attempt 2   50 ── 60    70                  the line is 50 60 70; 100 150 200 are left behind

Each attempt's launch.json says from which step it went on, each manifest which attempt wrote it. The line is
followed from the newest attempt backwards. What is left behind stays until somebody deletes it, but is never
taken as the newest and never counts among those that are kept.
"""

from __future__ import annotations

import os
import re
from typing import Dict, Mapping, Optional, Set

from .plain import loads, read_file


def resumed_from(folder: str) -> Dict[int, Optional[int]]:
    """Of each attempt in a run's folder that has been queued or has begun: the step it went on from, None for a
    beginning. One that was refused before it came to that changes nothing."""
    found: Dict[int, Optional[int]] = {}
    attempts = os.path.join(folder, "attempts")
    try:
        names = os.listdir(attempts)
    except OSError:
        return found
    for name in names:
        if re.fullmatch(r"[1-9][0-9]{0,8}", name) and _begun(os.path.join(attempts, name)):
            try:
                step = loads(read_file(os.path.join(attempts, name, "launch.json")))["resume_step"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if step is None or isinstance(step, int):
                found[int(name)] = step
    return found


def _begun(attempt: str) -> bool:
    """Its job is queued, its script has started, or an agent or a rank wrote something."""
    if any(os.path.exists(os.path.join(attempt, name)) for name in ("job", "claim", "rendezvous.json")):
        return True
    for name in ("nodes", "metrics"):
        try:
            if any(not n.startswith(".") for n in os.listdir(os.path.join(attempt, name))):
                return True
        except OSError:
            continue
    return False


def left_behind(writers: Mapping[int, int], resumed: Mapping[int, Optional[int]]) -> Set[int]:
    """The steps that are not on the line. ``writers``: the attempt that wrote the checkpoint of each step;
    ``resumed`` as :func:`resumed_from`. Of an attempt that nothing is known of, nothing is left behind."""
    if not resumed:
        return set()
    last: Dict[int, Optional[int]] = {}  # of each attempt on the line: its last step there, None for no end
    attempt, bound = max(resumed), None  # type: int, Optional[int]
    while attempt not in last:
        last[attempt] = bound
        source = resumed.get(attempt)
        if source is None:
            break
        writer = writers.get(source)
        if writer is None or writer >= attempt:  # it is gone: the latest before that can have written it
            able = [k for k, step in resumed.items() if k < attempt and (step is None or step < source)]
            if not able:
                break
            writer = max(able)
        attempt, bound = writer, source
    behind = set()
    for step, writer in writers.items():
        end = last.get(writer, -1)
        if writer in resumed and end is not None and step > end:
            behind.add(step)
    return behind


def why_left(step: int, writer: int, resumed: Mapping[int, Optional[int]]) -> str:
    """``attempt 2 went on from step 50``."""
    for attempt, source in sorted(resumed.items()):
        if attempt > writer and (source is None or source < step):
            return f"attempt {attempt} " + ("began anew" if source is None else f"went on from step {source}")
    return "a later attempt went on from elsewhere"
