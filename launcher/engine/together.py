"""What all ranks do or none: an error of one rank is told to all at the next small message, so that nobody waits for it
in another one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..contract.errors import JobFailed, NoSpace, UsageError, VerificationFailed, ZerunError
from .comm import Comm, CommError, gather_bytes


@dataclass
class Told:
    """What this rank tells, as JSON, and what everyone told, in rank order."""

    own: Any = None
    everyone: list[Any] = field(default_factory=list)


@contextmanager
def by_all(comm: Comm, what: str, device: torch.device | None, told: Told | None = None) -> Iterator[Told]:
    """What is inside sends no message. After it every rank hears how it went: where one failed, it raises its own error
    and the others one of the same kind that names it."""
    told, said = told or Told(), None
    failed: Exception | None = None
    try:
        yield told
    except CommError:
        raise  # the others are at another message
    except ZerunError as error:
        failed, said = error, [int(error.exit_code), error.message, error.hint]
    except Exception as error:  # noqa: BLE001 (a disk, torch, a user's function: told to all, raised again as it is)
        failed, said = error, [int(JobFailed.exit_code), f"{type(error).__name__}: {error}", None]
    row = [told.own, said]
    rows = [json.loads(r) for r in gather_bytes(comm, json.dumps(row).encode(), what, device)]
    told.everyone = [own for own, _ in rows]
    if failed is not None:
        try:
            raise failed
        finally:
            failed = None  # its traceback holds this frame: neither would go before the collector comes
    for rank, (_, said) in enumerate(rows):
        if said:
            code, message, hint = said
            kinds: tuple[type[ZerunError], ...] = (UsageError, VerificationFailed, NoSpace)
            kind = next((k for k in kinds if k.exit_code == code), JobFailed)
            raise kind(f"rank {rank} says: {message}", hint=hint)
