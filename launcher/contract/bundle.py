"""The job's tree as it is shipped: a listing of its files, and their contents, each under its own SHA-256.

A listing is called ``<sha256>.tree`` after its own bytes. Contents are shared by all listings, so that of a tree in
which one file changed one content is new. A content is only believed once it was read: what is not what its name says
is not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Callable, Dict, Iterable, Iterator, Tuple, Union

from .errors import Refused, VerificationFailed
from .folder import content
from .plain import PlainError, from_plain, loads, open_file, read_file, to_plain

SUFFIX = ".tree"
BLOCK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_AGAIN = "submit or resume again: it is sent anew"
_STALE_S = 86400.0  # a part that nobody has written to for so long is what a killed command left


@dataclass(frozen=True)
class File:
    """``name`` is relative to the tree's root, with ``/``."""

    name: str
    digest: str
    size: int
    executable: bool = False


@dataclass(frozen=True)
class Link:
    name: str
    target: str


@dataclass(frozen=True)
class Listing:
    files: Tuple[File, ...]
    links: Tuple[Link, ...] = ()
    format: int = 1

    @property
    def sizes(self) -> Dict[str, int]:
        """Bytes of every content, each once, in the order of the files."""
        return {file.digest: file.size for file in self.files}

    def encode(self) -> bytes:
        """Equal listings give equal bytes, whatever is in a name."""
        return json.dumps(to_plain(self), separators=(",", ":")).encode("ascii") + b"\n"


def decode(data: bytes, name: str) -> Listing:
    """The listing in ``data`` that is called ``name``. Raises VerificationFailed when it is another one or none."""
    if hashlib.sha256(data).hexdigest() + SUFFIX != name:
        raise VerificationFailed(f"the listing of the job's code, {name}, is not what its name says")
    try:
        found = from_plain(Listing, loads(data))
    except (PlainError, ValueError) as problem:
        raise VerificationFailed(f"{name} is no listing of a job's code: {problem}") from problem
    if found.format != 1:
        raise VerificationFailed(f"{name} is a listing of format {found.format}, which this version does not read")
    sizes = found.sizes
    for file in found.files:
        if not _DIGEST.match(file.digest) or file.size < 0 or sizes[file.digest] != file.size:
            raise VerificationFailed(f"{name} is no listing of a job's code: see {file.name!r} in it")
    return found


def read_listing(path: Union[str, PurePath]) -> Listing:
    """Raises OSError, VerificationFailed."""
    return decode(read_file(str(path)), PurePath(path).name)


def pieces(source: IO[bytes]) -> Iterator[bytes]:
    """All of ``source``, block by block."""
    return iter(lambda: source.read(BLOCK), b"")


def is_content(runs: Union[str, Path], digest: str) -> bool:
    """Whether the content is there, and is what its name says."""
    found = hashlib.sha256()
    try:
        with open_file(str(content(str(runs), digest))) as file:
            for block in pieces(file):
                found.update(block)
    except OSError:
        return False
    return found.hexdigest() == digest


def copy_content(runs: Union[str, Path], digest: str, write: Callable[[bytes], object]) -> None:
    """Gives the content to ``write``, block by block. Raises VerificationFailed when it is gone, or was not what its
    name says: then ``write`` got something else."""
    found = hashlib.sha256()
    path = content(str(runs), digest)
    try:
        with open_file(str(path)) as file:
            for block in pieces(file):
                found.update(block)
                write(block)
    except FileNotFoundError:
        raise VerificationFailed(f"{path}, a file of the job's code, is gone", hint=_AGAIN) from None
    if found.hexdigest() != digest:
        raise VerificationFailed(f"{path}, a file of the job's code, is not what its name says", hint=_AGAIN)


def keep_content(runs: Union[str, Path], digest: str, blocks: Iterable[bytes]) -> None:
    """Puts ``blocks`` below ``runs`` as the content ``digest``; see :func:`publish`."""
    publish(str(runs), str(content(str(runs), digest)), digest, blocks)


def publish(runs: str, path: str, digest: str, blocks: Iterable[bytes]) -> None:
    """Writes ``blocks`` beside and renames: under the final name there is the whole or what was there before.

    Of two at once with equal bytes either may be the last. Raises VerificationFailed when the bytes are not those of
    ``digest``: then nothing has changed; Refused when a folder has that name.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    beside = _parts(runs)
    os.makedirs(beside, mode=0o700, exist_ok=True)
    found = hashlib.sha256()
    handle, part = tempfile.mkstemp(dir=beside)
    try:
        with os.fdopen(handle, "wb") as file:
            for block in blocks:
                found.update(block)
                file.write(block)
        if found.hexdigest() != digest:
            raise VerificationFailed(f"what arrived for {path} is not what its name says", hint=_AGAIN)
        try:
            os.replace(part, path)
        except IsADirectoryError:
            said = f"{path} is a folder, where a file of the job's code belongs"
            raise Refused(said, hint="see what it is, and remove it") from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def sweep(runs: str) -> None:
    """Removes what killed commands left half."""
    with contextlib.suppress(OSError), os.scandir(_parts(runs)) as parts:
        for part in parts:
            with contextlib.suppress(OSError):
                if time.time() - part.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    os.unlink(part.path)


def _parts(runs: str) -> str:
    """One folder for what is being written, so that what was left is found without looking through all contents."""
    return str(content(runs, "0" * 64).parents[1] / "parts")
