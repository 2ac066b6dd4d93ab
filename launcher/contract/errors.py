"""The exit codes and the error tree. Each error says what happened, where, and what to do next.

::

    ZerunError
    ├── UsageError             2   a flag, a name or an argument that makes no sense
    │   └── DescriptionError   2   a YAML description: every mistake at once, each with its place
    ├── DoesNotFit             3   the plan is above the device
    ├── Unreachable            4   a cluster or node did not answer, or what it said is not known
    ├── Refused                5   host key, unsafe name, path that leaves its folder
    │   └── Busy               5   slots that another run or process holds
    ├── NoSpace                6
    ├── VerificationFailed     7   bytes that are not what the manifest says
    ├── PartialAnswer          8   only part of the nodes answered
    ├── JobFailed              1
    └── Interrupted          130   Ctrl-C, where something may have been begun
"""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import List, NamedTuple, Optional, Sequence


class Exit(IntEnum):
    """What a ``zerun`` command's exit status means (``docs/cli.md``)."""

    DONE = 0
    JOB_FAILED = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    UNREACHABLE = 4
    REFUSED = 5
    NO_SPACE = 6
    VERIFICATION = 7
    PARTIAL = 8
    CANCELLED = 9
    STILL_RUNNING = 10
    STOPPED = 75
    TIME_LIMIT = 124
    INTERRUPTED = 130


def exit_of_signal(number: int) -> int:
    """The exit status that stands for a process killed by signal ``number``: never 0."""
    return 128 + number


class ZerunError(Exception):
    """The root of every error that a user may meet.

    ``hint`` is the next thing to do, in one line; it is printed on a line of its own.
    """

    exit_code: Exit = Exit.JOB_FAILED

    def __init__(self, message: str, *, hint: Optional[str] = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None and sys.version_info >= (3, 11):
            self.add_note(f"hint: {hint}")  # for a traceback, where no command of ours prints it


class UsageError(ZerunError):
    exit_code = Exit.USAGE


class Problem(NamedTuple):
    """One mistake in a description. Lines and columns count from 1; 0 means the whole file."""

    file: str
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}"


class DescriptionError(UsageError):
    """Everything that is wrong with one or more descriptions, in reading order."""

    def __init__(self, problems: Sequence[Problem], *, hint: Optional[str] = None) -> None:
        self.problems: List[Problem] = sorted(problems)
        super().__init__("\n".join(str(p) for p in self.problems), hint=hint)


class DoesNotFit(ZerunError):
    exit_code = Exit.DOES_NOT_FIT


class Unreachable(ZerunError):
    exit_code = Exit.UNREACHABLE


class Refused(ZerunError):
    exit_code = Exit.REFUSED


class Busy(Refused):
    """Somebody else has the slots; what was asked for may be asked for again later."""


class NoSpace(ZerunError):
    exit_code = Exit.NO_SPACE


class VerificationFailed(ZerunError):
    exit_code = Exit.VERIFICATION


class PartialAnswer(ZerunError):
    exit_code = Exit.PARTIAL


class JobFailed(ZerunError):
    exit_code = Exit.JOB_FAILED


class Interrupted(ZerunError):
    exit_code = Exit.INTERRUPTED
