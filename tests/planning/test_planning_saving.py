"""The copy of a save in the background, as the plan tells it."""

from __future__ import annotations

from launcher.contract.partition import build, gpt_parameters
from launcher.contract.saved import saved_bytes
from launcher.planning.saving import copy_lines


def test_the_copy_is_what_a_rank_saves_and_counts_where_ranks_live_in_host_memory() -> None:
    layout = build(gpt_parameters(2, 33, 24, 256), ranks=3, bucket_bytes=5000)
    shard = sum(unit.shard_numel for unit in layout.units)
    assert saved_bytes(layout, moments=2) == 4 * 3 * shard and saved_bytes(layout, moments=0) == 4 * shard
    assert copy_lines(layout, background=False, moments=2, device_kind="cpu") == ()
    (line,) = copy_lines(layout, background=True, moments=2, device_kind="cpu")
    assert line.bytes == line.alive.update == 12 * shard
    (line,) = copy_lines(layout, background=True, moments=2, device_kind="gpu")
    assert line.bytes == 0 and line.note == f"in host memory, {12 * shard:,} bytes a rank"
