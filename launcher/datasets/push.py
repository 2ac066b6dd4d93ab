"""``zerun data push``: a data set's files to every node that keeps its own, and proven there."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.moving import SPARE_BYTES, Meter, in_parallel, name_of, size
from ..contract.errors import NoSpace, PartialAnswer, UsageError, VerificationFailed, ZerunError
from ..specs.dataset_model import unknown_dataset
from .look import Answer, Seen, file_here, look

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place
    from ..specs.models import Cluster

Notice = Callable[[str], None]

_MAKE = "--from FOLDER says where the files are; zerun data prepare FILES --out FOLDER makes them of text"


@dataclass(frozen=True)
class Pushed:
    """``nodes`` have the data set, proven; ``moved`` of them were lacking it, ``bytes`` each had to be copied."""

    dataset: str
    files: tuple[Seen, ...]
    nodes: tuple[str, ...]
    moved: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class _Move:
    """What a place lacks: absolute path there → the file here."""

    place: Place
    files: Mapping[str, Path]
    free: Mapping[str, int | None]

    def bytes_to(self, folder: str) -> int:
        return sum(path.stat().st_size for to, path in self.files.items() if posixpath.dirname(to) == folder)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())


def push(
    backend: Backend, cluster: Cluster, name: str, source: Path, notice: Notice,
    progress: Callable[[int, int], None] | None = None,
) -> Pushed:  # fmt: skip
    """Copies what each place lacks of ``name``, from the folder ``source``, where files have the same names.

    What is to move is said first, through ``notice``. A rerun goes on where it was cut. Raises NoSpace before
    anything moves, VerificationFailed (exit 7) when bytes are wrong twice, PartialAnswer (exit 8) when only some nodes
    could be served.
    """
    dataset = cluster.datasets.get(name)
    if dataset is None:
        raise UsageError(f"cluster {cluster.name}: {unknown_dataset(name, cluster.datasets)}")
    local = {to: source / posixpath.basename(to) for to in (dataset.train, dataset.heldout) if to is not None}
    told = {dataset.train: dataset.train_digest, dataset.heldout: dataset.heldout_digest}
    right = _here(local, {to: told[to] for to in local}, cluster)
    places = list(backend.places())
    answers, silent = look(backend, cluster, places, {to: r.digest.partition(":")[0] for to, r in right.items()})
    if not answers:
        raise next(iter(silent.values()))
    moves = [m for m in (_lacks(answer, local, right) for answer in answers) if m.files]
    have = [name_of(a.place) for a in answers if a.place not in [m.place for m in moves]]
    _check_room(moves)
    notice(_told(name, right, moves, have))
    failed = _move(moves, progress) if moves else {}
    served = [m.place for m in moves if name_of(m.place) not in failed]
    wrong = _prove(backend, cluster, served, right)
    if wrong:
        retried = [m for m in moves if name_of(m.place) in wrong]
        failed.update(_move(retried, progress))
        still = _prove(backend, cluster, [m.place for m in retried if name_of(m.place) not in failed], right)
        if still:
            raise VerificationFailed(
                "copied twice, and still wrong: " + "; ".join(f"{node}: {said}" for node, said in still.items()),
                hint="the disk or the way there damages bytes; try another folder",
            )
    failed.update(silent)
    done = [*have, *(name_of(m.place) for m in moves if name_of(m.place) not in failed)]
    if failed:
        first, problem = next(iter(failed.items()))
        if not done:
            raise problem
        raise PartialAnswer(
            f"{name} is on {', '.join(done)}, not on {', '.join(failed)} ({first}: {problem.message})",
            hint="the same command again goes on where it stopped",
        )
    each = max((m.bytes for m in moves), default=0)
    return Pushed(name, tuple(right.values()), tuple(done), tuple(name_of(m.place) for m in moves), each)


def _here(local: Mapping[str, Path], told: Mapping[str, str | None], cluster: Cluster) -> dict[str, Seen]:
    """The files of this machine, by where they go. UsageError when one lacks, or is not what the description says."""
    found = {}
    for to, path in local.items():
        digest = told[to]
        if not path.is_file():
            raise UsageError(f"{path} is not there; it would go to {to}", hint=_MAKE)
        seen = file_here(path, digest.partition(":")[0] if digest else None)
        if digest is not None and seen.digest != digest:
            raise VerificationFailed(f"{path} is {seen.digest}; the description of {cluster.name} says {digest}")
        found[to] = seen
    return found


def _lacks(answer: Answer, local: Mapping[str, Path], right: Mapping[str, Seen]) -> _Move:
    lacks = {to: path for to, path in local.items() if answer.files[to].digest != right[to].digest}
    return _Move(answer.place, lacks, answer.free)


def _check_room(moves: Sequence[_Move]) -> None:
    for move in moves:
        for folder, free in move.free.items():
            wanted = move.bytes_to(folder)
            if wanted and free is not None and wanted + SPARE_BYTES > free:
                raise NoSpace(f"{name_of(move.place)}: {size(wanted)} are to come to {folder}, {size(free)} are free")


def _told(name: str, right: Mapping[str, Seen], moves: Sequence[_Move], have: Sequence[str]) -> str:
    total = sum(seen.bytes for seen in right.values())
    words = [f"{name}: {len(right)} files, {size(total)}"]
    if moves:
        names = ", ".join(name_of(m.place) for m in moves)
        words.append(f"{size(sum(m.bytes for m in moves))} go to {names}")
    if have:
        words.append(f"{', '.join(have)} {'has' if len(have) == 1 else 'have'} it already")
    return "; ".join(words)


def _move(moves: Sequence[_Move], progress: Callable[[int, int], None] | None) -> dict[str, ZerunError]:
    """All places at once. A folder at a time, since files may go to several."""
    meter = Meter(sum(move.bytes for move in moves), progress)

    def one(move: _Move) -> None:
        for to, path in move.files.items():
            move.place.transport.push([path.name], path.parent, posixpath.dirname(to), progress=meter)

    found = in_parallel(one, list(moves))
    return {name_of(m.place): f for m, f in zip(moves, found, strict=True) if isinstance(f, ZerunError)}


def _prove(backend: Backend, cluster: Cluster, places: Sequence[Place], right: Mapping[str, Seen]) -> dict[str, str]:
    """Node → what is wrong there, of the places that were just served: their bytes are read again, whole."""
    if not places:
        return {}
    algorithms: dict[str, str | None] = {to: seen.digest.partition(":")[0] for to, seen in right.items()}
    answers, silent = look(backend, cluster, places, algorithms, fresh=True)
    wrong = {node: problem.message for node, problem in silent.items()}
    for answer in answers:
        for to, seen in right.items():
            found = answer.files[to]
            if found.digest != seen.digest:
                wrong[name_of(answer.place)] = f"{to} {found.problem or f'is {found.digest}, not {seen.digest}'}"
    return wrong
