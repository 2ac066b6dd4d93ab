"""The verb ``prune``: deletes checkpoints of a run here, those and no others that the launcher looked at."""

from __future__ import annotations

import os
from typing import Any, Dict, List

from ..contract.errors import UsageError
from ..contract.folder import RunFolder
from ..contract.holdings import checkpoints_here
from ..contract.pruning import remove_checkpoint


def prune(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, checkpoints: [{step, attempt}]}`` → ``{steps, bytes, left}``. One that another attempt has written
    (again) since it was looked at stays."""
    try:
        run_dir = str(request["run_dir"])
        wanted = {int(row["step"]): int(row["attempt"]) for row in request["checkpoints"]}
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"prune: the request cannot be read: {problem!r}") from problem
    steps: List[int] = []
    left: List[str] = []
    freed = 0
    for found in checkpoints_here(run_dir):
        step = int(found["step"])
        # Where nothing is shared a node may hold shards and no manifest, or the manifest of an older attempt.
        if step not in wanted or int(found["attempt"]) > wanted[step]:
            continue
        folder = str(RunFolder.at(*os.path.split(run_dir)).checkpoint(step).root)
        count, others = remove_checkpoint(folder)
        freed += count
        left += [f"{os.path.basename(folder)}/{name}" for name in others]
        steps.append(step)
    return {"steps": steps, "bytes": freed, "left": left}
