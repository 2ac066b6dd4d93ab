"""What ``submit`` and ``claim`` need to know of Slurm's commands. Standard library only."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Dict, List, Optional, Sequence

from ..contract.errors import Unreachable, UsageError, ZerunError

_KEPT = ("SLURM_CONF",)
_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SQUEUE_", "SACCT_", "SCANCEL_", "SALLOC_", "PMI_", "PMIX_")
_DEAF = ("Unable to contact", "timed out", "Connection refused", "communication connection failure", "Zero Bytes")
_LATE_S = 20.0


def clean_environment() -> Dict[str, str]:
    """This process's environment without what an outer allocation (or a habit) would say to Slurm's commands."""
    return {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_PREFIXES)}


def ask(argv: Sequence[str], timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
    """Runs one of Slurm's commands. Raises UsageError when it is not installed, Unreachable when it hangs."""
    try:
        return subprocess.run(
            list(argv),
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            universal_newlines=True,
            errors="replace",
        )
    except FileNotFoundError as problem:
        raise UsageError(f"{argv[0]} is not here", hint="is this the login node, and Slurm in its PATH?") from problem
    except subprocess.TimeoutExpired as problem:
        raise Unreachable(f"{argv[0]} did not answer within {timeout_s:g} s") from problem


def is_deaf(said: str) -> bool:
    """Whether Slurm's controller did not answer, so that nothing is known."""
    return any(words in said for words in _DEAF)


def find_by_name(name: str, *, ended_too: bool) -> Optional[str]:
    """The newest job of that name, of this user; ``ended_too`` also asks accounting, where it is on.

    Raises Unreachable when the controller does not answer: then nothing is known.
    """
    done = ask(["squeue", "-h", "-t", "all", "-o", "%A", "--name", name, "-u", str(os.getuid())])
    if done.returncode:
        raise Unreachable(f"squeue: {_plain(done.stderr)}")
    ids = sorted({int(word) for word in done.stdout.split() if word.isdigit()})
    if not ids and ended_too:
        past = ["sacct", "-X", "-n", "-P", "-o", "JobIDRaw", "--name", name, "-S", "now-90days", "-u", str(os.getuid())]
        told = ask(past)
        if told.returncode == 0:  # otherwise accounting is off: the queue is all there is to ask
            ids = sorted({int(word) for word in told.stdout.split() if word.isdigit()})
    return str(ids[-1]) if ids else None


def sbatch(argv: List[str], name: str) -> str:
    """Submits and returns the job's id, also when the answer was lost but the job is there.

    Raises UsageError when Slurm refuses the job, Unreachable when it is not known whether it was taken.
    """
    try:
        done = ask(argv)
        said, deaf = done.stderr.strip(), done.returncode != 0 and is_deaf(done.stderr)
    except Unreachable as problem:
        done, said, deaf = None, problem.message, True
    if deaf:
        found = _late(name)
        if found is None:
            raise Unreachable(f"sbatch: {said}", hint="whether the job was taken is not known; submit again adopts it")
        return found
    assert done is not None
    if done.returncode:
        raise UsageError(f"Slurm refuses the job: {_plain(said)}", hint="mend the cluster's slurm: section or the job")
    job = done.stdout.strip().splitlines()[-1].split(";")[0] if done.stdout.strip() else ""
    if not job.isdigit():
        raise ZerunError(f"sbatch answered {done.stdout.strip()!r}, which is no job id")
    return job


def _late(name: str) -> Optional[str]:
    end = time.monotonic() + _LATE_S
    while True:
        try:
            return find_by_name(name, ended_too=True)
        except Unreachable:
            if time.monotonic() > end:
                return None
            time.sleep(1.0)


def _plain(said: str) -> str:
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in said.splitlines() if line.strip()]
    return "; ".join(lines) or "without a word"
