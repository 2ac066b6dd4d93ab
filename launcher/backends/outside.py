"""Slurm's commands as a shell that is no job would run them: deaf to SLURM_* and the like of an outer allocation."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.errors import Unreachable, UsageError
from ..transports.protocol import Result, Transport

SEP = "\x1f"  # `|` is legal in job names and reasons
_CLEAN = (
    "for v in $(env | sed -n"
    " 's/^\\(\\(SLURM\\|SBATCH\\|SQUEUE\\|SACCT\\|SCANCEL\\|SINFO\\)_[A-Z0-9_]*\\)=.*/\\1/p'); do"
    ' [ "$v" = SLURM_CONF ] || unset "$v"; done; exec "$@"'
)


def ask(login: Transport, *argv: str, stdin: bytes = b"", timeout_s: float = 60.0) -> Result:
    """One command on the login side. Raises UsageError where it is not installed."""
    done = login.run(["/bin/sh", "-c", _CLEAN, "slurm", *argv], stdin=stdin, timeout_s=timeout_s)
    if done.returncode in (126, 127):
        raise UsageError(f"{login.name}: {argv[0]} is not there", hint="is it the login node of a Slurm cluster?")
    return done


def queue(login: Transport, *chosen: str, fields: Sequence[str]) -> list[list[str]]:
    """What squeue tells of the jobs (with ``-s``: the steps) ``chosen``: their ``fields`` (``%A``). Jobs that it does
    not know are none. Raises Unreachable."""
    done = ask(login, "squeue", "-h", *chosen, "-o", SEP.join(fields))
    if done.returncode:
        if b"Invalid job id" in done.stderr:  # what it says when it knows none of them
            return []
        raise Unreachable(f"{login.name}: squeue: {words(done.stderr)}")
    rows = [line.split(SEP) for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [[field.strip() for field in row] for row in rows if len(row) == len(fields)]


def words(stderr: bytes) -> str:
    """What a command complained of, in one line."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else "no answer"
