"""What a cluster is asked before anything of a run is made: has it room, would its scheduler take the job, and when?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..contract.errors import NoSpace, UsageError
from .make import Attempts, Source, one_folder

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place
    from ..specs.models import Cluster


class Again(NamedTuple):
    """The attempt that is made, and how many checkpoints the run has."""

    attempt: int = 1
    checkpoints: int = 0


FIRST = Again()


def ask_first(
    attempts: Attempts, backend: Backend, source: Source, run: str, *, again: Again = FIRST, force: bool = False
) -> tuple[str, ...]:
    """What a person should read before walking away: where little room is left, and the expected start.

    ``again`` tells of a run that goes on.
    Raises NoSpace when the run's checkpoints have no room (not with ``force``), UsageError with the scheduler's own
    words when it refuses the job, Unreachable. Nothing is left behind on the cluster.
    """
    places = backend.places()
    notes = [] if force else _room(backend, source, places, again.checkpoints)
    notes += _image(backend, source.cluster, places)
    launch = attempts.launch(source, run, again.attempt, one_folder(places))
    expected = backend.would_start(attempts.render(source, launch)) if launch.here is None else None
    return (*notes, *([expected] if expected else []))


def _image(backend: Backend, cluster: Cluster, places: Sequence[Place]) -> list[str]:
    """Raises UsageError naming the machines on which the container's image is not to be had."""
    box = cluster.container
    if box is None:
        return []
    request = {"runtime": box.runtime, "image": box.image, "login": backend.name == "slurm"}
    told = [(place.transport.name, backend.call(place, "image", request)) for place in places]
    wrong = [f"{name}: {answer['problem']}" for name, answer in told if answer["problem"]]
    if wrong:
        raise UsageError(
            "; ".join(wrong), hint="container.image names a file of the cluster, or what its runtime knows"
        )
    return sorted({str(answer["note"]) for _, answer in told if answer["note"]})


def room(backend: Backend, source: Source) -> tuple[str, ...]:
    """What the run's checkpoints take beside what is left, a line a place. Raises NoSpace when that is too little."""
    return tuple(_room(backend, source, backend.places(), 0, always=True)) or ("nobody knows what a checkpoint takes",)


def _room(backend: Backend, source: Source, places: Sequence[Place], there: int, *, always: bool = False) -> list[str]:
    from ..planning.disk import need_bytes, refuse_what_has_no_room
    from ..planning.memory import readable

    disk = source.plan.disk
    if disk is None:
        return []
    notes = []
    for place in places:
        share = _share(source, place.node)
        if not share:
            continue
        left = backend.call(place, "left", {"paths": {"runs": place.runs}})["runs"]
        if "problem" in left:
            raise NoSpace(f"{place.transport.name}: {left['problem']}")
        where = f"{place.transport.name}: {left['path']}{_limited(left)}"
        refuse_what_has_no_room(disk, left["free_bytes"], left["free_files"], where, share=share, there=there)
        needs = need_bytes(disk, share=share, there=there)
        if always or needs * 2 > left["free_bytes"]:
            notes.append(
                f"checkpoints will take {readable(needs)} of the {readable(left['free_bytes'])} left at {where}"
            )
    return notes


def _share(source: Source, node: str | None) -> float:
    """Which part of a checkpoint lies at the place of ``node`` (None: all of it)."""
    if node is None:
        return 1.0
    slots = {n.name: n.slots for n in source.plan.nodes}
    copies = source.plan.disk.copies if source.plan.disk else 0  # of the nodes before it
    return slots.get(node, 0) * (1 + copies) / source.plan.topology.world_size


def _limited(left: Mapping[str, Any]) -> str:
    return "" if left["by"] == "filesystem" else f" ({left['by']})"
