"""What both ways of SSH do alike with files: small ones as a command's stdin, many by rsync, or SFTP without it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from ..contract.errors import Unreachable, ZerunError
from ..contract.unwritable import of_words
from . import rsync
from .protocol import Progress, Result


class SshFiles(ABC):
    """The half of a transport over SSH that is the same whoever connects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rsync_works: bool | None = None  # None: not looked for yet

    @abstractmethod
    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result: ...

    @abstractmethod
    def _reach(self) -> None:
        """Connects, or says in words why not, before rsync's own ssh does."""

    @abstractmethod
    def _carry(self, copy: rsync.Copy, progress: Progress | None) -> None:
        """By rsync while ``_rsync_works``, else by SFTP."""

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        done = self.run(put_argv(path, len(data), mode), stdin=data, timeout_s=60 + len(data) / 100_000)
        if done.returncode:
            raise _put_problem(self.name, path, done)

    def fetch(self, files: Sequence[str], source: str, target: Path, *, progress: Progress | None = None) -> None:
        self._copy(rsync.Copy(tuple(files), source, target, into="here"), progress)

    def push(self, files: Sequence[str], source: Path, target: str, *, progress: Progress | None = None) -> None:
        self._copy(rsync.Copy(tuple(files), target, source, into="there"), progress)

    def _copy(self, copy: rsync.Copy, progress: Progress | None) -> None:
        copy.check()
        if not copy.files:
            return
        if self._rsync_works is None:
            self._rsync_works = rsync.is_here()
        if copy.into == "there":
            made = self.run(["mkdir", "-p", "--", copy.there])
            if made.returncode:
                raise _put_problem(self.name, copy.there, made)
        else:
            self._reach()
        self._carry(copy, progress)


_PUT = (
    'umask 077; set -e; mkdir -p -- "$1"; trap \'rm -f -- "$2"\' EXIT; cat > "$2"; '
    '[ "$(wc -c < "$2")" -eq "$4" ]; chmod "$5" -- "$2"; mv -f -- "$2" "$3"; trap - EXIT'
)


def put_argv(path: str, num_bytes: int, mode: int) -> list[str]:
    """A command that writes stdin to ``path``; a connection that breaks leaves nothing under that name."""
    folder, _, name = path.rpartition("/")
    beside = f"{folder}/.{name}.{random.getrandbits(48):012x}.part"
    return ["/bin/sh", "-c", _PUT, "put", folder or "/", beside, path, str(num_bytes), f"{mode:o}"]


def _put_problem(name: str, path: str, done: Result) -> ZerunError:
    said = done.stderr.decode("utf-8", "replace").strip() or f"exit {done.returncode}"
    return of_words(said, path, name) or Unreachable(f"{name}: {path} could not be written: {said}")
