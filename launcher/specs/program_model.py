"""A script of the user's own."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from . import values
from .description import Description
from .mistakes import wrong
from .values import (
    LIST,
    Seconds,
    choice,
)

_STOP_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


def _argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv or not argv[0]:
        raise wrong("argv is empty; accepted: [python, train.py]")
    return argv


class Program(Description):
    """The user's own script, instead of ``model`` … ``steps``. On ``stop_signal`` it may save and exit 75."""

    argv: Annotated[tuple[values.AnyText, ...], LIST, AfterValidator(_argv)]
    stop_signal: Annotated[str, choice(*_STOP_SIGNALS, same={f"SIG{s}": s for s in _STOP_SIGNALS})] = "TERM"
    stop_grace: Seconds = 30
