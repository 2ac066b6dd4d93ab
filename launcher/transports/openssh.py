"""A machine over the system's ssh: one master a machine (master.py), each command a session of it.

What fabric.py does with channels is done here with processes: ``ssh -S SOCKET HOST COMMAND``. Nothing prompts.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from ..contract.errors import Unreachable, ZerunError
from . import rsync, sftp
from .files import SshFiles
from .master import Master, quiet_environment
from .protocol import Progress, Result
from .quoting import Strip, Wire, for_sshd
from .target import CONNECT_S

if TYPE_CHECKING:
    import paramiko

_SESSIONS = 8  # at once through one master, of one process: sshd's MaxSessions is 10 unless changed
_PATIENCE_S = 60.0  # for a session that sshd refuses because others have them all
_CHUNK = 65536
_KEPT = 2**20 + 256  # and the line with the status


class _NoMaster(Exception):
    """The socket is gone, or nobody listens there."""


class _Full(Exception):
    """sshd gives no further session to this login."""


class OpenSshTransport(SshFiles):
    """Opens its master on first use, and again when it died."""

    def __init__(self, name: str, master: Master) -> None:
        super().__init__(name)
        self.master = master
        self._sessions = threading.BoundedSemaphore(_SESSIONS)

    # --- commands ---------------------------------------------------------------------------------

    def _start(self, argv: Sequence[str], stdin: bytes, end: float | None) -> Session:
        """A session whose command runs. It is asked for again only while it is certain that nothing ran."""
        patience, pause, made = time.monotonic() + _PATIENCE_S, 0.1, 0
        while True:
            session = Session(self.name, argv[0], self.master, for_sshd(argv, ending=True), stdin)
            try:
                session.await_marker(end)
                return session
            except _NoMaster as problem:
                session.kill()
                if made == 2:
                    raise Unreachable(f"{self.name}: the login was lost again: {problem}") from None
                made += 1
                self.master.ensure()
            except _Full:
                session.kill()
                if time.monotonic() > min(patience, end or patience):
                    raise Unreachable(
                        f"{self.name}: its sshd gives this login no further session (MaxSessions)",
                        hint="other commands of yours, such as logs --follow, hold them: end one",
                    ) from None
                time.sleep(pause)
                pause = min(1.5 * pause, 1.0)
            except BaseException:
                session.kill()
                raise

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._sessions:
            try:
                session = self._start(argv, stdin, end)
                try:
                    stdout = b"".join(session.chunks(end))
                    status = session.finish(end)
                finally:
                    session.kill()
            except TimeoutError as problem:
                raise Unreachable(
                    f"{self.name}: {argv[0]} did not end within {timeout_s or 0:g} s",
                    hint="the machine or its filesystem may hang",
                ) from problem
        return Result(status, stdout, session.stderr())

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> OpenSshStream:
        self._sessions.acquire()
        try:
            session = self._start(argv, stdin, time.monotonic() + _PATIENCE_S)
        except TimeoutError as problem:
            self._sessions.release()
            raise Unreachable(f"{self.name}: {argv[0]} did not begin within {_PATIENCE_S:.0f} s") from problem
        except BaseException:
            self._sessions.release()
            raise
        return OpenSshStream(self, argv[0], session)

    # --- files ------------------------------------------------------------------------------------

    def _reach(self) -> None:
        self.run(["true"])  # sees to it that there is a master, which rsync's ssh would not

    def _carry(self, copy: rsync.Copy, progress: Progress | None) -> None:
        with self._sessions:
            if self._rsync_works and self._by_rsync(copy, progress):
                return
            with sftp.session(self.name, self._start_sftp) as client:
                sftp.run(self.name, client, copy, progress)

    def _by_rsync(self, copy: rsync.Copy, progress: Progress | None) -> bool:
        end, pause = time.monotonic() + _PATIENCE_S, 0.2
        while True:
            try:
                rsync.run(self.name, self.master, copy, progress)
                return True
            except rsync.NoRsync as problem:
                if not is_full(str(problem)):
                    self._rsync_works = False
                    return False
                problem_or = Unreachable(f"{self.name}: its sshd gives this login no further session (MaxSessions)")
            except Unreachable as problem:
                if not is_full(problem.message):
                    raise
                problem_or = problem
            if time.monotonic() > end:
                raise problem_or
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    def _start_sftp(self) -> tuple[paramiko.Channel, Strip]:
        session = self._start(["/bin/sh", "-c", sftp.SERVER], None, time.monotonic() + _PATIENCE_S)  # type: ignore[arg-type]
        return cast("paramiko.Channel", session), session.strip

    def close(self) -> None:
        """The master stays: the next command finds it, and it ends by itself."""


class Session:
    """One ssh process and its three streams. ``stdin`` None keeps stdin open: then ``send`` writes to it."""

    def __init__(self, name: str, what: str, master: Master, wire: Wire, stdin: bytes | None) -> None:
        self._name, self._what, self._master = name, what, master
        self.strip = Strip(wire.marker)
        self._err_strip = Strip(wire.marker)
        self._ending = re.compile(re.escape(wire.marker[:-1]) + rb"-(\d+)\r?\n")
        self._err = bytearray()
        self._waiting = b""
        self._timeout_s: float | None = None
        command = wire.command.encode("utf-8", "surrogateescape")
        self._process = subprocess.Popen(
            [b"ssh", *map(os.fsencode, master.batch_options()), os.fsencode(master.host), command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=quiet_environment(), start_new_session=True, bufsize=0,
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._in, self._out = self._process.stdin, self._process.stdout
        self._reader = threading.Thread(target=self._keep_stderr, daemon=True, name="stderr")
        self._reader.start()
        self._feeder = None
        if stdin is not None:
            self._feeder = threading.Thread(target=self._feed, args=(stdin,), daemon=True, name="stdin")
            self._feeder.start()

    def _feed(self, stdin: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # a command that does not read on is no fault
            view = memoryview(stdin)
            while view:
                view = view[os.write(self._in.fileno(), view[:_CHUNK]) :]
        with contextlib.suppress(OSError):
            self._in.close()

    def _keep_stderr(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            while chunk := os.read(self._process.stderr.fileno(), _CHUNK):
                self._err += self._err_strip.feed(chunk)
                del self._err[: max(0, len(self._err) - _KEPT)]

    # --- reading ----------------------------------------------------------------------------------

    def await_marker(self, end: float | None) -> None:
        """Returns once the command runs. Raises _NoMaster and _Full when it certainly did not, TimeoutError."""
        while not self.strip.seen:
            chunk = self._read(end)
            if not chunk:
                self._did_not_run(end)
            self._waiting += self.strip.feed(chunk)

    def chunks(self, end: float | None) -> Iterator[bytes]:
        if self._waiting:
            yield self._waiting
            self._waiting = b""
        while chunk := self._read(end):
            yield chunk

    def _read(self, end: float | None) -> bytes:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([self._out], [], [], left)[0]:
            raise TimeoutError
        return os.read(self._out.fileno(), _CHUNK)

    def finish(self, end: float | None) -> int:
        """The command's own exit status. Raises Unreachable when the connection took it along."""
        left = CONNECT_S if end is None else max(0.5, end - time.monotonic())
        self._reader.join(left)
        try:
            self._process.wait(left)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        found = list(self._ending.finditer(self._err))
        if not found:
            raise Unreachable(f"{self._name}: the connection was lost: {self._said()}")
        return int(found[-1][1])

    def stderr(self) -> bytes:
        return self._ending.sub(b"", bytes(self._err))

    def _said(self) -> str:
        raw = bytes(self._err) if self._err_strip.seen else self._err_strip.noise
        lines = [x.strip() for x in raw.decode("utf-8", "replace").splitlines() if x.strip()]
        return lines[-1] if lines else "ssh said nothing"

    def _did_not_run(self, end: float | None) -> None:
        self._reader.join(2.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        said = (self._err_strip.noise + bytes(self._err)).decode("utf-8", "replace")
        if is_full(said):
            raise _Full(said)
        if self._process.returncode == 255 or "ontrol socket" in said:
            raise _NoMaster(said.strip() or "no master")
        told = (self.strip.noise.decode("utf-8", "replace") + " " + said).strip()
        raise Unreachable(
            f"{self._name}: the login shell ran nothing (exit {self._process.returncode}): {told[-300:]}",
            hint=f"see what it says: {self._master.try_command()}",
        )

    # --- as paramiko's SFTP client sees a channel -------------------------------------------------

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def get_name(self) -> str:
        return self._name

    def recv(self, num_bytes: int) -> bytes:
        if self._waiting:
            now, self._waiting = self._waiting[:num_bytes], self._waiting[num_bytes:]
            return now
        end = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        left = None if end is None else self._timeout_s
        if not select.select([self._out], [], [], left)[0]:
            raise TimeoutError
        return os.read(self._out.fileno(), num_bytes)

    def send(self, data: bytes) -> int:
        return os.write(self._in.fileno(), data)

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends this session (not the master), wherever it stands."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(0.2)  # the master may hold the other end as long as the command over there lives
        if self._feeder is not None:
            self._feeder.join(0.2)
        for stream in (self._in, self._out, self._process.stderr):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def is_full(said: str) -> bool:
    return "Session open refused" in said or "session request failed" in said or "open failed" in said


class OpenSshStream:
    """stdout of a running command. Ends with Unreachable when the command fails or the connection breaks."""

    def __init__(self, owner: OpenSshTransport, what: str, session: Session) -> None:
        self._owner = owner
        self._what = what
        self._session = session
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._session.chunks(None)
            if self._closed.is_set():
                return
            status = self._session.finish(time.monotonic() + CONNECT_S)
        except (OSError, ValueError, ZerunError):
            if self._closed.is_set():
                return
            raise
        if status:
            said = self._session.stderr().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise Unreachable(f"{self._owner.name}: {self._what} ended with status {status}: {said}")

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._session.kill()
            self._owner._sessions.release()

    def __enter__(self) -> OpenSshStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
