"""The one place where an argument list becomes the string that sshd wants.

sshd hands its string to the user's login shell, whatever that is. So the string has to mean the same to sh,
bash, zsh, csh, tcsh and fish, and what their start-up files print must not be taken for the command's output:

* the string is ``/bin/sh -c '…'``, and between the quotes stand only characters that no shell reads inside
  single quotes: letters, digits, ``/ . , : = @ % + - _``, blanks and ``; > & $ " ( ) |`` (csh reads ``!`` and
  newlines there, fish a backslash: they never occur);
* arguments with other characters travel as base64, which ``/bin/sh`` decodes and evaluates;
* first of all a line with a random marker goes to stdout and stderr: bytes count from there on.
"""

from __future__ import annotations

import base64
import re
import secrets
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ..contract.errors import UsageError

_SAFE = re.compile(r"[A-Za-z0-9_/.,:+-][A-Za-z0-9_@%+=:,./-]*", re.ASCII)
_LONGEST = 120_000  # Linux takes 128 KiB in one argument


class Wire(NamedTuple):
    """``command`` is what sshd gets; output before ``marker`` is not the command's."""

    command: str
    marker: bytes


def for_sshd(argv: Sequence[str], *, ending: bool = False) -> Wire:
    """The string that makes any login shell run exactly ``argv``; stdin is passed through.

    A command killed by signal n is reported as exit status 128 + n, since a shell stays above it. With
    ``ending`` the last line on stderr is the marker, ``-`` and that status: the system's ssh says 255 both for
    a command that ended so and for a connection that was lost.
    Raises UsageError for NUL bytes and for lists of more than about 90 KB: large values belong on stdin.
    """
    if not argv:
        raise UsageError("an empty command")
    if any("\0" in a for a in argv):
        raise UsageError(f"{argv[0]}: an argument holds a NUL byte, which no command can take")
    name = f"zerun-{secrets.token_hex(12)}"
    if all(_SAFE.fullmatch(a) for a in argv) and not argv[0].startswith(("-", "+")):
        body = " ".join(argv)
    else:
        raw = " ".join(shlex.quote(a) for a in argv).encode("utf-8", "surrogateescape")
        body = f'eval "$(echo {base64.b64encode(raw).decode("ascii")}|base64 -d)"'
    # `exit $?` keeps the shell above the command, so that a signal becomes a status that travels.
    end = f"s=$?;echo {name}-$s>&2;exit $s" if ending else "exit $?"
    command = f"/bin/sh -c 'echo {name};echo {name}>&2;{body};{end}'"
    if len(command) > _LONGEST:
        raise UsageError(f"{argv[0]}: {len(command)} bytes of arguments are too many for one command")
    return Wire(command, name.encode("ascii") + b"\n")


def for_proxy_command(argv: Sequence[str], host: str) -> str:
    """The value of ``ProxyCommand`` that runs ``argv``, then the target as ssh fills it in, then ``host``."""
    fixed = [shlex.quote(a).replace("%", "%%") for a in argv]
    return " ".join([*fixed, "'[%h]:%p'", shlex.quote(host).replace("%", "%%")])


class Strip:
    """Drops everything up to and including the marker from a stream of chunks.

    ``seen`` tells whether the marker has come; ``noise`` is (the last 4 KiB of) what stood before it.
    """

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._head = bytearray()
        self.seen = False

    @property
    def noise(self) -> bytes:
        return bytes(self._head[-4096:])

    def feed(self, chunk: bytes) -> bytes:
        """The command's own bytes in ``chunk``."""
        if self.seen:
            return chunk
        self._head += chunk
        at = self._head.find(self._marker)
        if at < 0:
            # What cannot be the marker's beginning any more is only kept for the message.
            del self._head[: max(0, len(self._head) - 65536)]
            return b""
        self.seen = True
        rest = bytes(self._head[at + len(self._marker) :])
        del self._head[at:]
        return rest
