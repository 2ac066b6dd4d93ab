"""The verb ``submit``: hands an attempt's script to Slurm exactly once, however often it is asked.

What makes it so: a lock (an exclusive folder) for calls at the same time; ``attempts/K/job``, which keeps the
job's id; and the job's unique name, by which a job is found whose id never reached that file.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, Iterator

from ..contract.errors import Unreachable
from ..contract.folder import RunFolder
from ..contract.plain import PlainError, dumps, from_plain, write_atomically
from ..contract.records import ProcessId
from . import processes, slurm
from .install import with_space

_WAIT_S = 50.0
_STALE_S = 600.0  # on another login node nobody can look whether the owner lives


def submit(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, attempt, files, secrets?, sbatch: [argv…], name}`` → ``{job, adopted}``.

    Raises UsageError when Slurm refuses the job, Unreachable when it did not answer, NoSpace, Refused.
    """
    attempt = Path(RunFolder(PurePosixPath(str(request["run_dir"]))).attempt(int(request["attempt"])).root)
    name = str(request["name"])
    attempt.mkdir(parents=True, exist_ok=True)
    with _alone(attempt / "submitting"):
        kept = read_job(attempt)
        if kept is not None:
            return {"job": kept, "adopted": True}
        intent = attempt / "submit.intent"
        found = slurm.find_by_name(name, ended_too=intent.exists())
        if found is None:
            with_space(request)
            (attempt / "logs").mkdir(exist_ok=True)
            write_atomically(intent, dumps({"name": name, "at": time.time()}), durable=True)
            found = _hand_over(request, name)
            adopted = False
        else:
            adopted = True
        write_atomically(attempt / "job", f"{found}\n".encode("ascii"), durable=True)
        return {"job": found, "adopted": adopted}


def _hand_over(request: Dict[str, Any], name: str) -> str:
    try:
        return slurm.sbatch([str(word) for word in request["sbatch"]], name)
    except Unreachable:
        raise
    except BaseException:
        # Nothing was queued, so nobody would ever delete them.
        if request.get("secrets"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(request["secrets"]["path"]))
        raise


def read_job(attempt: Path) -> "str | None":
    """The id that ``attempts/K/job`` keeps, or None."""
    try:
        text = (attempt / "job").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.isdigit() else None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one call at a time; what a killed one left is taken over."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            lock.mkdir()
            break
        except FileExistsError:
            if _abandoned(lock):
                with contextlib.suppress(OSError):
                    # Of several that want to take over, the rename picks one.
                    gone = lock.with_name(f".submitting.{os.getpid()}.{time.time_ns()}")
                    lock.rename(gone)
                    _remove(gone)
                continue
            if time.monotonic() > end:
                raise Unreachable(
                    f"another submit of this attempt is at work ({lock})", hint="wait, then ask again"
                ) from None
            time.sleep(0.1)
    try:
        own = processes.process_id(os.getpid())
        write_atomically(lock / "owner", dumps({"host": os.uname().nodename, "process": own}))
        yield
    finally:
        _remove(lock)


def _abandoned(lock: Path) -> bool:
    try:
        age = time.time() - lock.stat().st_mtime
        owner = json.loads((lock / "owner").read_bytes())
        process = from_plain(ProcessId, owner["process"])
    except (OSError, ValueError, KeyError, TypeError, PlainError):
        # It is being made at this moment, or its maker died within that moment.
        with contextlib.suppress(OSError):
            return time.time() - lock.stat().st_mtime > 10.0
        return False
    if owner["host"] == os.uname().nodename:
        return not processes.is_alive(process)
    return age > _STALE_S


def _remove(lock: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (lock / "owner").unlink()
    with contextlib.suppress(FileNotFoundError):
        lock.rmdir()
