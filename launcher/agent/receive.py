"""The verb ``receive``: takes the contents of a job's tree that are not here yet, and then its listing.

Each content is published as soon as it is whole, so that a send that was cut is gone on with. The listing comes
last: once it is there, so is all that it names.
"""

from __future__ import annotations

import errno
import gzip
import os
import zlib
from pathlib import PurePosixPath
from typing import IO, Any, Dict, Iterator, List

from ..contract import bundle
from ..contract.errors import NoSpace, UsageError, VerificationFailed
from ..contract.folder import content
from ..contract.plain import loads

_LONGEST_HEAD = 1 << 26


def receive(source: IO[bytes]) -> Dict[str, Any]:
    """A line of JSON ``{runs, name, bytes, contents: [digest]}``, then gzip of the listing's ``bytes`` bytes and of
    the contents in that order → ``{lacking: [digest]}``: what has to be sent besides; the listing stands when nothing.

    Raises VerificationFailed for bytes that are not what they are called, NoSpace, UsageError.
    """
    head = loads(source.readline(_LONGEST_HEAD))
    runs, name = str(head["runs"]), str(head["name"])
    if not os.path.isabs(runs) or PurePosixPath(name).name != name:
        raise UsageError(f"receive: {name!r} below {runs!r} is no listing's place")
    bundle.sweep(runs)
    try:
        with gzip.GzipFile(fileobj=source, mode="rb") as stream:
            data = b"".join(_exactly(stream, int(head["bytes"])))
            sizes = bundle.decode(data, name).sizes
            for digest in head["contents"]:
                if digest not in sizes:
                    raise UsageError(f"receive: {digest!r} is no content of {name}")
                bundle.keep_content(runs, digest, _exactly(stream, sizes[digest]))
            if stream.read(1):
                raise VerificationFailed("more arrived of the job's code than was told")
    except (EOFError, gzip.BadGzipFile, zlib.error) as problem:
        raise VerificationFailed(f"the job's code did not arrive whole: {problem}") from problem
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no room for the job's code below {runs}") from problem
        raise
    lacking = _lacking(runs, sizes)
    if not lacking:
        bundle.publish(runs, os.path.join(runs, ".blobs", name), name[: -len(bundle.SUFFIX)], [data])
    return {"lacking": lacking}


def _exactly(stream: gzip.GzipFile, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0:
        block = stream.read(min(num_bytes, bundle.BLOCK))
        if not block:
            raise EOFError("it ended too early")
        num_bytes -= len(block)
        yield block


def _lacking(runs: str, sizes: Dict[str, int]) -> List[str]:
    """Contents that were here at the first look and went meanwhile. They were read then; here they are counted."""
    return [digest for digest, size in sizes.items() if _size(str(content(runs, digest))) != size]


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return -1
