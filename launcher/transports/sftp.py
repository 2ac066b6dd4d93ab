"""Copies by SFTP, where rsync is missing or the login shell prints.

The server is started as a command behind the marker (quoting.py) rather than as sshd's subsystem, since sshd
runs most subsystems through the login shell too, whose start-up files then print into the protocol.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..contract.errors import NoSpace, Unreachable, ZerunError
from ..contract.unwritable import of_oserror
from .protocol import Progress
from .quoting import Strip
from .rsync import Copy

if TYPE_CHECKING:
    import paramiko

SERVER = (
    "for f in /usr/lib/openssh/sftp-server /usr/libexec/openssh/sftp-server /usr/libexec/sftp-server"
    " /usr/lib/ssh/sftp-server /usr/lib/sftp-server; do [ -x $f ] && exec $f; done;"
    " echo no sftp-server >&2; exit 127"
)
_BLOCK = 2**18


class _Clean:
    """A channel whose noise before the marker was dropped: what paramiko's SFTPClient reads."""

    def __init__(self, channel: paramiko.Channel, strip: Strip) -> None:
        self._channel = channel
        self._waiting = b""
        while not strip.seen:
            chunk = channel.recv(65536)
            if not chunk:
                raise EOFError("the sftp server did not start")
            self._waiting += strip.feed(chunk)

    def recv(self, num_bytes: int) -> bytes:
        if self._waiting:
            now, self._waiting = self._waiting[:num_bytes], self._waiting[num_bytes:]
            return now
        chunk: bytes = self._channel.recv(num_bytes)
        return chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


@contextlib.contextmanager
def session(name: str, start: Callable[[], tuple[paramiko.Channel, Strip]]) -> Iterator[paramiko.SFTPClient]:
    """An SFTP client over a started server; whatever breaks in it is told as one of the project's errors."""
    import paramiko

    channel, strip = start()
    try:
        channel.settimeout(60)
        client = paramiko.SFTPClient(cast(paramiko.Channel, _Clean(channel, strip)))
        yield client
    except ZerunError:
        raise
    except (paramiko.SSHException, EOFError, TimeoutError) as problem:
        raise Unreachable(
            f"{name}: SFTP: {problem or type(problem).__name__}", hint="run it again: it goes on"
        ) from problem
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT) or "Failure" in str(problem):
            raise NoSpace(f"{name}: the copy could not be written: {problem}") from problem
        raise of_oserror(problem, name) from problem
    finally:
        channel.close()


def run(name: str, client: paramiko.SFTPClient, copy: Copy, progress: Progress | None) -> None:
    """Copies file by file; a part lies beside under a name that holds the original's size and time."""
    made: set[str] = set()
    for file in copy.files:
        try:
            if copy.into == "here":
                _fetch(client, f"{copy.there}/{file}", copy.here / file, progress)
            else:
                _push(client, copy.here / file, f"{copy.there}/{file}", made, progress)
        except (FileNotFoundError, PermissionError) as problem:  # paramiko's do not say which file
            raise of_oserror(OSError(problem.errno, problem.strerror, f"{copy.there}/{file}"), name) from problem


def _fetch(client: paramiko.SFTPClient, source: str, target: Path, progress: Progress | None) -> None:
    about = client.stat(source)
    size, mtime = int(about.st_size or 0), int(about.st_mtime or 0)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{size}-{mtime}.part")
    with client.open(source, "rb") as remote, part.open("ab") as local:
        at = local.tell()
        if at > size:
            local.truncate(0)
            at = 0
        remote.seek(at)
        remote.prefetch(size)
        while block := remote.read(_BLOCK):
            local.write(block)
            if progress is not None:
                progress(len(block))
    if part.stat().st_size != size:
        part.unlink()
        raise Unreachable(f"{source} changed while it was copied", hint="run it again")
    os.utime(part, (mtime, mtime))
    part.chmod(stat.S_IMODE(about.st_mode or 0o600) | stat.S_IRUSR)
    part.replace(target)


def _push(client: paramiko.SFTPClient, source: Path, target: str, made: set[str], progress: Progress | None) -> None:
    about = source.stat()
    size, mtime = about.st_size, int(about.st_mtime)
    folder, _, base = target.rpartition("/")
    _make_folders(client, folder, made)
    part = f"{folder}/.{base}.{size}-{mtime}.part"
    with source.open("rb") as local, client.open(part, "ab") as remote:
        at = int(client.stat(part).st_size or 0)
        if at > size:
            remote.truncate(0)
            at = 0
        local.seek(at)
        remote.set_pipelined(True)
        while block := local.read(_BLOCK):
            remote.write(block)
            if progress is not None:
                progress(len(block))
    if client.stat(part).st_size != size:
        # Writes are not waited for one by one, so a full disk shows here first.
        client.remove(part)
        if source.stat().st_size == size:
            raise NoSpace(f"{target}: not all of {size} bytes could be written there")
        raise Unreachable(f"{source} changed while it was copied", hint="run it again")
    client.utime(part, (mtime, mtime))
    client.chmod(part, stat.S_IMODE(about.st_mode))
    client.posix_rename(part, target)


def _make_folders(client: paramiko.SFTPClient, folder: str, made: set[str]) -> None:
    if not folder or folder in made:
        return
    try:
        client.stat(folder)
    except FileNotFoundError:
        _make_folders(client, folder.rpartition("/")[0], made)
        with contextlib.suppress(OSError):  # another copy made it in the meantime
            client.mkdir(folder, 0o755)
    made.add(folder)
