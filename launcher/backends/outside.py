"""Slurm's commands as a shell that is no job would run them: deaf to SLURM_* and the like of an outer allocation."""

from __future__ import annotations

from ..contract.errors import UsageError
from ..transports.protocol import Result, Transport

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


def words(stderr: bytes) -> str:
    """What a command complained of, in one line."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[0] if lines else "no answer"
