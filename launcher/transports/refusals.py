"""paramiko's exceptions and unknown host keys, in the project's words."""

from __future__ import annotations

import base64
import contextlib
import shlex
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from ..contract.errors import Refused, Unreachable, ZerunError
from .hostkeys import fingerprint, known_keys, lookup_names
from .target import CONNECT_S, SshSettings, SshTarget

if TYPE_CHECKING:
    import paramiko


class Shed(ZerunError):
    """The other side hung up before saying anything: worth another try."""


@contextlib.contextmanager
def in_words(name: str, target: SshTarget, settings: SshSettings, login_command: str) -> Iterator[None]:
    """paramiko's exceptions in the project's words."""
    import paramiko

    try:
        yield
    except paramiko.BadHostKeyException as problem:
        _changed(name, target, settings, problem.key)
    except (paramiko.AuthenticationException, paramiko.PasswordRequiredException) as problem:
        raise _login_refused(name, target, settings, problem, login_command) from problem
    except ZerunError:
        raise
    except TimeoutError as problem:
        raise Unreachable(f"{name}: no answer within {CONNECT_S} s ({settings.hostname})") from problem
    except socket.gaierror as problem:
        raise Unreachable(
            f"{name}: the name {settings.hostname} is not known here: {problem.strerror}",
            hint="give the node an address, or a HostName in the ssh configuration",
        ) from problem
    except (ConnectionResetError, EOFError) as problem:
        raise Shed(f"the connection was closed at once ({type(problem).__name__})") from problem
    except paramiko.ChannelException as problem:
        raise Unreachable(f"{name}: the jump host does not reach {settings.hostname}: {problem.text}") from problem
    except paramiko.SSHException as problem:
        if "banner" in str(problem):
            raise Shed(str(problem)) from problem
        raise Unreachable(f"{name}: {problem}") from problem
    except OSError as problem:
        raise Unreachable(f"{name}: {problem.strerror or problem}") from problem


SECOND_FACTOR = "the key was taken, and the server wants a second factor as well"


def asks_nobody(*given: Any, **more: Any) -> paramiko.Transport:
    """paramiko's connection, which would ask for a second factor on our own terminal."""
    import paramiko

    class Silent(paramiko.Transport):
        def auth_interactive_dumb(self, username: str, handler: object = None, submethods: str = "") -> list[str]:
            raise paramiko.AuthenticationException(SECOND_FACTOR)

    return Silent(*given, **more)


def _login_refused(
    name: str, target: SshTarget, settings: SshSettings, problem: Exception, login_command: str
) -> Unreachable:
    import paramiko

    if isinstance(problem, paramiko.PasswordRequiredException):
        hint = "the key has a passphrase: ssh-add it first"
    elif str(problem).startswith(SECOND_FACTOR):
        hint = f"write via: openssh in the cluster's description, then log in once by hand: {login_command}"
    else:
        hint = f"try it by hand: {target.try_command()} (if that asks a password: via: openssh, and {login_command})"
    return Unreachable(f"{name}: login as {settings.user} at {settings.hostname} was refused: {problem}", hint=hint)


def _changed(name: str, target: SshTarget, settings: SshSettings, key: paramiko.PKey) -> NoReturn:
    known = known_keys(settings.known_hosts, lookup_names(settings.key_name, settings.hostname))
    file = known.file or settings.known_hosts[0]
    remove = shlex.join(["ssh-keygen", "-f", str(file), "-R", settings.key_name])
    raise Refused(
        f"{name}: its host key has CHANGED (now {key.get_name()} {fingerprint(key.asbytes())}); {file} has another: "
        "somebody may be in between, or the machine was set up anew",
        hint=f"if you know why: {remove} && {target.accept_command()}",
    )


class RefuseUnknown:
    """paramiko's policy for keys that no known_hosts file has."""

    def __init__(self, name: str, target: SshTarget, settings: SshSettings, revoked: frozenset[str]) -> None:
        self._name = name
        self._target = target
        self._settings = settings
        self._revoked = revoked

    def missing_host_key(self, client: object, hostname: str, key: paramiko.PKey) -> None:
        text = base64.b64encode(key.asbytes()).decode("ascii")
        if text in self._revoked:
            raise Refused(f"{self._name}: its host key is marked @revoked", hint="talk to whoever runs the machine")
        raise Refused(
            f"{self._name}: its host key is unknown ({key.get_name()} {fingerprint(key.asbytes())})",
            hint=f"compare the fingerprint, then accept it: {self._target.accept_command()}",
        )
