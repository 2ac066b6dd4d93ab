"""Deleting a checkpoint, the same way wherever it lies: its manifest first, then what we know, nothing else."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import List, Tuple

from .damage import is_note
from .folder import rank_of
from .holdings import REPLICAS, is_checkpoint_file
from .ranges import is_ranges


def remove_checkpoint(folder: str) -> Tuple[int, List[str]]:
    """Bytes that are free again, and names that stay because they are not ours (then the folder stays too).

    The manifest goes first, so that an interrupted deletion leaves none that looks whole. Links are not followed.
    """
    if os.path.islink(folder):
        return 0, [os.path.basename(folder)]
    freed, left = 0, []
    names = os.listdir(folder)
    for name in sorted(names, key=lambda n: (n != "manifest.json", n)):
        path = os.path.join(folder, name)
        about = os.lstat(path)
        if not _is_ours(name) or stat.S_ISDIR(about.st_mode):
            left.append(name)
            continue
        os.unlink(path)
        freed += about.st_size if stat.S_ISREG(about.st_mode) else 0
    if not left:
        with contextlib.suppress(OSError):  # a copy that arrived just now; whoever put it there sees that all is gone
            os.rmdir(folder)
    return freed, left


def remove_tree(top: str) -> None:
    """Removes a folder, however deep: what is below comes up beside its parent first, so that no path is too long and
    nothing recurses. Links are not followed."""
    waiting, count = [top], 0
    while waiting:
        at = waiting[-1]
        below = len(waiting)
        for name in os.listdir(at):
            path = os.path.join(at, name)
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
            elif at == top:
                waiting.append(path)
            else:
                count += 1
                up = os.path.join(top, f".up-{os.getpid()}-{count}")
                os.rename(path, up)
                waiting.append(up)
        if len(waiting) == below:
            os.rmdir(waiting.pop())


def _is_ours(name: str) -> bool:
    """Also what was half written when its writer was killed: ``.rank-00003.safetensors.123.part``."""
    half = name.startswith(".") and name.endswith(".part")
    bare = name[1:].rsplit(".", 2)[0] if half else name
    known = bare == REPLICAS or is_checkpoint_file(bare) or is_ranges(bare) or is_note(bare)
    return known or (half and rank_of(name[1:]) is not None)
