"""What every transport can do. Two are real: this machine (local.py) and SSH (fabric.py).

Bytes in, bytes out; argument lists, never shell text. Nothing here decodes, prints or prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

Progress = Callable[[int], None]
"""Called with the number of bytes that arrived since the last call."""


class Result(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


class Stream(Protocol):
    """A running command whose stdout is read as it comes. A context manager; leaving it ends the command."""

    def __iter__(self) -> Iterator[bytes]:
        """Chunks as they arrive; ends at end of file. Raises Unreachable when the connection broke."""

    def close(self) -> None: ...

    def __enter__(self) -> Stream: ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Transport(Protocol):
    """One machine that commands run on. Methods may be called from several threads at once.

    Errors (contract.errors): ``Unreachable`` (no connection, login refused, time-out, connection lost),
    ``Refused`` (host key unknown or changed; ``hint`` is the command that would accept it).
    """

    name: str
    """How messages name the machine: ``login.uni.edu``, ``node03``, ``this machine``."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        """Runs ``argv`` to its end; values arrive byte-equal whatever the login shell is or prints."""

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Stream: ...

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        """Writes ``data`` to ``path`` (absolute) by temporary name and rename, making parent folders."""

    def fetch(self, files: Sequence[str], source: str, target: Path, *, progress: Progress | None = None) -> None:
        """Copies ``files`` (relative to the remote folder ``source``) to ``target``; rsync, or SFTP without it.
        All of them, whatever lies there already: whoever asks has compared sizes and digests, times prove nothing.
        A final name never holds a part; what was cut goes on where it stopped."""

    def push(self, files: Sequence[str], source: Path, target: str, *, progress: Progress | None = None) -> None:
        """The other way round."""

    def close(self) -> None: ...
