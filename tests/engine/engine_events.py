"""What the CPU's allocator gave out and took back, by torch's profiler, which knows nothing of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._C._profiler import _EventType


def allocations(profiled: Any) -> list[tuple[int, int, int]]:
    """(time, address, bytes; below zero: freed) of what ``torch.profiler.profile(profile_memory=True)`` recorded."""
    return sorted(_events(profiled.profiler.kineto_results.experimental_event_tree()), key=lambda row: row[0])


def _events(tree: list[Any]) -> Iterator[tuple[int, int, int]]:
    for event in tree:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
        yield from _events(event.children)
