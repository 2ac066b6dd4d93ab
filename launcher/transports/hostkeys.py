"""known_hosts as OpenSSH reads it, for paramiko: only the lines that speak of one machine are parsed."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class KnownKeys(NamedTuple):
    """``(type, base64)`` pairs. ``file`` is where the first of them stands, for messages."""

    keys: tuple[tuple[str, str], ...]
    revoked: frozenset[str]
    file: Path | None


def known_keys(files: Sequence[Path], names: Sequence[str]) -> KnownKeys:
    """What the files say about a machine that goes by one of ``names``; missing files say nothing.

    Certificate authorities (``@cert-authority``) are not followed: such a machine counts as unknown.
    """
    keys: list[tuple[str, str]] = []
    revoked: set[str] = set()
    first: Path | None = None
    for file in files:
        try:
            lines = file.read_text("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if len(words) < 3 or words[0].startswith("#"):
                continue
            marker = words.pop(0) if words[0].startswith("@") else ""
            if len(words) < 3 or marker == "@cert-authority" or not any(_matches(words[0], n) for n in names):
                continue
            if marker == "@revoked":
                revoked.add(words[2])
            else:
                first = first or file
                keys.append((words[1], words[2]))
    return KnownKeys(tuple(keys), frozenset(revoked), first)


def _matches(patterns: str, name: str) -> bool:
    if patterns.startswith("|1|"):
        return _hash_matches(patterns, name)
    found = False
    for pattern in patterns.split(","):
        negated = pattern.startswith("!")
        body = pattern[1:] if negated else pattern
        # Only * and ? are wild there; a [ begins a port's brackets.
        if fnmatch.fnmatchcase(name.lower(), body.lower().replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def _hash_matches(entry: str, name: str) -> bool:
    try:
        _, _, salt, digest = entry.split("|")
        made = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(made, base64.b64decode(digest))
    except ValueError:
        return False


def fingerprint(blob: bytes) -> str:
    """A key as OpenSSH shows it: ``SHA256:…``."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")


def lookup_names(key_name: str, hostname: str) -> tuple[str, ...]:
    """Under which names OpenSSH looks: with the port, then without."""
    return tuple(dict.fromkeys((key_name, hostname))) if key_name.startswith("[") else (key_name,)


def types_of(keys: Iterable[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in keys))
