"""What a cluster says about files: every place at once, each file read once (the agent keeps what it found)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from ..checkpoints.moving import in_parallel, name_of
from ..contract.errors import UsageError, ZerunError
from ..contract.plain import open_file

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place
    from ..specs.models import Cluster

_READ_S = 6 * 3600.0  # a large file on a slow disk, read for the first time
_BLOCK = 4 << 20


@dataclass(frozen=True)
class Seen:
    """A file at a place. ``problem`` is a sentence's end where it cannot be used (``is not there``), else empty."""

    path: str
    bytes: int
    digest: str
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """What one place said: its files by path, and the bytes that are free in their folders."""

    place: Place
    files: Mapping[str, Seen]
    free: Mapping[str, int | None]


def look(
    backend: Backend, cluster: Cluster, places: Sequence[Place], files: Mapping[str, str | None], *, fresh: bool = False
) -> tuple[list[Answer], dict[str, ZerunError]]:
    """``files``: absolute path → the algorithm wanted for its digest, or None. ``fresh`` reads them again.

    Returns the answers, and the errors of the places that gave none, by name.
    """

    def one(place: Place) -> Answer:
        request = {
            "files": [{"path": path, "algorithm": algorithm} for path, algorithm in files.items()],
            "python": cluster.python,
            "setup": cluster.setup,
            "cache": f"{place.runs}/.data/digests.json",
            "fresh": fresh,
        }
        said = backend.call(place, "data", request, timeout_s=_READ_S)
        seen = {row["path"]: _seen(row) for row in said["files"]}
        return Answer(place, seen, said["free_bytes"])

    found = in_parallel(one, list(places))
    answers = [f for f in found if isinstance(f, Answer)]
    silent = {name_of(p): f for p, f in zip(places, found, strict=True) if isinstance(f, ZerunError)}
    return answers, silent


def _seen(row: Mapping[str, Any]) -> Seen:
    return Seen(str(row["path"]), int(row["bytes"] or 0), str(row["digest"] or ""), str(row["problem"] or ""))


def file_here(path: Path, algorithm: str | None = None) -> Seen:
    """A file of this machine. Raises UsageError when it cannot be read."""
    import hashlib

    state = hashlib.sha256() if algorithm == "sha256" else xxhash.xxh3_128()
    buffer = memoryview(bytearray(_BLOCK))
    total = 0
    try:
        with open_file(path) as file:
            while count := file.readinto(buffer):
                state.update(buffer[:count])
                total += count
    except OSError as problem:
        raise UsageError(f"{path} cannot be read: {problem.strerror}") from problem
    return Seen(str(path), total, f"{algorithm or 'xxh3'}:{state.hexdigest()}")
