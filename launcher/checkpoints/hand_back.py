"""Handing a program's own checkpoint back where each node keeps its own disk: every node of the attempt gets all files.

What a rank will read is not known here, so a node lacks what it has not, or has of an earlier attempt. Files go from
node to node, where nodes do not reach each other by way of this machine; what no node has any more comes from what was
collected. Bytes are told before they move; all of it is proven before any of it takes its place
(:mod:`..agent.handed`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.errors import NoSpace, PartialAnswer, Refused, Unreachable, UsageError, VerificationFailed, ZerunError
from ..contract.kept import marker_of
from ..contract.launch import LaunchSpec
from . import between
from .foreign import at_home, digest_of, rows_of
from .found import Candidate
from .moving import SPARE_BYTES, Asked, ask_all, check_space, in_parallel, name_of, raise_worst, run_dir, size

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

HOME = -1
_READ_S = 6 * 3600.0

Row = Mapping[str, Any]  # of a file: path, bytes, modified, digest, attempt
Notice = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """A file as it is to be everywhere. ``sources``: who has it so, by index among the answers; HOME: this machine."""

    row: Row
    sources: tuple[int, ...]


@dataclass
class _Target:
    """A node of the new attempt, and what it lacks: by index of who gives it."""

    place: Place
    lacks: dict[int, list[Row]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.lacks.values() for row in rows]


@dataclass(frozen=True)
class _Move:
    """What is needed all along the way."""

    backend: Backend
    run: str
    name: str
    home: Path
    launch: LaunchSpec
    places: Sequence[Place]
    notice: Notice


def hand_back(
    backend: Backend, run: str, home: Path, chosen: Candidate, launch: LaunchSpec, notice: Notice
) -> str | None:
    """Makes the checkpoint ``chosen`` of the program whole on every node of ``launch``; a sentence says what was moved,
    None: nothing.

    Raises UsageError for a file that nodes wrote differently under one name, when a node that has none of its own
    would need it; PartialAnswer when files may be on a node that does not answer; NoSpace before anything moves;
    VerificationFailed.
    """
    if launch.foreign is None or launch.shared:
        return None
    whole_when = launch.foreign.whole_when
    about = {
        "name": chosen.name,
        "marker": marker_of(chosen.name, whole_when) if whole_when else None,
        "python": launch.python,
        "setup": launch.setup,
    }
    asked = ask_all(backend, "pieces", lambda p: {"run_dir": run_dir(p, run), **about}, timeout_s=_READ_S)
    held = [_told(place, answer.get("files")) for place, answer in asked.answers]
    indexes = _nodes(asked, launch)
    kept = _of_home(home, chosen.name, held)
    if asked.silent and not kept:
        names = ", ".join(asked.silent)
        raise PartialAnswer(
            f"{chosen.name} may have files on {names}, which did not answer",
            hint="bring that back, or take another checkpoint: --step S",
        )
    places = [place for place, _ in asked.answers]
    wanted = _wanted(held, kept, [name_of(p) for p in places])
    targets = [t for t in (_target(places[i], held[i], i, wanted) for i in indexes) if t.lacks]
    if not targets:
        return None
    _check_room(asked, targets)
    move = _Move(backend, run, chosen.name, home, launch, places, notice)
    left = _from_nodes(move, targets)
    if left:
        _from_here(move, left)
    told = ", ".join(f"{name_of(t.place)} ({_count(t.rows)})" for t in targets)
    return f"{chosen.name} was handed to {told}"


# --- who lacks what ---------------------------------------------------------------------------------


def _told(place: Place, files: Any) -> dict[str, Row]:
    """A place's files by name. Raises Refused for what no agent of ours says."""
    rows = rows_of(place, files)
    for path, row in rows.items():
        kinds = {"digest": (str, type(None)), "attempt": (int,), "modified": (int, float)}
        wrong = next((key for key, kind in kinds.items() if not isinstance(row.get(key), kind)), None)
        if wrong is not None:
            raise Refused(f"{name_of(place)} says that the {wrong} of {path} is {row.get(wrong)!r}")
    return rows


def _nodes(asked: Asked, launch: LaunchSpec) -> list[int]:
    """The nodes of the attempt, by index among the answers."""
    known = {place.node: index for index, (place, _) in enumerate(asked.answers)}
    for node in launch.nodes:
        if node.name not in known:
            problem = asked.silent.get(node.name)
            raise Unreachable(f"node {node.name} of the new attempt: {problem or 'no place of this name'}")
    return [known[node.name] for node in launch.nodes]


def _of_home(home: Path, name: str, held: Sequence[Mapping[str, Row]]) -> Mapping[str, Row]:
    """What was collected of it, if it is still the checkpoint that the nodes have."""
    kept = at_home(home, name)
    for rows in held:
        if any(path in kept and kept[path]["digest"] != row.get("digest") for path, row in rows.items()):
            return {}
    found = {}
    for path, row in kept.items():
        found[path] = {"path": path, "modified": (home / path).stat().st_mtime, "attempt": 0, **row}
    return found


def _wanted(held: Sequence[Mapping[str, Row]], kept: Mapping[str, Row], names: Sequence[str]) -> dict[str, list[Piece]]:
    """Every file of the checkpoint, by path: as the newest attempt that wrote it left it. More than one piece where
    nodes of that attempt wrote different ones under the same name."""
    found: dict[str, list[Piece]] = {}
    for path in sorted({path for rows in (*held, kept) for path in rows}):
        copies = [(i, rows[path]) for i, rows in enumerate(held) if path in rows]
        if not copies:
            found[path] = [Piece(kept[path], (HOME,))]
            continue
        for index, row in copies:
            if not isinstance(row.get("digest"), str):
                raise VerificationFailed(f"{path}: {names[index]} told no digest of it")
        newest = max(int(row.get("attempt", 0)) for _, row in copies)
        by_digest: dict[str, list[tuple[int, Row]]] = {}
        for index, row in copies:
            if row.get("attempt", 0) == newest:
                by_digest.setdefault(str(row["digest"]), []).append((index, row))
        for index, row in copies:  # a copy that came from elsewhere is as good as what it is a copy of
            if row.get("attempt", 0) != newest and str(row["digest"]) in by_digest:
                by_digest[str(row["digest"])].append((index, row))
        found[path] = [Piece(same[0][1], tuple(i for i, _ in same)) for same in by_digest.values()]
    if not found:
        raise VerificationFailed(
            "nothing of the checkpoint is left on any node, or here", hint="take another: --step S"
        )
    return found


def _target(place: Place, have: Mapping[str, Row], index: int, wanted: Mapping[str, Sequence[Piece]]) -> _Target:
    target = _Target(place)
    for path, choices in wanted.items():
        if any(index in piece.sources for piece in choices):
            continue
        if len(choices) > 1:
            raise UsageError(
                f"{path} is not the same on the nodes that wrote it together: which of them {name_of(place)} is to get "
                "cannot be said",
                hint="resume on the nodes that wrote it, or put the rank into the names of what each rank writes; "
                "checkpoint: {hand_back: in_place} leaves all files where they are",
            )
        target.lacks.setdefault(choices[0].sources[0], []).append(choices[0].row)
    return target


def _check_room(asked: Asked, targets: Sequence[_Target]) -> None:
    free = {id(place): answer.get("free_bytes") for place, answer in asked.answers}
    for target in targets:
        coming, room = sum(int(row["bytes"]) for row in target.rows), free[id(target.place)]
        if isinstance(room, int) and coming + SPARE_BYTES > room:
            raise NoSpace(f"{name_of(target.place)}: {size(coming)} are to come, {size(room)} are free")


# --- the ways ---------------------------------------------------------------------------------------


def _from_nodes(move: _Move, targets: Sequence[_Target]) -> list[_Target]:
    """From node to node. Returns what did not go so: all that those nodes still lack. Also makes a clean start on
    each of ``targets``."""
    way = [
        f"{_count(rows)} {name_of(move.places[i])} → {name_of(t.place)}"
        for t in targets
        for i, rows in t.lacks.items()
        if i != HOME
    ]
    if way:
        move.notice(f"{move.name}, from node to node: {'; '.join(way)}")
    with ExitStack() as open_streams:
        givers = sorted({i for t in targets for i in t.lacks if i != HOME})
        serving = {
            i: between.serve(move.backend, move.run, move.places[i], move.launch, open_streams, own=True)
            for i in givers
        }

        def one(target: _Target) -> None:
            sources = []
            for index, rows in target.lacks.items():
                said = serving.get(index, {})
                if isinstance(said, ZerunError):
                    raise said
                if index != HOME:
                    sources.append({**said, "files": rows})
            _handed(move, target, sources=sources)

        done = in_parallel(one, targets)
    left = []
    for target, came in zip(targets, done, strict=True):
        if isinstance(came, (NoSpace, Refused)):
            raise came
        if isinstance(came, ZerunError):
            move.notice(f"{move.name}: not from node to node to {name_of(target.place)}: {came.message}")
            left.append(target)
        elif HOME in target.lacks:
            left.append(_Target(target.place, {HOME: target.lacks[HOME]}))
    return left


def _from_here(move: _Move, targets: Sequence[_Target]) -> None:
    """By way of this machine: what is not here comes first, is proven, goes out, and is proven there."""
    needed = {(i, str(row["path"])): row for t in targets for i, rows in t.lacks.items() if i != HOME for row in rows}
    if needed:
        check_space(move.home, sum(int(row["bytes"]) for row in needed.values()))
        move.notice(f"{move.name}: {_count(list(needed.values()))} come here first")
    way = "; ".join(f"{_count(t.rows)} go to {name_of(t.place)}" for t in targets)
    move.notice(f"{move.name}: {way}")
    with tempfile.TemporaryDirectory(prefix=".handing-", dir=move.home) as folder:
        raise_worst(f for f in in_parallel(lambda i: _fetch(move, i, needed, Path(folder)), _givers(needed)) if f)

        def one(target: _Target) -> None:
            remote = f"{run_dir(target.place, move.run)}/.handed/{move.launch.attempt}"
            for index, rows in target.lacks.items():
                source = move.home if index == HOME else Path(folder) / str(index)
                target.place.transport.push([str(row["path"]) for row in rows], source, remote)
            _handed(move, target, pushed=target.rows)

        raise_worst(f for f in in_parallel(one, targets) if isinstance(f, ZerunError))


def _givers(needed: Mapping[tuple[int, str], Row]) -> list[int]:
    return sorted({index for index, _ in needed})


def _fetch(move: _Move, index: int, needed: Mapping[tuple[int, str], Row], folder: Path) -> None:
    place = move.places[index]
    rows = [row for (i, _), row in needed.items() if i == index]
    here = folder / str(index)
    place.transport.fetch([str(row["path"]) for row in rows], run_dir(place, move.run), here)
    for row in rows:
        if digest_of(here / str(row["path"]), str(row["digest"])) != row["digest"]:
            raise VerificationFailed(f"{row['path']} came from {name_of(place)}, and is not {row['digest']}")


def _handed(
    move: _Move, target: _Target, *, sources: Sequence[Mapping[str, Any]] = (), pushed: Sequence[Row] = ()
) -> None:
    request = {
        "run_dir": run_dir(target.place, move.run),
        "attempt": move.launch.attempt,
        "token": move.launch.token,
        "python": move.launch.python,
        "setup": move.launch.setup,
        "sources": list(sources),
        "pushed": list(pushed),
    }
    move.backend.call(target.place, "handed", request, timeout_s=7 * 86400.0)


def _count(rows: Sequence[Row]) -> str:
    return f"{len(rows)} file{'' if len(rows) == 1 else 's'} ({size(sum(int(row['bytes']) for row in rows))})"
