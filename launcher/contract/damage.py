"""What was found damaged of a checkpoint, kept beside it, so that nobody takes it again.

Sizes are seen by looking; a flipped bit is seen by whoever reads: the engine at a resume, ``ckpt verify`` at home.
The note holds for the very file that was read (its size, inode and time): a shard that was brought again voids it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Dict, Optional

from .plain import dumps, loads, open_file, write_atomically

_NOTE = re.compile(r"damaged-rank-([0-9]{5,})\.json")


def note_of(folder: str, rank: int) -> str:
    return os.path.join(folder, f"damaged-rank-{rank:05d}.json")


def is_note(name: str) -> bool:
    return bool(_NOTE.fullmatch(name))


def note_damage(folder: str, rank: int, file: str, what: str) -> None:
    """Best effort: where nothing can be written, the next reader finds out for itself."""
    try:
        about = os.lstat(os.path.join(folder, file))
        kept: Dict[str, Any] = {"file": file, "what": what[:500], "bytes": about.st_size}
        kept.update(inode=about.st_ino, mtime_ns=about.st_mtime_ns)
        write_atomically(Path(note_of(folder, rank)), dumps(kept))
    except OSError:
        return


def forget_damage(folder: str, rank: int) -> None:
    try:
        os.unlink(note_of(folder, rank))
    except OSError:
        return


def damage_in(folder: str) -> Dict[int, str]:
    """Rank → what was found, of the shards that are still the files that were read."""
    found: Dict[int, str] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        match = _NOTE.fullmatch(name)
        what = _holds(folder, name) if match else None
        if match and what is not None:
            found[int(match.group(1))] = what
    return found


def _holds(folder: str, name: str) -> Optional[str]:
    try:
        with open_file(os.path.join(folder, name)) as file:
            kept = loads(file.read(65536))
        rank = os.path.basename(name)[len("damaged-") : -len(".json")]
        if kept["file"] != f"{rank}.safetensors":
            return None
        about = os.lstat(os.path.join(folder, kept["file"]))
        now = (about.st_size, about.st_ino, about.st_mtime_ns)
        same = now == (kept["bytes"], kept["inode"], kept["mtime_ns"])
        return str(kept["what"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
