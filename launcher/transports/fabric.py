"""A machine over SSH: Fabric connects, paramiko's channels carry the bytes.

One connection a machine; commands are channels of it. Unknown or changed host keys are refused, nothing ever
prompts, and a connection that died is made again for the next command.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.errors import Unreachable
from . import rsync, sftp
from .files import SshFiles
from .hostkeys import known_keys, lookup_names
from .protocol import Progress, Result
from .quoting import Strip, Wire, for_sshd
from .refusals import RefuseUnknown, Shed, asks_nobody, in_words
from .target import ALIVE_S, CONNECT_S, GONE_S, SshSettings, SshTarget, resolve

if TYPE_CHECKING:
    import fabric
    import paramiko

_SESSIONS = 8  # at once on one connection: sshd's MaxSessions is 10 unless changed
_TRIES = 6  # a default sshd drops logins when ten others are under way (MaxStartups)
_DOWN_S = 5.0  # who just did not answer is not asked again at once: one command asks a machine several things
_CHUNK = 65536


class FabricTransport(SshFiles):
    """Connects on first use. ``gateway`` is the jump host's own transport, shared by all behind it."""

    def __init__(
        self,
        name: str,
        target: SshTarget,
        *,
        settings: SshSettings | None = None,
        gateway: FabricTransport | None = None,
        login_command: str = "zerun login",
    ) -> None:
        super().__init__(name)
        self._login_command = login_command
        self._target = target
        self._settings = settings
        self._gateway = gateway
        self._lock = threading.Lock()
        self._sessions = threading.BoundedSemaphore(_SESSIONS)
        self._connection: fabric.Connection | None = None
        self._down: tuple[float, Unreachable] | None = None

    # --- connecting -------------------------------------------------------------------------------

    def connection(self) -> fabric.Connection:
        """The open connection. Raises Unreachable or Refused."""
        with self._lock:
            if self._connection is not None and self._connection.is_connected:
                return self._connection
            if self._connection is not None:
                self._drop(self._connection)
                self._connection = None
            if self._down is not None and time.monotonic() - self._down[0] < _DOWN_S:
                raise Unreachable(self._down[1].message, hint=self._down[1].hint)
            if self._settings is None:
                self._target, self._settings = resolve(self._target)
            try:
                self._connection = self._try(self._settings)
            except Unreachable as problem:
                self._down = (time.monotonic(), problem)
                raise
            return self._connection

    def _try(self, settings: SshSettings) -> fabric.Connection:
        for attempt in range(_TRIES):
            try:
                return self._open(settings)
            except Shed as shed:
                told = str(shed)
            time.sleep((0.3 * 2**attempt) * (0.5 + random.random()))
        raise Unreachable(
            f"{self.name}: {told}",
            hint="its sshd may shed load (MaxStartups), or something else answers on that port",
        )

    def _open(self, settings: SshSettings) -> fabric.Connection:
        import fabric
        import paramiko

        logging.getLogger("paramiko").addHandler(logging.NullHandler())  # its threads' tracebacks are told as errors
        gateway: Any = settings.proxy_command
        if self._gateway is not None:
            gateway = self._gateway.connection()
        connection = fabric.Connection(
            settings.hostname,
            user=settings.user,
            port=settings.port,
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            gateway=gateway or False,
            connect_timeout=CONNECT_S,
            connect_kwargs={
                "key_filename": [str(f) for f in settings.identity_files if f.is_file()],
                "allow_agent": settings.agent,
                "look_for_keys": False,
                "banner_timeout": CONNECT_S,
                "auth_timeout": CONNECT_S,
                "channel_timeout": CONNECT_S,
                "transport_factory": asks_nobody,
            },
        )
        self._load_host_keys(connection, settings)
        try:
            with in_words(self.name, self._target, settings, self._login_command):
                connection.open()
        except BaseException:
            connection.client.close()
            raise
        self._keep_alive(connection)
        return connection

    def _load_host_keys(self, connection: fabric.Connection, settings: SshSettings) -> None:
        import paramiko

        known = known_keys(settings.known_hosts, lookup_names(settings.key_name, settings.hostname))
        hold = connection.client.get_host_keys()
        # paramiko looks under this name, whatever alias or pattern the file has.
        name = settings.hostname if settings.port == 22 else f"[{settings.hostname}]:{settings.port}"
        for kind, text in known.keys:
            with contextlib.suppress(paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError):
                entry = paramiko.hostkeys.HostKeyEntry.from_line(f"{name} {kind} {text}")
                if entry is not None and text not in known.revoked:
                    hold.add(name, entry.key.get_name(), entry.key)
        connection.client.set_missing_host_key_policy(RefuseUnknown(self.name, self._target, settings, known.revoked))

    @staticmethod
    def _keep_alive(connection: fabric.Connection) -> None:
        connection.transport.set_keepalive(ALIVE_S)
        raw = connection.transport.sock
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None and isinstance(raw, socket.socket):
            # A peer that vanished is noticed when bytes stay unanswered, not after the kernel's 15 minutes.
            raw.setsockopt(socket.IPPROTO_TCP, option, GONE_S * 1000)

    @staticmethod
    def _drop(connection: fabric.Connection) -> None:
        connection.client.close()

    def _session(self) -> paramiko.Channel:
        """A channel for one command. sshd refuses more than MaxSessions at once, and counts one a moment longer
        than it lasts here: then it is asked again. Only a connection that says nothing at all is given up."""
        import paramiko

        end, pause = time.monotonic() + CONNECT_S, 0.05
        while True:
            connection = self.connection()
            try:
                channel: paramiko.Channel = connection.transport.open_session(timeout=CONNECT_S)
                return channel
            except (paramiko.SSHException, OSError, EOFError) as problem:
                told = str(problem) or type(problem).__name__
            if "Timeout" in told:
                self._drop(connection)
            if time.monotonic() > end:
                raise Unreachable(f"{self.name}: no channel for a command: {told}")
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _start(self, argv: Sequence[str]) -> tuple[paramiko.Channel, Wire]:
        import paramiko

        wire = for_sshd(argv)
        channel = self._session()
        try:
            channel.exec_command(wire.command.encode("utf-8", "surrogateescape"))
        except (paramiko.SSHException, OSError, EOFError) as problem:
            channel.close()
            raise Unreachable(f"{self.name}: {argv[0]} could not be started: {problem}") from problem
        return channel, wire

    # --- commands ---------------------------------------------------------------------------------

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._sessions:
            channel, wire = self._start(argv)
            try:
                out, err = _Reader(channel, wire.marker), _ErrorReader(channel, wire.marker)
                err.start()
                _feed(channel, stdin)
                stdout = b"".join(out.chunks(end))
                err.join(None if end is None else max(0.1, end - time.monotonic()))
                status = _status(channel, end)
            except TimeoutError as problem:
                raise Unreachable(
                    f"{self.name}: {argv[0]} did not end within {timeout_s:g} s",
                    hint="the machine or its filesystem may hang",
                ) from problem
            except OSError as problem:
                raise Unreachable(f"{self.name}: the connection was lost: {problem}") from problem
            finally:
                channel.close()
        self._judge(status, out.strip, err)
        return Result(status, stdout, err.text())

    def _judge(self, status: int, strip: Strip, err: _ErrorReader) -> None:
        if status < 0:
            raise Unreachable(f"{self.name}: the connection was lost")
        if not strip.seen:
            said = (strip.noise + b" " + err.text()).decode("utf-8", "replace").strip()
            raise Unreachable(
                f"{self.name}: the login shell ran nothing (exit {status}): {said[-300:]}",
                hint=f"see what it says: {self._target.try_command()}",
            )

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> FabricStream:
        self._sessions.acquire()
        try:
            channel, wire = self._start(argv)
        except BaseException:
            self._sessions.release()
            raise
        return FabricStream(self, argv[0], channel, wire, stdin)

    # --- files ------------------------------------------------------------------------------------

    def _reach(self) -> None:
        self.connection()

    def _carry(self, copy: rsync.Copy, progress: Progress | None) -> None:
        if self._rsync_works:
            try:
                rsync.run(self.name, self._target, copy, progress)
                return
            except rsync.NoRsync:
                self._rsync_works = False
        with self._sessions, sftp.session(self.name, self._start_sftp) as client:
            sftp.run(self.name, client, copy, progress)

    def _start_sftp(self) -> tuple[paramiko.Channel, Strip]:
        channel, wire = self._start(["/bin/sh", "-c", sftp.SERVER])
        return channel, Strip(wire.marker)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._drop(self._connection)
                self._connection = None


class FabricStream:
    """stdout of a running command. Ends with Unreachable when the command fails or the connection breaks."""

    def __init__(self, owner: FabricTransport, what: str, channel: paramiko.Channel, wire: Wire, stdin: bytes) -> None:
        self._owner = owner
        self._what = what
        self._channel = channel
        self._reader = _Reader(channel, wire.marker)
        self._err = _ErrorReader(channel, wire.marker)
        self._closed = threading.Event()
        self._err.start()
        _feed(channel, stdin)

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._reader.chunks(None)
        except OSError as problem:
            if not self._closed.is_set():
                raise Unreachable(f"{self._owner.name}: the connection was lost: {problem}") from problem
        if self._closed.is_set():
            return
        self._err.join(CONNECT_S)
        status = _status(self._channel, time.monotonic() + CONNECT_S)
        self._owner._judge(status, self._reader.strip, self._err)
        if status:
            said = self._err.text().decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise Unreachable(f"{self._owner.name}: {self._what} ended with status {status}: {said}")

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._channel.close()
            self._owner._sessions.release()

    def __enter__(self) -> FabricStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Reader:
    """The command's own stdout."""

    def __init__(self, channel: paramiko.Channel, marker: bytes) -> None:
        self._channel = channel
        self.strip = Strip(marker)

    def chunks(self, end: float | None) -> Iterator[bytes]:
        while True:
            self._channel.settimeout(None if end is None else max(0.01, end - time.monotonic()))
            chunk = self._channel.recv(_CHUNK)
            if not chunk:
                return
            own = self.strip.feed(chunk)
            if own:
                yield own


class _ErrorReader(threading.Thread):
    """Keeps stderr flowing, and its last megabyte."""

    def __init__(self, channel: paramiko.Channel, marker: bytes) -> None:
        super().__init__(daemon=True, name="stderr")
        self._channel = channel
        self._strip = Strip(marker)
        self._kept = bytearray()

    def run(self) -> None:
        # The channel's time-out is the reader's of stdout; waiting on makes no difference here.
        while not self._channel.closed or self._channel.recv_stderr_ready():
            try:
                chunk = self._channel.recv_stderr(_CHUNK)
            except TimeoutError:
                continue
            except OSError:
                return
            if not chunk:
                return
            self._kept += self._strip.feed(chunk)
            del self._kept[: max(0, len(self._kept) - 2**20)]

    def text(self) -> bytes:
        return bytes(self._kept) if self._strip.seen else self._strip.noise


def _feed(channel: paramiko.Channel, stdin: bytes) -> None:
    """Sends ``stdin`` and its end; large ones from a thread, so that output is read meanwhile."""

    def send() -> None:
        with contextlib.suppress(OSError, EOFError):  # a command that does not read on is no fault
            channel.sendall(stdin)
        with contextlib.suppress(OSError, EOFError):
            channel.shutdown_write()

    if len(stdin) <= 2**15:
        send()
    else:
        threading.Thread(target=send, daemon=True, name="stdin").start()


def _status(channel: paramiko.Channel, end: float | None) -> int:
    """The exit status; -1 when the connection took it along."""
    if not channel.status_event.wait(None if end is None else max(0.1, end - time.monotonic())):
        raise TimeoutError
    return int(channel.exit_status)
