"""Ranks that have to share cores: seen from what the agents were allowed, told by ``status``."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.records import NodeRecord
from ..specs import nodelist

CORES_A_RANK = 2


def cramped(records: Sequence[NodeRecord]) -> tuple[str, ...]:
    """A note for every way in which nodes give their ranks fewer than two cores each."""
    found: dict[tuple[int, int], list[str]] = {}
    for record in records:
        if record.cores is not None and record.ranks and record.cores < CORES_A_RANK * len(record.ranks):
            found.setdefault((record.cores, len(record.ranks)), []).append(record.node)
    return tuple(
        f"{_count(cores, 'core')} for {_count(ranks, 'rank')} on {_nodes(nodes)}: below {CORES_A_RANK} a rank, "
        f"loading data and sending wait for computing; take fewer slots, or under Slurm ask for more by cpus_per_slot"
        for (cores, ranks), nodes in found.items()
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _nodes(names: Sequence[str]) -> str:
    try:
        return nodelist.fold(names)
    except ValueError:
        return " ".join(names)
