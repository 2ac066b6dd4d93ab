"""Bringing a run home: logs, metrics, records, and one checkpoint, proven at arrival.

Sizes first, then free space, then all places in parallel. A rerun moves only what lacks. The manifest is
put in place last, by rename: an interrupted collect leaves shards, and no checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.damage import is_note
from ..contract.errors import PartialAnswer, UsageError, VerificationFailed, ZerunError
from ..contract.folder import RunFolder, rank_of
from ..contract.holdings import identity, record_digest
from ..contract.manifest import Manifest, ShardFile
from ..contract.plain import sync_folder
from ..runs.locks import hold
from .foreign import bring_proof, own_files
from .found import Candidate, candidates, choose, newest_whole
from .moving import (
    Asked,
    Meter,
    ask_all,
    assign,
    check_space,
    check_target,
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
from .verify import read_manifest, verify

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Collected:
    """What a collect did. ``step`` is the checkpoint that is at home now, proven; None when none was wanted
    or none is whole (then ``note`` says why)."""

    run: str
    folder: str
    step: int | None
    checkpoint: str | None
    moved_files: int
    moved_bytes: int
    here_files: int  # were at home already
    here_bytes: int
    verified_shards: int
    note: str = ""
    name: str = ""  # of a program's own checkpoint: its path below the run's folder; its files were verified


@dataclass
class _Job:
    """What one place has to give."""

    place: Place
    files: list[str]
    shards: list[ShardFile]


def collect(
    backend: Backend, run: str, home: Path, checkpoint: str = "newest", progress: Progress | None = None
) -> Collected:
    """Brings the run's files to its folder ``home``. ``checkpoint``: ``newest``, ``none`` or a step.

    Raises NoSpace, Refused (names, links), VerificationFailed (rank, file, block), Unreachable, and
    PartialAnswer after everything that could be brought was brought. UsageError while another command does it.
    """
    wanted = _wanted(checkpoint)
    with hold(home / ".collecting") as ours:
        if not ours:
            raise UsageError(f"{run} is being collected by another command", hint="wait for it; nothing is lost")
        return _collect(backend, run, home, wanted, progress)


def _collect(backend: Backend, run: str, home: Path, wanted: str | int | None, progress: Progress | None) -> Collected:
    chosen, note = _choose(backend, run, home, wanted)
    own_name = chosen.name if chosen is not None else ""
    step = None if chosen is None or own_name else chosen.step
    asked = ask_all(backend, "inventory", lambda p: {"run_dir": run_dir(p, run), "checkpoint": step})
    own = identity(str(home))
    if any(own is not None and answer.get("identity") == own for _, answer in asked.answers):
        proven = bring_proof(backend, asked, run, home, own_name) if own_name else 0
        return _with_own(_in_place(asked, run, home, step, note), home, own_name, proven)

    files, here, here_bytes = _plan_files(asked, home)
    jobs = {id(place): _Job(place, list(names), []) for place, names in files}
    num_bytes = sum(sum(names.values()) for _, names in files)
    own_plan, own_here, own_bytes = own_files(asked, home, chosen)
    here, here_bytes = here + own_here, here_bytes + own_bytes
    for place, names in own_plan:
        jobs[id(place)].files += names
        num_bytes += sum(names.values())
    manifest, incoming = None, None
    if chosen is not None and step is not None:
        manifest, incoming = _bring_manifest(asked, run, chosen, home)
        needed = _lacking(incoming, step_folder(home, step), manifest)
        num_bytes += total(needed)
        here, here_bytes = here + len(manifest.shards) - len(needed), here_bytes + manifest.bytes - total(needed)
        _give_to(jobs, needed, asked, step)
    check_space(home, num_bytes)
    meter = Meter(num_bytes, progress)
    if progress is not None:
        progress(0, num_bytes)
    moved = sum(len(j.files) + len(j.shards) for j in jobs.values())
    _move(list(jobs.values()), run, home, step, meter)
    if manifest is not None and incoming is not None and step is not None:
        _put_in_place(incoming, step_folder(home, step), manifest)
    proven = bring_proof(backend, asked, run, home, own_name) if own_name else 0
    got = Collected(
        run=run,
        folder=str(home),
        step=step,
        checkpoint=None if step is None else str(step_folder(home, step)),
        moved_files=moved,
        moved_bytes=num_bytes,
        here_files=here,
        here_bytes=here_bytes,
        verified_shards=0 if manifest is None else len(manifest.shards),
        note=note,
    )
    got = _with_own(got, home, own_name, proven)
    asked.complain(f"{size(meter.moved)} brought to {home}{_came(got)}", _the_rest(asked, run))
    return got


def _came(got: Collected) -> str:
    """Of a collect that some machines had no part in: whether the checkpoint is one nevertheless."""
    if got.step is not None:
        return f", the checkpoint of step {got.step} whole ({got.verified_shards} shards verified)"
    if got.name:
        return f", the checkpoint {got.name} whole ({got.verified_shards} files verified)"
    return f", without a checkpoint: {got.note}" if got.note else ""


def _the_rest(asked: Asked, run: str) -> str:
    names = ", ".join(asked.silent)
    return f"what lies only on {names} is missing; when that answers: zerun collect {run} again (moves only what lacks)"


def _with_own(got: Collected, home: Path, name: str, proven: int) -> Collected:
    if not name:
        return got
    return replace(got, name=name, checkpoint=str(home / name), verified_shards=proven)


def _wanted(checkpoint: str) -> str | int | None:
    if checkpoint in ("newest", "none"):
        return None if checkpoint == "none" else checkpoint
    if checkpoint.isascii() and checkpoint.isdigit():
        return int(checkpoint)
    raise UsageError(f"--checkpoint {checkpoint!r}: accepted are newest, none, or a step")


def _choose(backend: Backend, run: str, home: Path, wanted: str | int | None) -> tuple[Candidate | None, str]:
    """The checkpoint to bring, and a note when there is none to be had."""
    if wanted is None:
        return None, ""
    asked = ask_all(backend, "state", lambda p: {"run_dirs": [run_dir(p, run)], "attempt": None})
    found = candidates([answer["runs"][run_dir(place, run)] for place, answer in asked.answers], home)
    if isinstance(wanted, int):
        try:
            return choose(found, wanted), ""
        except VerificationFailed as problem:
            if asked.silent:
                names = ", ".join(asked.silent)
                hint = f"when it answers, again; until then zerun ckpt ls {run} names the whole ones"
                raise PartialAnswer(f"{problem.message}; {names} did not answer", hint=hint) from problem
            raise
    newest = newest_whole(found)
    if newest is not None:
        return newest, ""
    looked = "; ".join(c.sentence() for c in reversed(found[-3:]))
    return None, f"no whole checkpoint ({looked})" if looked else "no checkpoint yet"


def _in_place(asked: Asked, run: str, home: Path, step: int | None, note: str) -> Collected:
    """The cluster's folder is the one at home: nothing moves, the checkpoint is proven where it lies."""
    verified = 0
    if step is not None:
        report = verify(step_folder(home, step))
        report.require()
        verified = report.num_shards
    files = [row for _, answer in asked.answers for row in (answer["files"])]
    if step is not None:
        files += [row for _, a in asked.answers if a["checkpoint"] for row in a["checkpoint"]["files"]]
    got = Collected(
        run=run,
        folder=str(home),
        step=step,
        checkpoint=None if step is None else str(step_folder(home, step)),
        moved_files=0,
        moved_bytes=0,
        here_files=len(files),
        here_bytes=sum(int(row["bytes"]) for row in files),
        verified_shards=verified,
        note=note or "its folder is the one at home: nothing had to move",
    )
    asked.complain(f"{run} is at home{_came(got)}", _the_rest(asked, run))
    return got


def _plan_files(asked: Asked, home: Path) -> tuple[list[tuple[Place, dict[str, int]]], int, int]:
    """What is to be brought of each place's files, and how many (of how many bytes) are here already."""
    plan = []
    seen: set[str] = set()
    here = here_bytes = 0
    for place, answer in asked.answers:
        lacks: dict[str, int] = {}
        digests = {row["path"]: row.get("digest") for row in answer.get("files", ())}
        for name, num_bytes in checked_files(place, answer.get("files"), of_checkpoint=False).items():
            # Several nodes hold copies of what the launcher sent them: the first one's is as good as any.
            if name in seen:
                continue
            seen.add(name)
            path = check_target(home, name)
            # Records are rewritten in place, at the same size perhaps; everything else only grows.
            same = not name.endswith(".json") or (digests[name] and digests[name] == record_digest(str(path)))
            if path.is_file() and path.stat().st_size == num_bytes and same:
                here, here_bytes = here + 1, here_bytes + num_bytes
            else:
                lacks[name] = num_bytes
        plan.append((place, lacks))
    return plan, here, here_bytes


def _bring_manifest(asked: Asked, run: str, chosen: Candidate, home: Path) -> tuple[Manifest, Path]:
    """The checkpoint's manifest, beside the checkpoints at home and not yet among them."""
    step, name = chosen.step, "manifest.json"
    incoming = home / "checkpoints" / f".incoming-{step:08d}"
    final = step_folder(home, step) / name
    check_target(home, str((incoming / name).relative_to(home)))
    check_target(home, str(final.relative_to(home)))
    for place, files in _holders(asked):
        if name not in files:
            continue
        (incoming / name).unlink(missing_ok=True)
        source = str(RunFolder.at(place.runs, run).checkpoint(step).root)
        place.transport.fetch([name], source, incoming)
        try:
            manifest = read_manifest(incoming / name, step)
        except VerificationFailed as problem:
            raise VerificationFailed(f"from {name_of(place)}: {problem.message}", hint=problem.hint) from problem
        if manifest.attempt == chosen.attempt:
            return manifest, incoming / name
    if final.is_file():
        # Every node that had it has left; what is at home is the checkpoint.
        manifest = read_manifest(final, step)
        incoming.mkdir(exist_ok=True)
        (incoming / name).write_bytes(final.read_bytes())
        return manifest, incoming / name
    raise VerificationFailed(f"step {step}: its manifest went away while it was collected", hint="collect again")


def _lacking(incoming: Path, folder: Path, manifest: Manifest) -> list[ShardFile]:
    """The shards that are to be brought. Until they are, what is at home is no checkpoint."""
    needed = lacking(folder, manifest.shards)
    final = folder / "manifest.json"
    if final.exists() and (needed or final.read_bytes() != incoming.read_bytes()):
        final.unlink()
    return needed


def _holders(asked: Asked) -> list[tuple[Place, Mapping[str, int]]]:
    held: list[tuple[Place, Mapping[str, int]]] = []
    for place, answer in asked.answers:
        about = answer.get("checkpoint") or {}
        held.append((place, checked_files(place, about.get("files"), of_checkpoint=True)))
    return held


def _give_to(jobs: Mapping[int, _Job], needed: Sequence[ShardFile], asked: Asked, step: int) -> None:
    holders = _holders(asked)
    taken, nowhere = assign(needed, holders)
    if nowhere:
        shard = nowhere[0]
        said = f"step {step}: rank {shard.rank}'s shard {shard.file} of {shard.node} is nowhere in its full size"
        if asked.silent:
            hint = "when it answers, again; --checkpoint none brings what the others wrote"
            raise PartialAnswer(f"{said}; {', '.join(asked.silent)} did not answer", hint=hint)
        raise VerificationFailed(said, hint="take another step: zerun ckpt ls")
    for index, shards in taken.items():
        jobs[id(holders[index][0])].shards += shards


def _move(jobs: Sequence[_Job], run: str, home: Path, step: int | None, meter: Meter) -> None:
    def one(job: _Job) -> None:
        if job.files:
            job.place.transport.fetch(job.files, run_dir(job.place, run), home, progress=meter)
            _check_arrived(home, job)
        if job.shards and step is not None:
            fetch_shards(job.place, run, step, job.shards, home, meter)

    busy = [job for job in jobs if job.files or job.shards]
    found: list[Any] = in_parallel(one, busy)
    problems = [f for f in found if isinstance(f, ZerunError)]
    raise_worst(problems)


def _check_arrived(home: Path, job: _Job) -> None:
    for name in job.files:
        # A link that was put there meanwhile must not be followed by whoever reads the run next.
        check_target(home, name)


def _put_in_place(incoming: Path, folder: Path, manifest: Manifest) -> None:
    """The shards are proven. What lies there of another attempt that had more ranks is none of this checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = {shard.file for shard in manifest.shards}
    for other in folder.iterdir():
        if other.name not in ours and (rank_of(other.name) is not None or is_note(other.name)):
            other.unlink()
    with incoming.open("rb") as file:
        os.fsync(file.fileno())
    sync_folder(folder)
    os.replace(incoming, folder / "manifest.json")
    sync_folder(folder)
    incoming.parent.rmdir()
