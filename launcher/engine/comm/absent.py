"""Who did not join a collective, asked when it has failed.

A collective's own error names nobody, and a message that never came may be late because its sender waits for a third
rank. So a rank whose message failed says so in the job's key-value store, and looks who else does: whoever joined has
failed too, at about the same time. Those who stay silent are the ones that are missing; where nobody does, the first
that failed is the one to look at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

WITHIN_S = 3.0


def absent(ranks: Sequence[int], rank: int, what: str) -> list[int]:
    """Those of ``ranks`` (global numbers; this one is ``rank``) that do not say within ``WITHIN_S`` that they failed
    too. Where rank 0 is gone, and the store with it, that is the answer."""
    store = _store()
    if store is None:
        return []
    key = _key(ranks)
    others = [r for r in ranks if r != rank]
    end = time.monotonic() + WITHIN_S
    try:
        store.set(f"{key}{rank}", f"{store.add(key + 'order', 1)} {what}")
        while (silent := [r for r in others if not store.check([f"{key}{r}"])]) and time.monotonic() < end:
            time.sleep(0.05)
    except RuntimeError:
        return [0] if 0 in others else []
    return silent


def first_to_fail(ranks: Sequence[int]) -> tuple[int, str] | None:
    """Of ``ranks``, all of which have failed: the first, and at which message; None where that is not to be had."""
    store = _store()
    if store is None:
        return None
    said = []
    try:
        for rank in ranks:
            order, _, what = store.get(f"{_key(ranks)}{rank}").decode().partition(" ")
            said.append((int(order), rank, what))
    except (RuntimeError, ValueError):
        return None
    _, rank, what = min(said)
    return rank, what


def _key(ranks: Sequence[int]) -> str:
    return "zerun/failed/" + "-".join(map(str, (ranks[0], ranks[-1], len(ranks)))) + "/"


def _store() -> Any:
    """The store by which the ranks met; torch has no public name for it."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError):  # another torch, or the group is gone
        return None
