"""What a job's checkpoints take on disk, from the state that a checkpoint holds.

A checkpoint has every parameter once, in fp32 (the master, where the parameters are 16-bit), and beside it the
optimizer's moments; frozen parameters once. What no arithmetic knows is small and left out: buffers, counters, headers.
"""

from __future__ import annotations

from ..contract.errors import NoSpace
from ..specs.models import Checkpoint
from .memory import MOMENTS, Elements, readable
from .plan import Disk

_FP32 = 4


def disk_of(elements: Elements, optimizer: str, wanted: Checkpoint, *, steps: int, ranks: int, copies: int = 0) -> Disk:
    """``elements`` of one tensor rank, as the layout has them; ``optimizer`` under the name that it is counted by."""
    trained = sum(elements.trainable) * _FP32 * (1 + MOMENTS[optimizer])
    whole = (trained + sum(elements.frozen) * _FP32) * elements.tensor
    if wanted.every_s is not None:
        written = None
    else:
        every = wanted.every_steps or steps
        written = steps // every + (1 if steps % every else 0)  # the last step is always saved
    if wanted.keep is None:
        at_once = written
    else:
        at_once = wanted.keep + 1 if written is None else min(wanted.keep + 1, written)
    return Disk(whole, at_once, wanted.keep, ranks, copies)


def sentence(disk: Disk) -> str:
    """``a checkpoint is 1.2 GB; …``"""
    one = f"a checkpoint is {readable(disk.checkpoint_bytes)}"
    if disk.copies:
        copied = "a copy" if disk.copies == 1 else f"{disk.copies} copies"
        one += f", {readable(disk.checkpoint_bytes * (1 + disk.copies))} with {copied} of every shard"
    if disk.at_once is None:
        return f"{one}; how many there will be is not known: without checkpoint.keep every one stays"
    if disk.at_once == 1:
        return f"{one}; there will be one"
    if disk.kept is None or disk.at_once <= disk.kept:
        return f"{one}; all {disk.at_once} stay: {readable(disk.all_bytes)}"
    told = f"up to {disk.at_once} lie there at once (keep {disk.kept}, and the one being written)"
    return f"{one}; {told}: {readable(disk.all_bytes)}"


def need_bytes(disk: Disk, *, share: float, there: int = 0) -> int:
    """Bytes that are still to be written where ``share`` of each checkpoint lies and ``there`` of them lie already:
    old ones go as new ones come, and the first new one has to have room beside them."""
    return round(max(disk.most_bytes - there * disk.checkpoint_bytes, disk.checkpoint_bytes) * share)


def refuse_what_has_no_room(
    disk: Disk, left_bytes: int, left_files: int | None, where: str, *, share: float, there: int = 0
) -> None:
    """Raises NoSpace, with both numbers, when the run's checkpoints are more than may still be written."""
    needs, need_files = need_bytes(disk, share=share, there=there), round(disk.most_files * share)
    hint = "free some, set checkpoint.keep lower, or choose another paths.runs; --force submits all the same"
    if needs > left_bytes:
        part = "" if share == 1 else " of this node's ranks"
        lying = f"; {there} lie there already" if there else ""
        need = f"checkpoints{part} take {readable(needs)} ({sentence(disk)}{lying})"
        raise NoSpace(f"{where}: {need}, and {readable(left_bytes)} are left", hint=hint)
    if left_files is not None and need_files > left_files:
        need = f"the run makes about {need_files} files and folders"
        raise NoSpace(f"{where}: {need}, and {left_files} more can be made (inodes)", hint=hint)
