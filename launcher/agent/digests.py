"""xxh3-128 of a file's blocks in a Python that need not have a single package."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

from ..contract.errors import UsageError
from ..contract.manifest import BLOCK_BYTES

Digest = Callable[[bytes], str]

_HELPER = """
import json, sys, xxhash
with open(sys.argv[1], "rb") as file:
    blocks = iter(lambda: file.read(int(sys.argv[2])), b"")
    print(json.dumps([xxhash.xxh3_128_hexdigest(block) for block in blocks]))
"""

_PIPE = """
import sys, xxhash
while size := int.from_bytes(sys.stdin.buffer.read(8), "little"):
    print(xxhash.xxh3_128_hexdigest(sys.stdin.buffer.read(size)), flush=True)
"""


class _Hash128(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def wrong_block(path: str, blocks: Sequence[str], python: Optional[str]) -> Tuple[Optional[int], str]:
    """(number of the first block whose digest is not that of ``blocks``, what computed them); None: all are right.

    Tried in turn: the package xxhash, the system's libxxhash, and ``python``, which the ranks use. Raises UsageError
    when none of them is there.
    """
    for name, find in _inside():
        digest = find()
        if digest is not None:
            return _first_wrong(path, blocks, digest), name
    found = _by_python(path, python) if python and os.path.isabs(python) else None
    if found is None:
        raise _nothing()
    wrong = next((i for i, right in enumerate(blocks) if i >= len(found) or found[i] != right), None)
    return wrong, str(python)


@contextmanager
def digester(python: Optional[str]) -> Iterator[Digest]:
    """A function of bytes that are in memory here, by the same ways as :func:`wrong_block`."""
    for _, find in _inside():
        digest = find()
        if digest is not None:
            yield digest
            return
    if not python or not os.path.isabs(python):
        raise _nothing()
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        helper = subprocess.Popen([python, "-c", _PIPE], **piped)  # type: ignore[call-overload]
    except OSError:
        raise _nothing() from None

    def by_python(data: bytes) -> str:
        try:
            helper.stdin.write(len(data).to_bytes(8, "little") + data)
            helper.stdin.flush()
        except OSError:
            raise _nothing() from None
        said = helper.stdout.readline().decode("ascii").strip()
        if len(said) != 32:
            raise _nothing()
        return str(said)

    with helper:
        try:
            yield by_python
        finally:
            helper.kill()
            with suppress(OSError):  # what it did not take
                helper.stdin.close()


def _nothing() -> UsageError:
    return UsageError(
        "nothing here computes the manifest's digests",
        hint="install libxxhash, or give `python:` as an absolute path",
    )


def _first_wrong(path: str, blocks: Sequence[str], digest: Digest) -> Optional[int]:
    with open(path, "rb") as file:
        for number, right in enumerate(blocks):
            if digest(file.read(BLOCK_BYTES)) != right:
                return number
    return None


def _by_package() -> Optional[Digest]:
    try:
        digest: Digest = importlib.import_module("xxhash").xxh3_128_hexdigest
        return digest
    except (ImportError, AttributeError):
        return None


def _by_library() -> Optional[Digest]:
    try:
        function = ctypes.CDLL("libxxhash.so.0").XXH3_128bits  # since 0.8
    except (OSError, AttributeError):
        return None
    function.restype = _Hash128
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]

    def digest(data: bytes) -> str:
        found = function(data, len(data))
        return f"{found.high:016x}{found.low:016x}"

    return digest


def _inside() -> Tuple[Tuple[str, Callable[[], Optional[Digest]]], ...]:
    return ("xxhash", _by_package), ("libxxhash", _by_library)


def _by_python(path: str, python: str) -> Optional[List[str]]:
    try:
        done = subprocess.run(
            [python, "-c", _HELPER, path, str(BLOCK_BYTES)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return [str(b) for b in json.loads(done.stdout)] if done.returncode == 0 else None
    except (OSError, ValueError):
        return None
