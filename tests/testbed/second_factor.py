"""A login that wants a key *and* a password: a second sshd on the login host, and a terminal that types."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .cluster import Testbed, wait_until

PORT = 2222
PASSWORD = "correct horse 7"


@dataclass(frozen=True)
class SecondFactor:
    """``config``: an OpenSSH client configuration whose ``login`` is that sshd. ``log`` is what it wrote."""

    config: Path
    log: Path


@contextmanager
def second_factor(
    testbed: Testbed,
    folder: Path,
    *,
    methods: str = "publickey,password",
    sessions: int = 10,
    startups: str = "10:30:100",
) -> Iterator[SecondFactor]:
    """Stands beside the login host's own sshd for the length of a with-block."""
    shadow = testbed.state / "etc" / "shadow"
    before = shadow.read_text()
    shadow.write_text(_with_password(before, testbed.user))  # in place: it is mounted inside the hosts
    pid, log, conf = (testbed.state / f"second.{kind}" for kind in ("pid", "log", "conf"))
    said = (testbed.state / "sshd_config.login").read_text().replace("PidFile none", f"PidFile {pid}")
    said = said.replace("PasswordAuthentication no", "PasswordAuthentication yes")
    conf.write_text(
        f"{said}Port {PORT}\nAuthenticationMethods {methods}\nMaxSessions {sessions}\nMaxStartups {startups}\n"
    )
    log.write_text("")
    testbed.exec("login", ["/usr/sbin/sshd", "-f", str(conf), "-E", str(log)], user=None)
    wait_until(pid.exists, 60.0, "the second sshd does not stand", every_s=0.05)
    config, known = folder / "second-factor-config", folder / "second-factor-known"
    address, key = testbed.address("login"), (testbed.state / "hostkey.login.pub").read_text().split()
    known.write_text(f"[{address}]:{PORT} {key[0]} {key[1]}\n")
    config.write_text(
        f"Host login\n  HostName {address}\n  Port {PORT}\n  User {testbed.user}\n"
        f"  IdentityFile {testbed.state}/userkey\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
    )
    try:
        yield SecondFactor(config, log)
    finally:
        # The listener and those that it made: their parent is the host's init.
        number = pid.read_text().strip()
        testbed.exec("login", ["sh", "-c", f"kill {number} $(ps -o pid= --ppid {number}) || true"], user=None)
        # Else it might still have the port of the next one, and remove the next one's pid file.
        wait_until(lambda: not testbed.processes("login", str(conf)), 60.0, "the second sshd stays")
        pid.unlink(missing_ok=True)
        shadow.write_text(before)


def _with_password(shadow: str, user: str) -> str:
    made = subprocess.run(["openssl", "passwd", "-6", PASSWORD], capture_output=True, text=True, check=True).stdout
    lines = [
        f"{user}:{made.strip()}:19000:0:99999:7:::" if x.startswith(f"{user}:") else x for x in shadow.splitlines()
    ]
    return "\n".join(lines) + "\n"


def at_terminal(
    argv: Sequence[str], typed: Sequence[tuple[str, str]], *, cwd: Path, env: Mapping[str, str], timeout_s: float = 90.0
) -> tuple[int, str]:
    """Runs ``argv`` at a terminal of its own; ``typed``: (what to wait for, what to type then).

    → (its exit status, all that it said there)
    """
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover - becomes the command
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), {**os.environ, **env})
    said, seen, end, waiting = "", 0, time.monotonic() + timeout_s, list(typed)
    try:
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                chunk = os.read(terminal, 4096)
            except OSError:
                break
            if not chunk:
                break
            said += chunk.decode("utf-8", "replace")
            if waiting and waiting[0][0] in said[seen:]:
                seen = len(said)
                os.write(terminal, waiting.pop(0)[1].encode() + b"\n")
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{argv} did not end: {said}")
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said
