"""Keeps what a rank writes: its bytes unchanged, and beside them when they arrived.

``rank-00003.times`` holds lines ``offset time``: the bytes from that offset of the log on arrived at
that time (seconds since the epoch, this node's clock) or later, at most one line every 20 ms, so the
time of a byte is known that closely. The line is written before the bytes: who sees bytes, sees their time.

A rank never waits for a disk: what the log cannot take is counted and dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from .loop import READ, Loop

_SPACING_S = 0.02
_CHUNK_BYTES = 256 * 1024
_PIPE_BYTES = 1024 * 1024
_F_SETPIPE_SZ = 1031
_DRAIN_BYTES = 64 * 1024 * 1024


class Capture:
    """One rank's output. ``write_end`` goes to the child and is closed here with :meth:`started`."""

    def __init__(self, loop: Loop, log: Path, arrivals: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._loop = loop
        self._log = os.open(str(log), flags, 0o644)
        self._arrivals = os.open(str(arrivals), flags, 0o644)
        self._offset = os.fstat(self._log).st_size
        self._said_at = 0.0
        self._open = True
        self.lost_bytes = 0
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        # Room for a burst while the agent is busy elsewhere; a smaller pipe works too.
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._read_end, _F_SETPIPE_SZ, _PIPE_BYTES)
        loop.watch(self._read_end, READ, self._ready)

    def started(self) -> None:
        """The child has its copy of the write end: close ours, so that the pipe ends with the child."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Takes what is in the pipe and lets go, even if some process still holds its other end."""
        self.started()
        if not self._open:
            return
        taken = 0
        while self._open and taken < _DRAIN_BYTES:
            got = self._take()
            if got == 0:
                break
            taken += got
        self._let_go()

    def _ready(self, _events: int) -> None:
        self._take()

    def _take(self) -> int:
        """Reads once. 0: nothing there now, or the end."""
        try:
            data = os.read(self._read_end, _CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._let_go()
            return 0
        self._keep(data)
        return len(data)

    def _keep(self, data: bytes) -> None:
        now = time.time()
        if not 0 <= now - self._said_at < _SPACING_S and self._note_arrival(now):
            self._said_at = now
        rest = memoryview(data)
        try:
            while rest:
                written = os.write(self._log, rest)
                self._offset += written
                rest = rest[written:]
        except OSError:
            self.lost_bytes += len(rest)

    def _note_arrival(self, now: float) -> bool:
        line = b"%d %.6f\n" % (self._offset, now)
        try:
            written = os.write(self._arrivals, line)
            if written != len(line):  # the disk filled up in the middle of it
                os.ftruncate(self._arrivals, os.fstat(self._arrivals).st_size - written)
            return written == len(line)
        except OSError:
            return False

    def _let_go(self) -> None:
        if self._open:
            self._open = False
            self._loop.forget(self._read_end)
            for handle in (self._read_end, self._log, self._arrivals):
                os.close(handle)
