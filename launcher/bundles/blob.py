"""Bytes that are called what they are."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Bundle:
    """Bytes under their SHA-256. ``name`` is ``<sha256>.zip`` or ``<sha256>.tree``; ``<sha256>.tar.gz`` is a tree that
    an older launcher shipped."""

    name: str
    data: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        return self.name.split(".", 1)[0]


def named(data: bytes, suffix: str) -> Bundle:
    return Bundle(hashlib.sha256(data).hexdigest() + suffix, data)
