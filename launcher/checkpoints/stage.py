"""Staging: bringing what a resumed attempt's nodes read of a checkpoint to nodes that lack it.

Only for clusters without a shared filesystem, where a node keeps what its own ranks wrote. Shards, or the ranges of
them that are read (:mod:`.needed`), go from node to node (:mod:`.between`); where nodes do not reach each other from
home, or by way of home (:mod:`.through`). The manifest goes last.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agent.held import held_in
from ..contract.errors import NoSpace, Unreachable, VerificationFailed, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.manifest import Manifest
from ..contract.plain import from_plain, loads, read_file
from ..contract.ranges import joined
from ..contract.topology import Topology
from ..contract.train import TrainConfig
from . import between
from .found import Candidate
from .moving import (
    SPARE_BYTES,
    Asked,
    ask_all,
    checked_files,
    in_parallel,
    name_of,
    raise_worst,
    run_dir,
    size,
    step_folder,
)
from .needed import Held, Wanted, lacks, needs, told, total
from .through import Way, through_home
from .verify import read_manifest

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place


@dataclass(frozen=True)
class _Target:
    """A node of the new attempt, and what of the checkpoint it lacks."""

    place: Place
    lacks: tuple[Wanted, ...]


@dataclass(frozen=True)
class _Found:
    """What the places have of a checkpoint: whole shards (names and sizes, by the place's id), and more."""

    asked: Asked
    files: Mapping[int, Mapping[str, int]]

    @classmethod
    def ask(cls, backend: Backend, run: str, step: int) -> _Found:
        request = {"checkpoint": step, "ranges": True}
        asked = ask_all(backend, "inventory", lambda p: {"run_dir": run_dir(p, run), **request})
        about = {id(place): answer.get("checkpoint") or {} for place, answer in asked.answers}
        files = {id(p): checked_files(p, about[id(p)].get("files"), of_checkpoint=True) for p, _ in asked.answers}
        return cls(asked, files)

    def headers(self) -> dict[int, Any]:
        """Shard → its header, as a node says that has it."""
        told: dict[int, Any] = {}
        for _, answer in self.asked.answers:
            headers = (answer.get("checkpoint") or {}).get("headers")
            told.update({int(rank): row for rank, row in headers.items()} if isinstance(headers, dict) else {})
        return told

    def held(self, place: Place, manifest: Manifest) -> Held:
        """What a place has of the manifest's own shards."""
        shards = {shard.rank: shard for shard in manifest.shards}
        answer = next((answer for other, answer in self.asked.answers if other is place), {})
        rows = (answer.get("checkpoint") or {}).get("ranges") or ()
        unfit = frozenset(int(row["rank"]) for row in rows if row.get("unfit"))
        ranges = {
            int(row["rank"]): joined((int(start), int(stop)) for start, stop in row["ranges"])
            for row in rows
            if row["rank"] not in unfit
            and (shard := shards.get(row["rank"]))
            and (row["bytes"], row["digest"]) == (shard.bytes, shard.digest)
        }
        return Held(self.files[id(place)], ranges, unfit)


def stage(
    backend: Backend, run: str, home: Path, chosen: Candidate, launch: LaunchSpec, notice: Callable[[str], None]
) -> str | None:
    """Makes ``chosen`` whole for every node of ``launch``; a sentence says what was moved, None: nothing.

    Bytes are counted before anything moves: NoSpace names who has no room. VerificationFailed when a shard
    is nowhere any more; PartialAnswer when it may be on a node that does not answer.
    """
    if launch.train is None or launch.shared:
        return None
    step = chosen.step
    found = _Found.ask(backend, run, step)
    manifest, data = _manifest(found.asked, found.files, run, step, home, chosen.attempt)
    saved = _saved_by(found.asked, run, manifest.attempt, home)
    targets = _targets(backend, found, manifest, launch, saved, step_folder(home, step))
    moves = [t for t in targets if t.lacks]
    if moves:
        _check_room(backend, run, moves)
    by_nodes, moves = _between(backend, found, step, moves, launch, notice)
    if moves:
        through_home(Way.of(backend, launch, home, step, (found.asked, found.files), notice), moves)
    wrote = _put_manifest(targets, run, step, data)
    if not by_nodes and not moves and not wrote:
        return None
    said = [_staged(target, "other nodes") for target in by_nodes] + [_staged(target, "here") for target in moves]
    return f"step {step} was staged to {', '.join(said)}" if said else f"the manifest of step {step} was staged"


def _between(
    backend: Backend,
    found: _Found,
    step: int,
    moves: Sequence[_Target],
    launch: LaunchSpec,
    notice: Callable[[str], None],
) -> tuple[list[_Target], list[_Target]]:
    """Has nodes take from nodes what they can. (Who has all now, who still lacks.)"""
    holders = [(place, found.files[id(place)]) for place, _ in found.asked.answers]
    planned = between.routes([(t.place, t.lacks) for t in moves], holders)
    if not planned:
        return [], list(moves)
    left = between.move(backend, launch.run, step, planned, [place for place, _ in holders], launch, notice)
    done = {id(route.place) for route in planned} - {id(route.place) for route in left}
    return [t for t in moves if id(t.place) in done], [t for t in moves if id(t.place) not in done]


def _manifest(
    asked: Asked, held: Mapping[int, Mapping[str, int]], run: str, step: int, home: Path, attempt: int
) -> tuple[Manifest, bytes]:
    """The manifest of the attempt that was chosen, from any place that has it, else from home: a damaged one is passed
    over, and put right with all others."""
    name = "manifest.json"
    kept, damaged = home / "checkpoints" / f".staging-{step:08d}", None
    try:
        for place, _ in asked.answers:
            if name not in held[id(place)]:
                continue
            (kept / name).unlink(missing_ok=True)
            source = str(RunFolder.at(place.runs, run).checkpoint(step).root)
            place.transport.fetch([name], source, kept)
            try:
                manifest = read_manifest(kept / name, step)
            except VerificationFailed as problem:
                damaged = damaged or VerificationFailed(f"{name_of(place)}: {problem.message}", hint=problem.hint)
                continue
            if attempt in (0, manifest.attempt):
                return manifest, (kept / name).read_bytes()
    finally:
        shutil.rmtree(kept, ignore_errors=True)  # with what a transport that was killed left there
    path = step_folder(home, step) / name
    if damaged is not None and not path.exists():
        raise damaged
    return read_manifest(path, step), path.read_bytes()


def _saved_by(asked: Asked, run: str, attempt: int, home: Path) -> TrainConfig | None:
    """What the attempt that wrote the checkpoint trained, as any node says that was of it, or what was collected."""
    for place, _ in asked.answers:
        said = place.transport.run(["cat", str(RunFolder.at(place.runs, run).attempt(attempt).launch)])
        train = _trained(said.stdout) if said.returncode == 0 else None
        if train is not None:
            return train
    try:
        return _trained(read_file(home / "attempts" / str(attempt) / "launch.json"))
    except OSError:
        return None


def _trained(launch: bytes) -> TrainConfig | None:
    try:
        return from_plain(LaunchSpec, loads(launch)).train
    except ValueError:
        return None


def _targets(
    backend: Backend, found: _Found, manifest: Manifest, launch: LaunchSpec, saved: TrainConfig | None, folder: Path
) -> list[_Target]:
    """``folder``: the checkpoint's at home, whose shards are known too."""
    assert launch.train is not None
    places = {place.node: place for place in backend.places()}
    topology = Topology(tuple(n.slots for n in launch.nodes), launch.tensor, launch.train.zero.replicas)
    chosen = []
    for node in launch.nodes:
        place = places.get(node.name)
        if place is None or id(place) not in found.files:
            problem = found.asked.silent.get(node.name)
            raise Unreachable(f"node {node.name} of the new attempt: {problem or 'no place of this name'}")
        chosen.append(place)
    needed = needs(manifest, topology, launch.train, saved)
    held = [found.held(place, manifest) for place in chosen]
    coming = lacks(manifest, needed, held, {**_headers_at(folder), **found.headers()})
    return [_Target(place, wanted) for place, wanted in zip(chosen, coming, strict=True)]


def _headers_at(folder: Path) -> dict[int, Any]:
    return {int(rank): header for rank, header in held_in(str(folder))["headers"].items()}


def _check_room(backend: Backend, run: str, moves: Sequence[_Target]) -> None:
    def free(target: _Target) -> int | None:
        request = {"run_dirs": [run_dir(target.place, run)], "attempt": 0}
        answer: int | None = backend.call(target.place, "state", request).get("free_bytes")
        return answer

    found = in_parallel(free, moves)
    raise_worst(f for f in found if isinstance(f, ZerunError))
    for target, room in zip(moves, found, strict=True):
        if isinstance(room, int) and total(target.lacks) + SPARE_BYTES > room:
            raise NoSpace(f"{name_of(target.place)}: {size(total(target.lacks))} are to come, {size(room)} are free")


def _staged(target: _Target, source: str) -> str:
    return f"{name_of(target.place)} ({told(target.lacks, '{}, {}')}, from {source})"


def _put_manifest(targets: Sequence[_Target], run: str, step: int, data: bytes) -> bool:
    """After the shards: a node's checkpoint exists once its manifest does. The same bytes everywhere, since
    ranks compare them. True when a node lacked them."""

    def one(target: _Target) -> bool:
        path = str(RunFolder.at(target.place.runs, run).checkpoint(step).manifest)
        have = target.place.transport.run(["cat", path])
        if have.returncode == 0 and have.stdout == data:
            return False
        target.place.transport.put(data, path, mode=0o644)
        return True

    found = in_parallel(one, targets)
    raise_worst(f for f in found if isinstance(f, ZerunError))
    return any(f is True for f in found)
