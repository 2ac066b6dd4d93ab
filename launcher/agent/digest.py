"""The verb ``digest``: reads files whole, and copies one whole. The ranks' Python runs it: xxhash is there.

The agent's own Python has the standard library alone; without xxhash the digest is SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from typing import Any, Dict, Optional

_BLOCK = 4 << 20


def digest(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{files: {path: algorithm or null}, copy?: {source, target}}`` → ``{digests: {path: "xxh3:…"}}``.

    ``copy`` writes ``target`` first, down to its disk; name it under ``files`` to have it read again.
    """
    copy = request.get("copy")
    if copy:
        copy_file(str(copy["source"]), str(copy["target"]))
    wanted = request["files"]
    return {"digests": {str(path): of_file(str(path), algorithm) for path, algorithm in wanted.items()}}


def of_file(path: str, algorithm: Optional[str] = None) -> Optional[str]:
    """``algorithm:hex``; None for an algorithm that is not here. ``algorithm`` null: the best that is here."""
    made = _new(algorithm)
    if made is None:
        return None
    name, state = made
    buffer = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while True:
            count = file.readinto(buffer)
            if not count:
                return f"{name}:{state.hexdigest()}"
            state.update(buffer[:count])


def _new(algorithm: Optional[str]) -> Any:
    if algorithm in (None, "xxh3"):
        try:
            return "xxh3", importlib.import_module("xxhash").xxh3_128()
        except ImportError:
            if algorithm is not None:
                return None
    return ("sha256", hashlib.sha256()) if algorithm in (None, "sha256") else None


def copy_file(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as give, open(target, "wb", buffering=0) as take:
        while True:
            data = give.read(_BLOCK)
            if not data:
                break
            view = memoryview(data)
            while view:
                view = view[take.write(view) :]
        os.fsync(take.fileno())
