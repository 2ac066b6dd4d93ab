"""What cannot go from node to node comes here first and goes out from here: whole shards, or ranges of them.

Ranges are cut on the node that has the shard, or here where the shard is at home, and lie here no longer than it takes.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from ..contract.errors import PartialAnswer, Unreachable, VerificationFailed, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.manifest import ShardFile
from ..contract.plain import open_file, to_plain
from ..contract.ranges import cut, file_of, prove
from .moving import (
    Asked,
    Meter,
    assign,
    check_space,
    fetch_shards,
    in_parallel,
    lacking,
    name_of,
    raise_worst,
    run_dir,
    step_folder,
)
from .needed import Wanted, told, total

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place


class Target(Protocol):
    """A node of the new attempt, and what of the checkpoint it lacks."""

    @property
    def place(self) -> Place: ...

    @property
    def lacks(self) -> tuple[Wanted, ...]: ...


@dataclass(frozen=True)
class Way:
    """Of which run and step, between which places."""

    backend: Backend
    run: str
    step: int
    home: Path
    python: str | None
    asked: Asked
    held: Mapping[int, Mapping[str, int]]
    notice: Callable[[str], None]
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(
        cls,
        backend: Backend,
        launch: LaunchSpec,
        home: Path,
        step: int,
        found: tuple[Asked, Mapping[int, Mapping[str, int]]],
        notice: Callable[[str], None],
    ) -> Way:
        return cls(backend, launch.run, step, home, launch.python, *found, notice)


def through_home(way: Way, moves: Sequence[Target]) -> None:
    """Raises NoSpace, PartialAnswer and VerificationFailed; then nothing that is not whole stands anywhere as if it
    were."""
    whole = {w.shard.rank: w.shard for t in moves for w in t.lacks if not w.ranges}
    folder = step_folder(way.home, way.step)
    some = {w.shard.rank: w.shard for t in moves for w in t.lacks if w.ranges and w.shard.rank not in whole}
    not_here = {s.rank for s in lacking(folder, [*whole.values(), *some.values()])}
    coming = [Wanted(shard) for rank, shard in whole.items() if rank in not_here]
    cuts = [w for t in moves for w in t.lacks if w.ranges and w.shard.rank in not_here and w.shard.rank not in whole]
    taken = _sources(way, [w.shard for w in coming] + [some[w.shard.rank] for w in cuts])
    if coming or cuts:
        check_space(way.home, total(coming) + total(cuts))
        way.notice(f"step {way.step}: {told([*coming, *cuts])} come here first")
    _bring(way, [w.shard for w in coming], taken)
    cut_at = {w.shard.rank: taken[w.shard.rank] for w in cuts}  # the others are at home by now
    way.notice(f"step {way.step}: " + "; ".join(f"{told(t.lacks)} go to {name_of(t.place)}" for t in moves))
    beside = way.home / "checkpoints" / f".cut-{way.step:08d}"
    shutil.rmtree(beside, ignore_errors=True)  # of a resume that was killed
    try:
        given = in_parallel(lambda n: _give(way, moves[n], beside / str(n), cut_at), range(len(moves)))
        raise_worst(f for f in given if isinstance(f, ZerunError))
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sources(way: Way, shards: Iterable[ShardFile]) -> dict[int, Place]:
    """Shard → the place that it comes from."""
    holders = [(place, way.held[id(place)]) for place, _ in way.asked.answers]
    taken, nowhere = assign(list({s.rank: s for s in shards}.values()), holders)
    if nowhere:
        shard, silent = nowhere[0], way.asked.silent
        said = f"step {way.step}: rank {shard.rank}'s shard of {shard.node} is on no node that answers, and not at home"
        if silent:
            raise PartialAnswer(f"{said}; {', '.join(silent)} did not answer")
        raise VerificationFailed(said, hint=f"take another step: zerun ckpt ls {way.run}")
    return {shard.rank: holders[index][0] for index, shards in taken.items() for shard in shards}


def _bring(way: Way, shards: Sequence[ShardFile], taken: Mapping[int, Place]) -> None:
    meter = Meter(sum(s.bytes for s in shards), None)
    by_place: dict[int, list[ShardFile]] = {}
    for shard in shards:
        by_place.setdefault(id(taken[shard.rank]), []).append(shard)

    def one(some: list[ShardFile]) -> None:
        fetch_shards(taken[some[0].rank], way.run, way.step, some, way.home, meter)

    raise_worst(f for f in in_parallel(one, list(by_place.values())) if isinstance(f, ZerunError))


def _give(way: Way, target: Target, beside: Path, cut_at: Mapping[int, Place]) -> None:
    """Whole shards into their place, which a transport fills by rename; ranges beside it, where the node proves them
    and joins them with those that it has."""
    folder = RunFolder.at(target.place.runs, way.run).checkpoint(way.step).root
    whole = [w.shard.file for w in target.lacks if not w.ranges]
    if whole:
        target.place.transport.push(whole, step_folder(way.home, way.step), str(folder))
    ranges = [w for w in target.lacks if w.ranges]
    if not ranges:
        return
    beside.mkdir(parents=True)
    for wanted in ranges:
        _cut(way, wanted, beside / file_of(wanted.shard.rank), cut_at.get(wanted.shard.rank))
    names = [file_of(w.shard.rank) for w in ranges]
    target.place.transport.push(names, beside, str(folder.with_name(f".incoming-{way.step:08d}")))
    arrived = [{"shard": to_plain(w.shard), "ranges": w.ranges} for w in ranges]
    request = {"run_dir": run_dir(target.place, way.run), "step": way.step, "arrived": arrived}
    way.backend.call(target.place, "pull", request, timeout_s=3600.0)


def _cut(way: Way, wanted: Wanted, path: Path, source: Place | None) -> None:
    """``source`` None: from the shard at home. A node that cannot cut (nothing there computes the manifest's digests)
    sends the whole shard home first."""
    shard = to_plain(wanted.shard)
    if source is not None:
        request = {"run_dir": run_dir(source, way.run), "step": way.step, "python": way.python}
        try:
            with way.backend.serve(source, {**request, "shard": shard, "ranges": wanted.ranges}) as stream:
                _write(path, stream)
            prove(str(path), shard, wanted.ranges)
            return
        except (Unreachable, VerificationFailed) as problem:
            _bring_one(way, wanted.shard, source, problem)
    with open_file(step_folder(way.home, way.step) / wanted.shard.file) as whole:
        _write(path, cut(whole, shard, wanted.ranges, xxhash.xxh3_128_hexdigest))
    prove(str(path), shard, wanted.ranges)


def _write(path: Path, data: Iterable[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())


def _bring_one(way: Way, shard: ShardFile, source: Place, why: ZerunError) -> None:
    with way.one_at_a_time:  # two nodes may want ranges of the same shard
        if lacking(step_folder(way.home, way.step), [shard]):
            check_space(way.home, shard.bytes)
            said = f"no ranges from {name_of(source)} ({why.message}): {told([Wanted(shard)])} come here first"
            way.notice(f"step {way.step}: {said}")
            _bring(way, [shard], {shard.rank: source})
