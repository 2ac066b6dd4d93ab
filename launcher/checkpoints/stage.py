"""Staging: bringing the shards that a resumed attempt's nodes need to nodes that lack them.

Only for clusters without a shared filesystem, where a node keeps what its own ranks wrote. Shards go from node to
node (:mod:`.between`); where nodes do not reach each other from home, or by way of home. The manifest goes last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.errors import NoSpace, PartialAnswer, Unreachable, VerificationFailed, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.manifest import Manifest, ShardFile
from ..contract.partition import ITEM_BYTES, Layout, build
from ..contract.slices import reshard_tensor
from ..contract.topology import Topology
from . import between
from .found import Candidate
from .moving import (
    SPARE_BYTES,
    Asked,
    Meter,
    ask_all,
    assign,
    check_space,
    checked_files,
    fetch_shards,
    in_parallel,
    lacking,
    name_of,
    raise_worst,
    run_dir,
    size,
    step_folder,
    total,
)
from .verify import read_manifest

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place


@dataclass(frozen=True)
class _Target:
    """A node of the new attempt, what of the checkpoint it has, and what it lacks."""

    place: Place
    lacks: tuple[ShardFile, ...]


def relayout(
    old: Layout, ranks: int, bucket_bytes: int | None = None, *, tensor: int | None = None, replicas: int = 1
) -> Layout:
    """The same units over another number of data-parallel ranks (bucket sizes and tensor degree as they were
    unless told; at another degree the engine's own units differ, only the ranks are to be relied on). ``ranks`` are
    those of one of ``replicas``."""
    if bucket_bytes is None:
        bucket_bytes = max((u.bucket * ITEM_BYTES[u.dtype] for u in old.units), default=1)
    return build(
        [(u.name, u.parameters) for u in old.units],
        ranks=ranks,
        bucket_bytes=bucket_bytes,
        tensor=tensor or old.tensor,
        replicas=replicas,
        rule=old.rule,
        modules={u.name: u.modules for u in old.units},
    )


def needed_shards(old: Layout, new: Layout, ranks: Sequence[int], *, stage: int = 3, buffers: bool = False) -> set[int]:
    """The ranks whose shards (of ``old``) the ``ranks`` (of ``new``) read. Without partitioned optimizer
    state (stage 0), or at another tensor degree, every rank is given all; buffers lie in rank 0's."""
    if stage == 0 or old.tensor != new.tensor:
        return set(range(old.ranks * old.tensor))
    needed = {0} if buffers else set()
    for rank in ranks:
        data_rank, tensor_rank = divmod(rank, new.tensor)
        data_rank %= new.ranks  # of its replica: every one of them reads the same
        if old == new:  # what tensor ranks hold alike, the first of them has saved
            needed |= {data_rank * old.tensor + tensor_rank, data_rank * old.tensor}
        else:
            needed |= {copy.source_rank for copy in reshard_tensor(old, new, data_rank, tensor_rank)}
    return needed


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
    asked = ask_all(backend, "inventory", lambda p: {"run_dir": run_dir(p, run), "checkpoint": step})
    held = {
        id(place): checked_files(place, (answer.get("checkpoint") or {}).get("files"), of_checkpoint=True)
        for place, answer in asked.answers
    }
    manifest, data = _manifest(asked, held, run, step, home, chosen.attempt)
    targets = _targets(backend, asked, held, manifest, launch)
    moves = [t for t in targets if t.lacks]
    if moves:
        _check_room(backend, run, moves)
    by_nodes, moves = _between(backend, run, step, asked, held, moves, launch, notice)
    if moves:
        _bring_home(asked, held, run, step, home, moves, notice)
        notice(f"step {step}: " + "; ".join(_told(t) for t in moves))
        _push(run, step, home, moves)
    wrote = _put_manifest(targets, run, step, data)
    if not by_nodes and not moves and not wrote:
        return None
    told = [f"{name_of(t.place)} ({_shards(t.lacks)}, {size(total(t.lacks))}, from other nodes)" for t in by_nodes]
    told += [f"{name_of(t.place)} ({_shards(t.lacks)}, {size(total(t.lacks))}, from here)" for t in moves]
    return f"step {step} was staged to {', '.join(told)}" if told else f"the manifest of step {step} was staged"


def _between(
    backend: Backend,
    run: str,
    step: int,
    asked: Asked,
    held: Mapping[int, Mapping[str, int]],
    moves: Sequence[_Target],
    launch: LaunchSpec,
    notice: Callable[[str], None],
) -> tuple[list[_Target], list[_Target]]:
    """Has nodes take from nodes what they can. (Who has all now, who still lacks.)"""
    holders = [(place, held[id(place)]) for place, _ in asked.answers]
    planned = between.routes([(t.place, t.lacks) for t in moves], holders)
    if not planned:
        return [], list(moves)
    left = between.move(backend, run, step, planned, [place for place, _ in holders], launch, notice)
    done = {id(route.place) for route in planned} - {id(route.place) for route in left}
    return [t for t in moves if id(t.place) in done], [t for t in moves if id(t.place) not in done]


def _manifest(
    asked: Asked, held: Mapping[int, Mapping[str, int]], run: str, step: int, home: Path, attempt: int
) -> tuple[Manifest, bytes]:
    """The manifest of the attempt that was chosen, from any place that has it, else from home."""
    name = "manifest.json"
    kept = home / "checkpoints" / f".staging-{step:08d}"
    try:
        for place, _ in asked.answers:
            if name not in held[id(place)]:
                continue
            (kept / name).unlink(missing_ok=True)
            source = str(RunFolder.at(place.runs, run).checkpoint(step).root)
            place.transport.fetch([name], source, kept)
            manifest = read_manifest(kept / name, step)
            if attempt in (0, manifest.attempt):
                return manifest, (kept / name).read_bytes()
    finally:
        (kept / name).unlink(missing_ok=True)
        if kept.is_dir():
            kept.rmdir()
    path = step_folder(home, step) / name
    return read_manifest(path, step), path.read_bytes()


def _targets(
    backend: Backend, asked: Asked, held: Mapping[int, Mapping[str, int]], manifest: Manifest, launch: LaunchSpec
) -> list[_Target]:
    assert launch.train is not None
    places = {place.node: place for place in backend.places()}
    zero = launch.train.zero
    topology = Topology(tuple(n.slots for n in launch.nodes), launch.tensor, zero.replicas)
    new = relayout(
        manifest.layout, topology.shard_ranks, zero.bucket_bytes, tensor=launch.tensor, replicas=zero.replicas
    )
    everything = zero.stage == 0 or zero.unit != manifest.layout.rule  # another rule's units are not known here
    targets = []
    for index, node in enumerate(launch.nodes):
        place = places.get(node.name)
        if place is None or id(place) not in held:
            problem = asked.silent.get(node.name)
            raise Unreachable(f"node {node.name} of the new attempt: {problem or 'no place of this name'}")
        ranks = topology.ranks_on(index)
        needed = needed_shards(
            manifest.layout, new, ranks, stage=0 if everything else zero.stage, buffers=bool(manifest.buffers)
        )
        have = held[id(place)]
        lacks = tuple(s for s in manifest.shards if s.rank in needed and have.get(s.file) != s.bytes)
        targets.append(_Target(place, lacks))
    return targets


def _bring_home(
    asked: Asked,
    held: Mapping[int, Mapping[str, int]],
    run: str,
    step: int,
    home: Path,
    moves: Sequence[_Target],
    notice: Callable[[str], None],
) -> None:
    """What home lacks of the shards that are to go out, proven as everything that comes home is."""
    wanted = {s.rank: s for t in moves for s in t.lacks}
    lacks = lacking(step_folder(home, step), list(wanted.values()))
    if not lacks:
        return
    holders = [(place, held[id(place)]) for place, _ in asked.answers]
    taken, nowhere = assign(lacks, holders)
    if nowhere:
        shard = nowhere[0]
        said = f"step {step}: rank {shard.rank}'s shard of {shard.node} is on no node that answers, and not at home"
        if asked.silent:
            raise PartialAnswer(f"{said}; {', '.join(asked.silent)} did not answer")
        raise VerificationFailed(said, hint=f"take another step: zerun ckpt ls {run}")
    check_space(home, total(lacks))
    notice(f"step {step}: {_shards(lacks)} ({size(total(lacks))}) come here first")
    meter = Meter(total(lacks), None)

    def one(index: int) -> None:
        fetch_shards(holders[index][0], run, step, taken[index], home, meter)

    raise_worst(f for f in in_parallel(one, list(taken)) if isinstance(f, ZerunError))


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


def _shards(files: Sequence[ShardFile]) -> str:
    return f"{len(files)} shard{'' if len(files) == 1 else 's'}"


def _told(target: _Target) -> str:
    return f"{_shards(target.lacks)} ({size(total(target.lacks))}) go to {name_of(target.place)}"


def _push(run: str, step: int, home: Path, moves: Sequence[_Target]) -> None:
    def one(target: _Target) -> None:
        folder = str(RunFolder.at(target.place.runs, run).checkpoint(step).root)
        target.place.transport.push([s.file for s in target.lacks], step_folder(home, step), folder)

    raise_worst(f for f in in_parallel(one, moves) if isinstance(f, ZerunError))


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
