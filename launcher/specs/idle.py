"""Keys that mean nothing beside what else is written: refused by name, where they stand.

A file that says so itself is mistaken: whoever wrote the key waits for what will not come. A file whose key lost its
meaning to a ``--set`` over something else (``--set zero.stage=1`` over a job that was written for stage 3, with its
``prefetch``) is not: comparing is what ``--set`` is for, and nobody should have to list what a comparison leaves idle.
Such a key is let be, and the plan says so in a line (:func:`words`). A key that is itself set by ``--set`` is refused.
What says the default changes nothing and stays: ``run.json`` writes all of them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .document import Document
from .mistakes import Loc
from .models import Job
from .pool_model import like_problem, said_of
from .values import whole_or_none
from .zero_model import Zero

TRUE = (True, "true", "True", "TRUE")
_NO_SAVES = "background is of saves on the way, and without every there are none: write every: 50, or 30min"


Kind = Literal["cluster", "job"]


class Idle(NamedTuple):
    """``because`` are the keys that together take the meaning of ``loc``."""

    loc: Loc
    because: tuple[Loc, ...]
    message: str


def refuse_idle(document: Document, kind: Kind) -> None:
    """Notes a problem of every key that means nothing, but for those that a ``--set`` over others left so."""
    for idle in _OF[kind](document.tree):
        if any(map(document.is_set, idle.because)) and not document.is_set(idle.loc):
            continue
        document.wrong(idle.loc, idle.message, at_key=True)


def words(job: Job) -> tuple[str, ...]:
    """What of ``job`` is left idle, a line each."""
    plain = job.model_dump(include={"zero", "checkpoint"})
    return tuple(f"{'.'.join(map(str, idle.loc))} has no effect: {idle.message}" for idle in _of_job(plain))


def _part(given: Any, key: str) -> Mapping[str, Any]:
    found = given.get(key) if isinstance(given, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _of_job(given: Mapping[str, Any]) -> Iterator[Idle]:
    if given.get("program") is not None:
        return  # which none of these go with
    zero, checkpoint = _part(given, "zero"), _part(given, "checkpoint")
    stage = whole_or_none(zero.get("stage"))
    if stage in (0, 1, 2):
        for key in ("reshard", "prefetch"):
            if zero.get(key) is not None and str(zero[key]) != str(Zero.model_fields[key].default):
                said = f"{key} says how stage 3 gathers, and means nothing at stage {stage}"
                yield Idle(("zero", key), (("zero", "stage"),), f"{said}: write stage: 3, or leave {key} out")
    if stage in (0, 3) and zero.get("overlap_gather") in TRUE:
        said = "overlap_gather lets updated parameters of stages 1 and 2 arrive in the next forward, and means nothing"
        yield Idle(("zero", "overlap_gather"), (("zero", "stage"),), f"{said} at stage {stage}: leave it out")
    background = checkpoint.get("background")
    if background in TRUE and checkpoint.get("every") is None:
        yield Idle(("checkpoint", "background"), (("checkpoint", "every"),), _NO_SAVES)


def _of_cluster(given: Mapping[str, Any]) -> Iterator[Idle]:
    if given.get("backend") not in ("direct", "ssh"):
        return
    if _part(given, "nodes").get("memory_per_slot") is not None:
        yield from _memory(("nodes",), [(("device",), given.get("device"))])
    pools = _part(given, "pools")
    sound = [name for name in pools if like_problem(name, pools) is None]
    for name in sound:
        asked = _part(pools, name).get("memory_per_slot")
        if asked is not None:
            takers = [other for other in sound if said_of(other, "memory_per_slot", pools) is asked]
            devices = [(("pools", other, "device"), said_of(other, "device", pools)) for other in takers]
            yield from _memory(("pools", name), devices)


def _memory(place: Loc, devices: Sequence[tuple[Loc, Any]]) -> Iterator[Idle]:
    """Nothing limits a slot's memory without Slurm: it is only planned with, where a device does not say its own."""
    because: list[Loc] = [("backend",)]
    for loc, device in devices:
        told = device if isinstance(device, Mapping) else {}
        kind, memory = told.get("kind", "cpu"), told.get("memory")
        if kind == "cpu" and memory is None:
            return
        because.append((*loc, "kind" if kind != "cpu" else "memory"))
    message = (
        "memory_per_slot is what Slurm is asked for; under backend: direct it tells only how much a slot of CPUs has, "
        "where device.memory does not: leave it out, or write device.memory"
    )
    yield Idle((*place, "memory_per_slot"), tuple(because), message)


_OF = {"job": _of_job, "cluster": _of_cluster}
