"""Which checkpoints may go: never the newest whole one, never the one that an attempt goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .found import Candidate, newest_whole


@dataclass(frozen=True)
class Pruning:
    """``gone`` go, ``stay`` stay with the reason. ``where`` they lie: at home, or on the cluster."""

    run: str
    where: str
    gone: tuple[Candidate, ...]
    stay: tuple[tuple[Candidate, str], ...]
    bytes: int


def decide(
    run: str, where: str, found: Sequence[Candidate], *, keep: int, pinned: frozenset[int], alive: bool
) -> Pruning:
    """``keep`` of the newest whole ones on the run's line stay. Without a whole one nothing goes: what is damaged may
    be all there is. While the run is ``alive``, what is unfinished and newer than every whole one is being written."""
    newest = newest_whole(found)
    line = sorted((c for c in found if c.whole and not c.left), key=lambda c: -c.step)[:keep]
    gone, stay = [], []
    for candidate in found:
        if newest is None:
            stay.append((candidate, "no checkpoint is whole"))
        elif candidate.step == newest.step:
            stay.append((candidate, "the newest whole one"))
        elif candidate in line:
            stay.append((candidate, f"among the newest {keep}"))
        elif candidate.step in pinned:
            stay.append((candidate, "an attempt goes on from it"))
        elif alive and not candidate.whole and candidate.step > newest.step:
            stay.append((candidate, "it may be being written"))
        else:
            gone.append(candidate)
    return Pruning(run, where, tuple(gone), tuple(stay), sum(c.bytes for c in gone))
