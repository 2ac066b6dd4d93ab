"""An attempt, from what is asked before it is made until it has ended."""

from __future__ import annotations

from .make import (
    Attempts,
    Made,
    Source,
    forget_secrets,
    keep_code,
    made_of,
    not_known,
    one_folder,
    remembered,
    take_attempt,
)

__all__ = [
    "Attempts",
    "Made",
    "Source",
    "forget_secrets",
    "keep_code",
    "made_of",
    "not_known",
    "one_folder",
    "remembered",
    "take_attempt",
]
