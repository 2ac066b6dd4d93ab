"""One login for many commands: OpenSSH's ControlMaster, with a socket of our own.

The master is an ``ssh`` process in the background that ssh itself puts there after the login. Verbs open one
without ever asking anything (``BatchMode``, no terminal); ``zerun login`` lets ssh ask its user. Whoever comes
later goes through the socket, with no configuration and no login: without a live master that fails at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import random
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ..contract.errors import Refused, Unreachable, ZerunError
from .quoting import for_proxy_command
from .target import CONNECT_S, SshSettings, SshTarget, resolve

_DOWN_S = 5.0  # who just did not answer is not asked again at once: one command asks a machine several things
_DENIED_S = 600.0  # logins that are refused again and again (by wait, by logs --follow) get their sender locked out
IDLE_S = 60  # a master that nobody logged into by hand goes when nothing has used it for so long
_LONGEST = 104 - 1 - 17  # a socket's path with its end, and what ssh appends while it makes one
_TRIES = 5
_LOGIN_S = CONNECT_S + 30.0
_SHED = ("kex_exchange_identification", "Connection reset by", "Connection closed by", "ssh_exchange_identification")
_PLAIN = ("-o", "ClearAllForwardings=yes", "-o", "ForwardAgent=no", "-o", "ForwardX11=no", "-o", "RemoteCommand=none",
          "-o", "PermitLocalCommand=no", "-o", "RequestTTY=no")  # fmt: skip


class _Denied(Unreachable):
    """The key alone was not enough: nothing will change by trying."""


class Master:
    """The login to one machine. ``login_command`` is what a person types when it needs one by hand."""

    def __init__(
        self,
        name: str,
        target: SshTarget,
        *,
        settings: SshSettings | None = None,
        gateway: Master | None = None,
        login_command: str = "zerun login",
    ) -> None:
        self.name = name
        self._target, self._settings = (target, settings) if settings is not None else resolve(target)
        self._gateway = gateway
        self._login_command = login_command
        self._failed: tuple[float, ZerunError] | None = None  # until when the answer is known
        self.user, self.hostname = self._settings.user, self._settings.hostname

    @property
    def socket(self) -> Path:
        said = self._settings
        told = [self._target.host, said.hostname, said.user, str(said.port), said.jump or "", said.proxy_command or ""]
        told.append(str(Path(self._target.config).expanduser().resolve()) if self._target.config else "")
        return socket_folder() / hashlib.sha256("\0".join(told).encode()).hexdigest()[:16]

    # --- what later commands are given ------------------------------------------------------------

    @property
    def host(self) -> str:
        return self._target.host

    def batch_options(self) -> list[str]:
        """Words after ``ssh``: through the socket or not at all (``ProxyCommand=false``), whatever is configured."""
        return [
            *("-F", "none", "-S", str(self.socket), "-o", "ControlMaster=no", "-o", "ProxyCommand=false"),
            *("-o", "BatchMode=yes", "-T", "-x", "-a"),
        ]

    def try_command(self) -> str:
        return self._target.try_command()

    # --- life -------------------------------------------------------------------------------------

    def alive(self) -> bool:
        return self._tell("check") == 0

    def close(self) -> bool:
        """Ends the login and every command that goes through it; whether there was one."""
        return self._tell("exit") == 0

    def _tell(self, what: str) -> int:
        if not self.socket.exists():
            return 255
        argv = ["ssh", *self.batch_options(), "-O", what, self._target.host]
        return subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, env=quiet_environment()).returncode

    def ensure(self) -> None:
        """A master that lives: the one that is there, or a new one, logged in without asking.

        Raises Unreachable (a second factor or a passphrase is wanted: ``hint`` is the command) and Refused.
        """
        with self._alone():
            if self.alive():
                return
            if self._failed is not None and time.monotonic() < self._failed[0]:
                known = self._failed[1]
                raise type(known)(known.message, hint=known.hint)
            if self._gateway is not None:
                self._gateway.ensure()
            problem = self._try()
            if problem is not None:
                denied = isinstance(problem, _Denied)
                self._failed = (time.monotonic() + (_DENIED_S if denied else _DOWN_S), problem)
                raise problem

    def _try(self) -> ZerunError | None:
        said = ""
        for attempt in range(_TRIES):
            answer = self._open_quietly()
            if answer is None:
                return None
            if not _is_shed(answer):
                return self._in_words(answer)
            said = answer
            time.sleep((0.3 * 2**attempt) * (0.5 + random.random()))
        return Unreachable(
            f"{self.name}: {_last(said)}",
            hint="its sshd may shed load (MaxStartups), or something else answers on that port",
        )

    def _open_quietly(self) -> str | None:
        """None once it stands, else what ssh said."""
        # A file: the master keeps its stderr, and a pipe would be held open by it.
        with tempfile.TemporaryFile() as said:
            argv = self._argv(self._checked(self._target), IDLE_S)
            try:
                done = subprocess.run(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, timeout=_LOGIN_S,
                    env=quiet_environment(), start_new_session=True, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"Connection timed out: no login within {_LOGIN_S:.0f} s"
            if done.returncode == 0:
                return None
            said.seek(0)
            return said.read()[-8192:].decode("utf-8", "replace").strip() or f"ssh ended with {done.returncode}"

    @staticmethod
    def _checked(target: SshTarget) -> list[str]:
        return replace(target, jump=None).batch_options()

    def _argv(self, options: list[str], idle_s: int) -> list[str]:
        through: list[str] = []
        if self._gateway is not None:
            gate = self._gateway
            through = ["-o", f"ProxyCommand={for_proxy_command(['ssh', *gate.batch_options(), '-W'], gate.host)}"]
        return [
            *("ssh", "-N", "-f", "-S", str(self.socket), "-o", "ControlMaster=auto", "-o", f"ControlPersist={idle_s}"),
            *through, *_PLAIN, *options, self._target.host,
        ]  # fmt: skip

    def open_by_hand(self, idle_s: int) -> bool:
        """Logs in with ssh asking whatever it asks, at this process's own terminal.

        False when a login made by hand, kept as long or longer, stands already. Raises Unreachable when ssh gave
        up (it has said why).
        """
        if self._gateway is not None:
            self._gateway.ensure()  # by hand it was opened before, if it is the kind that asks
        with self._alone():
            if self.alive() and self._kept_s() >= idle_s:
                return False
            self.close()
            options = [
                *replace(self._target, jump=None).options(),
                *("-o", f"ConnectTimeout={CONNECT_S}", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
            ]
            done = subprocess.run(self._argv(options, idle_s), stdout=subprocess.DEVNULL, check=False)
            if done.returncode or not self.alive():
                raise Unreachable(f"{self.name}: no login as {self.user} at {self.hostname}: see above")
            self.socket.with_suffix(".kept").write_text(f"{self._pid()} {idle_s}\n")
            return True

    def _kept_s(self) -> int:
        """How long the login that stands is kept when nothing uses it; one that no hand made counts as 0."""
        try:
            pid, idle_s = self.socket.with_suffix(".kept").read_text().split()
        except (OSError, ValueError):
            return 0
        return int(idle_s) if pid == self._pid() else 0

    def _pid(self) -> str:
        argv = ["ssh", *self.batch_options(), "-O", "check", self._target.host]
        said = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=quiet_environment())
        return said.stderr.partition("pid=")[2].partition(")")[0]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two commands that find no master at the same moment must not both make one."""
        with open(self.socket.with_suffix(".lock"), "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _in_words(self, said: str) -> ZerunError:
        where = f"{self.user} at {self.hostname}"
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
            return Refused(
                f"{self.name}: its host key has CHANGED: somebody may be in between, or the machine was set up anew",
                hint=f"see what it is: {self._target.accept_command()}",
            )
        if "Host key verification failed" in said or "host key is known for" in said:
            return Refused(
                f"{self.name}: its host key is unknown",
                hint=f"compare the fingerprint, then accept it: {self._target.accept_command()}",
            )
        if "Permission denied" in said or "Too many authentication failures" in said:
            return _Denied(
                f"{self.name}: the key alone does not log {where} in, and nobody is asked here ({self._login_command} "
                f"does): {_last(said)}",
                hint=f"log in once, by hand: {self._login_command}",
            )
        if "Could not resolve hostname" in said:
            return Unreachable(
                f"{self.name}: the name {self.hostname} is not known here",
                hint="give the node an address, or a HostName in the ssh configuration",
            )
        if "Not allowed at this time" in said:
            return Unreachable(f"{self.name}: it refuses logins from here for a while (PerSourcePenalties)")
        return Unreachable(f"{self.name}: {_last(said)}", hint=f"try it by hand: {self._target.try_command()}")


def _is_shed(said: str) -> bool:
    """Hung up before anything was asked: with MaxStartups it does so to some of many."""
    return any(words in said for words in _SHED) and "Permission denied" not in said


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith(("Warning:", "@"))]
    return lines[-1] if lines else "ssh said nothing"


def quiet_environment() -> Mapping[str, str]:
    """For an ssh that must not ask: no window pops up either."""
    kept = {k: v for k, v in os.environ.items() if k not in ("SSH_ASKPASS", "DISPLAY", "WAYLAND_DISPLAY")}
    return {**kept, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}


def socket_folder() -> Path:
    """Where the sockets lie: this user's alone, and short enough for a socket's name.

    Raises Refused when somebody else could put a socket there.
    """
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(runtime) / "zerun"] if runtime and Path(runtime).is_dir() else []
    found += [Path(home) / "zerun" / "ssh", Path(tempfile.gettempdir()) / f"zerun-{os.getuid()}"]
    folder = next((f for f in found if len(os.fsencode(f)) + 1 + 16 <= _LONGEST), Path(f"/tmp/zerun-{os.getuid()}"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        raise Refused(f"{folder}: it is not yours, and logins are kept in it", hint="remove it, or set XDG_RUNTIME_DIR")
    if stat.S_IMODE(about.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
