"""The plan's line of a save in the background: one copy of what a rank saves, in host memory."""

from __future__ import annotations

from ..contract.partition import Layout
from ..contract.saved import saved_bytes
from .plan import Alive, StepLine


def copy_lines(layout: Layout, *, background: bool, moments: int, device_kind: str) -> tuple[StepLine, ...]:
    """The copy counts where ranks live in host memory; beside a GPU it takes none of the device, and is told."""
    if not background:
        return ()
    count = saved_bytes(layout, moments=moments)
    if device_kind == "cpu":
        alive = Alive(count, count, count)
        return (StepLine.of("copy of a save in the background", alive, "arithmetic", "allocated once, used again"),)
    note = f"in host memory, {count:,} bytes a rank"
    return (StepLine.of("copy of a save in the background", Alive(0, 0, 0), "arithmetic", note),)
