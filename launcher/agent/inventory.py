"""The verb ``inventory``: which files of a run lie here and how large they are, for bringing them home.

Names are relative to the run folder. Symbolic links, half-written files (``.name.part``), shipped code
and data are left out: code is at home already, data is made or lies elsewhere.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any, Dict, List, Optional

from ..contract.damage import damage_in
from ..contract.errors import UsageError
from ..contract.folder import RunFolder, rank_of, step_of
from ..contract.holdings import checkpoints_here, identity, is_checkpoint_file, is_collected, record_digest
from .held import held_in
from .own_files import foreign_of, outputs_of
from .pieces import with_attempts


def inventory(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, checkpoint, ranges}`` → ``{files, checkpoint, outputs, foreign, rsync, identity}``; sizes in bytes,
    records with a ``digest``.

    ``checkpoint`` is ``newest`` (the newest that is whole as far as this place can tell), a step or null. With
    ``ranges`` it tells the shards' headers too, and which ranges of other shards are here (:mod:`.held`).
    ``identity`` tells whether this folder and another are the same one.
    """
    try:
        run_dir, wanted, ranges = str(request["run_dir"]), request.get("checkpoint"), bool(request.get("ranges"))
        wanted = wanted if wanted in (None, "newest") else int(wanted)
    except (KeyError, TypeError, ValueError) as problem:
        raise UsageError(f"inventory: the request cannot be read: {problem!r}") from problem
    attempts = os.path.join(run_dir, "attempts")
    files = [f for f in _files(run_dir, attempts) if is_collected(f["path"])]
    for row in files:
        digest = record_digest(os.path.join(run_dir, row["path"]))
        row.update({} if digest is None else {"digest": digest})
    checkpoint = _checkpoint(run_dir, wanted)
    if ranges and checkpoint is not None:
        checkpoint.update(held_in(str(RunFolder.at(*os.path.split(run_dir)).checkpoint(checkpoint["step"]).root)))
    return {
        "files": files,
        "checkpoint": checkpoint,
        "outputs": outputs_of(run_dir),
        "foreign": [{**found, "files": with_attempts(run_dir, found["files"])} for found in foreign_of(run_dir)],
        "rsync": shutil.which("rsync") is not None,
        "identity": identity(run_dir),
    }


def _files(run_dir: str, folder: str) -> List[Dict[str, Any]]:
    found = []
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(at, name)
            try:
                facts = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode):
                found.append({"path": os.path.relpath(path, run_dir), "bytes": facts.st_size})
    return found


def _checkpoint(run_dir: str, wanted: Any) -> Optional[Dict[str, Any]]:
    if wanted is None:
        return None
    folder = os.path.join(run_dir, "checkpoints")
    if wanted == "newest":
        whole = [c["step"] for c in checkpoints_here(run_dir) if c["whole"]]
        if not whole:
            return None
        wanted = whole[-1]
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if step_of(name) == wanted:
            files = _files(os.path.join(folder, name), os.path.join(folder, name))
            damaged = damage_in(os.path.join(folder, name))  # known to be wrong: not offered
            fit = [f for f in files if is_checkpoint_file(f["path"]) and rank_of(f["path"]) not in damaged]
            return {"step": wanted, "files": fit}
    return None
