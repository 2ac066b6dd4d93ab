"""What collect and stage share: asking all places at once, checked names, free space, proven arrivals."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from ..contract.errors import (
    NoSpace,
    PartialAnswer,
    Refused,
    Unreachable,
    VerificationFailed,
    ZerunError,
)
from ..contract.folder import RunFolder
from ..contract.holdings import is_checkpoint_file, is_collected
from ..contract.manifest import ShardFile
from .verify import check_shard

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

T = TypeVar("T")

WORKERS = 8
SPARE_BYTES = 64 * 2**20  # left free beside what is brought


def size(count: int) -> str:
    """``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def name_of(place: Place) -> str:
    return place.node or place.transport.name


def run_dir(place: Place, run: str) -> str:
    return str(RunFolder.at(place.runs, run).root)


def in_parallel(work: Callable[[T], Any], over: Sequence[T]) -> list[Any | ZerunError]:
    """``work`` of each, at once; a ZerunError stands in its place instead of being raised."""

    def one(item: T) -> Any | ZerunError:
        try:
            return work(item)
        except ZerunError as problem:
            return problem

    if not over:
        return []
    with ThreadPoolExecutor(min(WORKERS, len(over))) as pool:
        return list(pool.map(one, over))


def raise_worst(problems: Iterable[ZerunError]) -> None:
    """Raises the one that a person has to act on first; a cut connection goes after all others."""
    found = list(problems)
    kinds = (NoSpace, Refused, VerificationFailed)
    found.sort(key=lambda p: (isinstance(p, Unreachable), not isinstance(p, kinds)))
    if found:
        raise found[0]


@dataclass(frozen=True)
class Asked:
    """A question put to all places: who answered what, and who did not."""

    answers: tuple[tuple[Place, Mapping[str, Any]], ...]
    silent: Mapping[str, ZerunError]

    def complain(self, done: str, hint: str) -> None:
        """Raises PartialAnswer when some place did not answer; ``done`` says what was done nevertheless, ``hint`` what
        to do about the rest."""
        if self.silent:
            name, problem = next(iter(self.silent.items()))
            names = ", ".join(self.silent)
            said = problem.message if problem.message.startswith(f"{name}: ") else f"{name}: {problem.message}"
            raise PartialAnswer(f"{done}; {names} did not answer ({said})", hint=hint)


def ask_all(
    backend: Backend, verb: str, request: Callable[[Place], Mapping[str, Any]], *, timeout_s: float = 120.0
) -> Asked:
    """Raises Unreachable when nobody answers, and at once what is no question of reaching (Refused, …)."""
    places = list(backend.places())
    found = in_parallel(lambda place: backend.call(place, verb, request(place), timeout_s=timeout_s), places)
    raise_worst(f for f in found if isinstance(f, ZerunError) and not isinstance(f, Unreachable))
    silent = {name_of(p): f for p, f in zip(places, found, strict=True) if isinstance(f, ZerunError)}
    answers = tuple((p, f) for p, f in zip(places, found, strict=True) if not isinstance(f, ZerunError))
    if not answers and silent:
        raise next(iter(silent.values()))
    return Asked(answers, silent)


# --- names from elsewhere -------------------------------------------------------------------------


def checked_files(place: Place, rows: Any, *, of_checkpoint: bool) -> dict[str, int]:
    """Names and sizes of an inventory. Refused for any name that we would not write ourselves."""
    files: dict[str, int] = {}
    accepted = is_checkpoint_file if of_checkpoint else is_collected
    for row in rows if isinstance(rows, list) else ():
        name, num_bytes = (row.get("path"), row.get("bytes")) if isinstance(row, dict) else (None, None)
        if not isinstance(name, str) or not accepted(name):
            raise Refused(f"{name_of(place)} offers a file named {name!r}, which is no file of a run")
        if not isinstance(num_bytes, int) or num_bytes < 0:
            raise Refused(f"{name_of(place)} says that {name} has {num_bytes!r} bytes")
        files[name] = num_bytes
    return files


def check_target(home: Path, name: str) -> Path:
    """Where ``name`` goes at home; Refused when a symbolic link leads out of the run's folder."""
    path = home / name
    if path.is_symlink() or not path.parent.resolve().is_relative_to(home.resolve()):
        raise Refused(f"{path} leads out of {home}: a symbolic link is in the way", hint="remove the link")
    return path


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises NoSpace when ``num_bytes`` more do not fit where ``folder`` lies."""
    at = folder
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    if num_bytes and num_bytes + SPARE_BYTES > free:
        raise NoSpace(
            f"{folder}: {size(num_bytes)} are to come, {size(free)} are free",
            hint="free some space, or bring less: --checkpoint none, or another step",
        )


# --- bytes ----------------------------------------------------------------------------------------


class Meter:
    """Counts what arrived, from several threads, for one ``progress(done, total)``."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.total = total
        self.moved = 0
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self.moved += num_bytes
            if self._progress is not None:
                # What is fetched a second time makes the whole larger, never the bar longer than itself.
                self.total = max(self.total, self.moved)
                self._progress(self.moved, self.total)


def fetch_shards(place: Place, run: str, step: int, shards: Sequence[ShardFile], home: Path, meter: Meter) -> None:
    """Brings shards from one place into the checkpoint folder at home and proves each; a wrong one is
    brought once more, then VerificationFailed names rank, file and block."""
    source = str(RunFolder.at(place.runs, run).checkpoint(step).root)
    target = step_folder(home, step)
    place.transport.fetch([s.file for s in shards], source, target, progress=meter)
    wrong = _remove_wrong(target, shards)
    if not wrong:
        return
    place.transport.fetch([s.file for s in wrong], source, target, progress=meter)
    problems = [check_shard(target / s.file, s, durable=True) for s in wrong]
    found = [p for p in problems if p is not None]
    if found:
        _remove_wrong(target, wrong)
        said = "\n".join(p.sentence() for p in found[:5])
        raise VerificationFailed(
            f"step {step}, brought twice from {name_of(place)}: {said}",
            hint=f"the bytes are damaged there: take another step (zerun ckpt ls {run})",
        )


def _remove_wrong(target: Path, shards: Sequence[ShardFile]) -> list[ShardFile]:
    """The shards that are not what they should be. Removed: a copy of equal size and time would be skipped."""
    wrong = [s for s in shards if check_shard(target / s.file, s, durable=True) is not None]
    for shard in wrong:
        (target / shard.file).unlink(missing_ok=True)
    return wrong


def lacking(folder: Path, shards: Sequence[ShardFile]) -> list[ShardFile]:
    """The shards that are not in ``folder`` with the right size and digest."""
    with ThreadPoolExecutor(WORKERS) as pool:
        checked = pool.map(lambda s: check_shard(folder / s.file, s), shards)
        return [s for s, problem in zip(shards, checked, strict=True) if problem is not None]


def assign(
    shards: Sequence[ShardFile], holders: Sequence[tuple[Place, Mapping[str, int]]]
) -> tuple[dict[int, list[ShardFile]], list[ShardFile]]:
    """Which holder (by its index) each shard is taken from, its own node first; and the shards nobody has."""
    taken: dict[int, list[ShardFile]] = {}
    nowhere = []
    for shard in shards:
        able = [i for i, (_, files) in enumerate(holders) if files.get(shard.file) == shard.bytes]
        able.sort(key=lambda i: holders[i][0].node != shard.node)
        if able:
            taken.setdefault(able[0], []).append(shard)
        else:
            nowhere.append(shard)
    return taken, nowhere


def step_folder(home: Path, step: int) -> Path:
    return Path(RunFolder(PurePosixPath(home)).checkpoint(step).root)


def total(shards: Iterable[ShardFile]) -> int:
    return sum(s.bytes for s in shards)
