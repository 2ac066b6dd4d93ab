"""Who is to be reached by SSH, and what the user's OpenSSH configuration says about it.

The configuration is read by OpenSSH itself (``ssh -G``), so that ``Include``, ``Match`` and tokens mean for
Fabric what they mean for ssh and rsync.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from ..contract.errors import Refused, Unreachable, UsageError

CONNECT_S = 15
ALIVE_S = 15
GONE_S = 20  # bytes that stay unanswered so long mean a connection that is lost


@dataclass(frozen=True)
class SshTarget:
    """One machine as a description names it. ``host`` is looked up in the OpenSSH configuration;
    ``address`` is connected to where the configuration names no other."""

    host: str
    user: str | None = None
    port: int | None = None
    key: str | None = None
    config: str | None = None
    jump: str | None = None  # [user@]host[:port], several with commas, as ssh -J takes them
    address: str | None = None

    def __post_init__(self) -> None:
        for value in (self.host, self.user, self.jump, self.address):
            if value is not None and (
                not value or value.startswith("-") or any(c in value for c in " \t\n'\"`$;|&<>\\")
            ):
                raise Refused(f"{value!r} is not a safe name for ssh")

    def options(self) -> list[str]:
        """What ssh and rsync are given so that they go where Fabric goes."""
        words: list[str] = []
        if self.config is not None:
            words += ["-F", str(Path(self.config).expanduser())]
        if self.user is not None:
            words += ["-l", self.user]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.key is not None:
            words += ["-i", str(Path(self.key).expanduser()), "-o", "IdentitiesOnly=yes"]
        if self.jump is not None:
            words += ["-J", self.jump]
        if self.address is not None:
            words += ["-o", f"HostName={self.address}"]
        return words

    def batch_options(self) -> list[str]:
        """``options`` and whatever keeps ssh from asking or waiting."""
        return [
            *self.options(),
            *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", f"ConnectTimeout={CONNECT_S}"),
            *("-o", f"ServerAliveInterval={ALIVE_S}", "-o", "ServerAliveCountMax=3"),
        ]

    def accept_command(self) -> str:
        """What a person types to see an unknown host key and to accept it."""
        return shlex.join(["ssh", *self.options(), "-o", "StrictHostKeyChecking=ask", self.host, "true"])

    def try_command(self) -> str:
        """What a person types to see what is wrong."""
        return shlex.join(["ssh", *self.options(), self.host, "true"])


@dataclass(frozen=True)
class SshSettings:
    """What OpenSSH made of a target. Files may not exist."""

    hostname: str
    user: str
    port: int
    identity_files: tuple[Path, ...]
    known_hosts: tuple[Path, ...]  # the user's first
    jump: str | None
    proxy_command: str | None
    host_key_alias: str | None
    agent: bool

    @property
    def key_name(self) -> str:
        """The name under which known_hosts keeps the machine's key."""
        if self.host_key_alias:
            return self.host_key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"


def resolve(target: SshTarget) -> tuple[SshTarget, SshSettings]:
    """The settings, and the target with ``address`` dropped where the configuration names a HostName itself.

    Raises UsageError for a configuration that OpenSSH does not accept, Unreachable without an ssh client.
    """
    if target.address is not None:
        plain = _ask(replace(target, address=None))
        if plain["hostname"][0] != target.host:
            target = replace(target, address=None)
    said = _ask(target)

    def one(key: str) -> str | None:
        value = said.get(key, ["none"])[0]
        return None if value.lower() == "none" else value

    return target, SshSettings(
        hostname=said["hostname"][0],
        user=said["user"][0],
        port=int(said["port"][0]),
        identity_files=tuple(Path(f).expanduser() for f in said.get("identityfile", []) if f.lower() != "none"),
        known_hosts=_files(said, "userknownhostsfile") + _files(said, "globalknownhostsfile"),
        jump=one("proxyjump"),
        proxy_command=one("proxycommand"),
        host_key_alias=one("hostkeyalias"),
        agent=said.get("identityagent", [""])[0].lower() != "none",
    )


def _ask(target: SshTarget) -> dict[str, list[str]]:
    program = shutil.which("ssh")
    if program is None:
        raise Unreachable("this machine has no ssh client", hint="install openssh-client")
    done = subprocess.run(
        [program, "-G", *target.options(), target.host], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise UsageError(f"ssh does not accept its configuration: {done.stderr.strip()}", hint="mend that file")
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key.lower(), []).append(value)
    return said


def _files(said: dict[str, list[str]], key: str) -> tuple[Path, ...]:
    names = said.get(key, [""])[0].split()
    return tuple(Path(n).expanduser() for n in names if n.lower() != "none")


def hops(target: SshTarget, jump: str) -> list[SshTarget]:
    """The machines that ``jump`` names, in the order in which they are passed."""
    found = []
    for spec in jump.split(","):
        spec = spec.strip().removeprefix("ssh://")
        user, _, place = spec.rpartition("@")
        host, colon, port = place.rpartition(":")
        if not colon or (":" in host and not host.startswith("[")):  # a bare IPv6 address has colons of its own
            host, port = place, ""
        if port and not port.isdigit():
            raise UsageError(f"jump host {spec!r}: a port is a number")
        found.append(
            SshTarget(
                host.strip("[]"),
                user=user or None,
                port=int(port) if port else None,
                key=target.key,
                config=target.config,
            )
        )
    return found
