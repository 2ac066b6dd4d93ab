"""The verb ``claim``: in a batch script that has just started, whose attempt is this?

Whoever makes the attempt's claim folder owns it. A script that starts again (Slurm requeued the job) finds
the claim taken and gets the next free attempt, prepared from the old one; nothing of the old is overwritten.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import secrets
import sys
from pathlib import Path, PurePosixPath
from typing import List, Optional

from ..contract.errors import Refused
from ..contract.folder import AttemptFolder, RunFolder
from ..contract.launch import LaunchSpec
from ..contract.lineage import left_behind, resumed_from
from ..contract.plain import dumps, from_plain, loads, write_atomically
from . import state
from .own_files import foreign_of


def run(argv: List[str]) -> int:
    """``--run-dir D --attempt K``: prints the number of the attempt that this start is.

    Raises Refused when another job has the claim: a script that was submitted twice runs once.
    """
    parser = argparse.ArgumentParser(prog="claim")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(argv)
    run_folder = RunFolder(PurePosixPath(options.run_dir))
    try:
        number = claim(run_folder, options.attempt, os.environ.get("SLURM_JOB_ID"), _restarts())
    except Refused as problem:
        sys.stderr.write(f"zerun: {problem.message}\n")
        return int(problem.exit_code)
    sys.stdout.write(f"{number}\n")
    return 0


def claim(run_folder: RunFolder, attempt: int, job: Optional[str], restarts: int) -> int:
    """Takes ``attempt`` or the next free one for ``job``; that attempt's launch.json then names the job."""
    folder = run_folder.attempt(attempt)
    _read(folder)  # what cannot be started is not claimed
    if _take(folder, job):
        _name_job(folder, job, restarts)
        return attempt
    owner = _owner(folder)
    if job is not None and owner not in (None, job):
        raise Refused(f"attempt {attempt} belongs to job {owner}; this is job {job}")
    if job is not None and owner is None and restarts == 0:
        raise Refused(f"attempt {attempt} was already begun, and not by job {job}")
    step = newest_whole(run_folder)
    number = attempt
    while True:
        number += 1
        following = run_folder.attempt(number)
        try:
            Path(following.root).mkdir()
        except FileExistsError:
            continue
        _prepare(folder, following, number, step, newest_foreign(run_folder))
        _take(following, job)
        _name_job(following, job, restarts)
        return number


def newest_whole(run_folder: RunFolder) -> Optional[int]:
    """The step of the newest checkpoint that has its manifest and all its shards, on the line that the run is on."""
    folder = str(run_folder.root)
    found = state.checkpoints_here(folder)
    behind = left_behind({int(c["step"]): int(c["attempt"]) for c in found if c["manifest"]}, resumed_from(folder))
    whole = [int(c["step"]) for c in found if c["whole"]]
    return max([step for step in whole if step not in behind] or whole, default=None)


def newest_foreign(run_folder: RunFolder) -> Optional[str]:
    """The newest whole checkpoint of the program's own, by its name below the run's folder."""
    whole = [str(c["name"]) for c in foreign_of(str(run_folder.root)) if c["whole"]]
    return whole[-1] if whole else None


def _restarts() -> int:
    text = os.environ.get("SLURM_RESTART_COUNT", "0")
    return int(text) if text.isdigit() else 0


def _take(folder: AttemptFolder, job: Optional[str]) -> bool:
    try:
        Path(folder.claim).mkdir()
    except FileExistsError:
        return False
    write_atomically(Path(folder.claim) / "owner", dumps({"job": job}))
    return True


def _owner(folder: AttemptFolder) -> Optional[str]:
    try:
        owner = loads((Path(folder.claim) / "owner").read_bytes()).get("job")
    except (OSError, ValueError, AttributeError):
        return None
    return None if owner is None else str(owner)


def _prepare(
    old: AttemptFolder, new: AttemptFolder, number: int, step: Optional[int], foreign: Optional[str] = None
) -> None:
    """The script as it was; the launch specification for another attempt, with a token of its own."""
    Path(new.logs).mkdir()
    write_atomically(Path(new.script), Path(old.script).read_bytes())
    spec = _read(old)
    changed = dataclasses.replace(
        spec,
        attempt=number,
        token=secrets.token_hex(16),
        resume_step=step or spec.resume_step,
        resume_from=foreign or spec.resume_from,
    )
    write_atomically(Path(new.launch), dumps(changed))


def _name_job(folder: AttemptFolder, job: Optional[str], restarts: int) -> None:
    spec = dataclasses.replace(_read(folder), job_id=job, restart_count=restarts)
    write_atomically(Path(folder.launch), dumps(spec))
    if job is not None and not (Path(folder.root) / "job").exists():
        write_atomically(Path(folder.root) / "job", f"{job}\n".encode("ascii"))


def _read(folder: AttemptFolder) -> LaunchSpec:
    return from_plain(LaunchSpec, loads(Path(folder.launch).read_bytes()))
