"""Keys and passwords that would travel without anybody having meant it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

_KEYS = ("*.pem", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519")
_NAMES = (".env", ".env.*", ".netrc", ".pypirc", ".git-credentials", *_KEYS)
_HARMLESS = (".env.example", ".env.sample", ".env.template")
_SHORTEST = 8  # a shorter value is found in any text


def private_names(files: Iterable[str]) -> list[str]:
    """Those of ``files`` whose names say that they hold keys."""
    found = []
    for path in files:
        name = path.rsplit("/", 1)[-1].lower()
        if name not in _HARMLESS and any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES):
            found.append(path)
    return found


def holders(files: Iterable[tuple[str, bytes]], secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """(file, name of the secret) wherever a file holds a secret's value."""
    values = [(name, value.encode()) for name, value in secrets.items() if len(value) >= _SHORTEST]
    return [(path, name) for path, data in files for name, value in values if value in data]


def masked(data: bytes, secrets: Mapping[str, str]) -> bytes:
    """``data`` with every value of ``secrets`` replaced by its name."""
    for name, value in sorted(secrets.items(), key=lambda item: -len(item[1])):
        if value:
            data = data.replace(value.encode("utf-8", "surrogateescape"), f"***{name}***".encode())
    return data
