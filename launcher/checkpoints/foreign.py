"""A program's own checkpoints: listed, brought home and proven, handed back; never loaded.

Each node has the files that its ranks wrote; together they are the checkpoint. What was brought is kept in
``foreign.json`` beside the run: every file's bytes and digest as the node read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..contract.errors import PartialAnswer, Refused, VerificationFailed, ZerunError
from ..contract.holdings import read_json
from ..contract.kept import is_kept
from ..contract.plain import dumps, open_file, write_atomically
from .found import Candidate
from .moving import Asked, check_target, in_parallel, name_of, raise_worst, run_dir
from .verify import Report

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

RECORD = "foreign.json"
Rows = Mapping[str, Mapping[str, Any]]  # file → {bytes, modified}


def foreign_candidates(about: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """Oldest first; ``about`` as for ``candidates``. Whole when one place, all together, says so."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for answer in about:
        for row in answer.get("foreign") or ():
            if is_kept(str(row["name"])):
                by_name.setdefault(str(row["name"]), []).append(row)
    found = [_join(name, rows) for name, rows in by_name.items()]
    return sorted(found, key=lambda c: (c.step, c.written_at))


def _join(name: str, rows: Sequence[Mapping[str, Any]]) -> Candidate:
    problem = "" if any(row["whole"] for row in rows) else str(rows[0]["problem"])
    problem = problem or _stale(rows)
    whole = not problem
    return Candidate(
        step=int(rows[0]["step"] or 0),
        whole=whole,
        problem=problem,
        bytes=_bytes_of(rows),
        state="whole" if whole else "unfinished",
        name=name,
        written_at=max(float(row["written_at"]) for row in rows),
    )


def _stale(rows: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong where the file that says that it is whole was left by an earlier attempt than wrote its pieces."""
    said = max((int(row.get("whole_by", 0)) for row in rows if row["whole"]), default=0)
    wrote = max((int(row.get("written_by", 0)) for row in rows), default=0)
    if wrote <= said:
        return ""
    earlier = f"attempt {said}" if said else "an earlier attempt"
    return f"attempt {wrote} wrote it anew and did not finish: what says that it is whole is of {earlier}"


def _bytes_of(rows: Sequence[Mapping[str, Any]]) -> int:
    """A file that several nodes have is one. Where there are too many to be named, all that lies there."""
    if any("sizes" not in row for row in rows):
        return sum(int(row["bytes"]) for row in rows)
    return sum({key: int(size) for row in rows for key, size in row["sizes"].items()}.values())


def rows_of(place: Place, rows: Any) -> dict[str, Mapping[str, Any]]:
    """Files of the job's own as a place told them. Refused for a name that leads anywhere else."""
    found: dict[str, Mapping[str, Any]] = {}
    for row in rows if isinstance(rows, list) else ():
        name = row.get("path") if isinstance(row, dict) else None
        if not isinstance(name, str) or not is_kept(name) or not isinstance(row.get("bytes"), int) or row["bytes"] < 0:
            raise Refused(f"{name_of(place)} offers {name!r}, which is no file of the job's own")
        found[name] = row
    return found


def files_of(asked: Asked, name: str) -> list[tuple[Place, dict[str, Mapping[str, Any]]]]:
    """The files of the checkpoint ``name`` at each place; a file that several have is the first one's, of those that
    the newest attempt wrote."""
    found: list[tuple[Place, dict[str, Mapping[str, Any]]]] = []
    best: dict[str, tuple[int, int]] = {}  # file → the attempt that wrote it, and minus the place's number
    for number, (place, answer) in enumerate(asked.answers):
        rows: dict[str, Mapping[str, Any]] = {}
        for row in answer.get("foreign") or ():
            if row.get("name") == name:
                rows.update(rows_of(place, row.get("files")))
        found.append((place, rows))
        for path, row in rows.items():
            best[path] = max(best.get(path, (-1, 0)), (int(row.get("attempt", 0)), -number))
    return [
        (place, {path: row for path, row in rows.items() if -best[path][1] == number})
        for number, (place, rows) in enumerate(found)
    ]


def own_files(
    asked: Asked, home: Path, chosen: Candidate | None
) -> tuple[list[tuple[Place, dict[str, int]]], int, int]:
    """What is to be brought of the job's own files: its outputs, and the checkpoint ``chosen`` if that is one of its
    own; by place, with bytes. Then how many files, of how many bytes, are at home already."""
    of_checkpoint = {id(p): rows for p, rows in files_of(asked, chosen.name)} if chosen is not None else {}
    seen: set[str] = set()
    plan = []
    here = here_bytes = 0
    for place, answer in asked.answers:
        rows = {**rows_of(place, answer.get("outputs")), **of_checkpoint.get(id(place), {})}
        lacks = {}
        for name, row in rows.items():
            if name in seen:
                continue  # several nodes have it: the first one's is as good as any
            seen.add(name)
            if is_here(home, name, row):
                here, here_bytes = here + 1, here_bytes + int(row["bytes"])
            else:
                lacks[name] = int(row["bytes"])
        plan.append((place, lacks))
    return plan, here, here_bytes


def is_here(home: Path, name: str, row: Mapping[str, Any]) -> bool:
    """Whether the file at home is the one that the node told of, as far as size and time say: the whole time, or its
    seconds where no more came along (SFTP, some disks)."""
    path = check_target(home, name)
    if not path.is_file():
        return False
    facts, told = path.stat(), float(row.get("modified", 0))
    return facts.st_size == row["bytes"] and (abs(facts.st_mtime - told) < 0.001 or facts.st_mtime == int(told))


def prove(
    backend: Backend, run: str, home: Path, name: str, held: Sequence[tuple[Place, Mapping[str, Mapping[str, Any]]]]
) -> int:
    """Holds every file of the checkpoint at home against its digest on its node, and writes that down. Returns how
    many there are; raises VerificationFailed naming the first that differ."""
    busy = [(place, sorted(rows)) for place, rows in held if rows]

    def ask(item: tuple[Place, list[str]]) -> Mapping[str, str]:
        place, names = item
        request = {"run_dir": run_dir(place, run), "files": names}
        told: Mapping[str, str] = backend.call(place, "digests", request, timeout_s=6 * 3600.0)["digests"]
        return told

    answers: list[Any] = in_parallel(ask, busy)
    raise_worst(a for a in answers if isinstance(a, ZerunError))
    files: dict[str, dict[str, Any]] = {}
    for (place, names), digests in zip(busy, answers, strict=True):
        for path in names:
            files[path] = {"bytes": (home / path).stat().st_size, "digest": digests.get(path), "node": name_of(place)}
    record = read_json(str(home / RECORD))
    known: dict[str, Any] = record if isinstance(record, dict) else {}
    wrong = _wrong(home, files)
    if wrong:
        for path in wrong:
            check_target(home, path).unlink(missing_ok=True)  # of equal size and time: it would not be brought again
        raise VerificationFailed(
            f"{name}: {'; '.join(f'{path} {why}' for path, why in list(wrong.items())[:5])}",
            hint=f"zerun collect {run} brings what is wrong once more",
        )
    write_atomically(home / RECORD, dumps({**known, name: {"files": files}}))
    return len(files)


def at_home(home: Path, name: str) -> Mapping[str, Mapping[str, Any]]:
    """The files of a checkpoint that is at home and is still what its nodes told, by path: bytes, digest, node. None
    where it was not brought, or is damaged."""
    if name not in collected(home):
        return {}
    files = _brought(home, name)
    return {} if _wrong(home, files) else files


def collected(home: Path) -> list[str]:
    """Names of the program's own checkpoints that were brought home, in the order they were."""
    record = read_json(str(home / RECORD))
    return list(record) if isinstance(record, dict) else []


def verify_foreign(home: Path, name: str) -> Report:
    """Reads a checkpoint that is at home whole, and holds every file against the digest that its node told."""
    files = _brought(home, name)
    wrong = _wrong(home, files)
    total = sum(int(row["bytes"]) for row in files.values())
    problems = tuple(f"{path} (from {files[path]['node']}) {why}" for path, why in wrong.items())
    return Report(folder=str(home / name), step=None, bytes=total, num_shards=len(files), problems=problems)


def _brought(home: Path, name: str) -> Rows:
    """What foreign.json tells of the files of ``name``."""
    try:
        files: dict[str, dict[str, Any]] = read_json(str(home / RECORD))[name]["files"]
        if not is_kept(name):
            raise ValueError(name)
        for path, row in files.items():
            if (
                "digest" not in row
                or not is_kept(path)
                or type(row["bytes"]) is not int
                or not isinstance(row["node"], str)
            ):
                raise ValueError(path)
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise VerificationFailed(
            f"{home / RECORD} is damaged: what it tells of {name!r} cannot be read",
            hint=f"zerun collect {home.name} writes it anew",
        ) from problem
    return files


def _wrong(home: Path, files: Rows) -> dict[str, str]:
    found = {}
    for name, row in files.items():
        path = check_target(home, name)
        if not path.is_file():
            found[name] = "is missing"
        elif path.stat().st_size != row["bytes"]:
            found[name] = f"has {path.stat().st_size} bytes of {row['bytes']}"
        elif row["digest"] is None or digest_of(path, str(row["digest"])) != row["digest"]:
            found[name] = f"is not {row['digest']}, which it was on its node"
    return found


def digest_of(path: Path, like: str) -> str:
    """The digest of a file here, by the algorithm that ``like`` names."""
    import hashlib

    algorithm = like.partition(":")[0]
    state = hashlib.sha256() if algorithm == "sha256" else xxhash.xxh3_128()
    with open_file(path) as file:
        while data := file.read(1 << 22):
            state.update(data)
    return f"{algorithm}:{state.hexdigest()}"


def bring_proof(backend: Backend, asked: Asked, run: str, home: Path, name: str) -> int:
    """:func:`prove` of the checkpoint ``name``, not while a node that may have a piece of it is silent."""
    if asked.silent:
        raise PartialAnswer(f"{name} may have files on {', '.join(asked.silent)}, which did not answer")
    return prove(backend, run, home, name, files_of(asked, name))
