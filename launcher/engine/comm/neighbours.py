"""Ranks of one host: short words between each two of them, and reads of each other's memory.

A message through a socket is copied into the kernel and out again, with TCP's work between, by the cores that compute.
Where both processes are on one host and belong to one user, Linux copies from one's memory into the other's directly
(``process_vm_readv``, what MPI libraries call cross-memory attach): one copy, no packets. The words that say where
something lies, and that it has been read, go by a local socket for each two ranks, whose end also says at once that
the other process is gone.

What it takes is found by trying (:func:`meet`): all ranks connect, say hello, read a token from each other, and agree.
Another host, network namespace or user, a container that forbids it, or another system: the answer is None.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_HELLO = struct.Struct("<32sIQ")  # the listener's secret, the caller's rank, where the caller's token lies
_TOKEN = 16
_PATIENCE_S = 10.0  # all ranks are at the meeting, and a local socket answers at once
_PR_SET_PTRACER = 0x59616D61


class Gone(OSError):
    """The other process has ended."""


class _Run(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _read_call() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return None
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return call


_READ = _read_call() if sys.platform.startswith("linux") else None


def read_memory(pid: int, address: int, into: int, length: int) -> None:
    """Copies ``length`` bytes at ``address`` of process ``pid`` to ``into`` here. Raises OSError."""
    assert _READ is not None
    done = 0
    while done < length:
        here, there = _Run(into + done, length - done), _Run(address + done, length - done)
        got = _READ(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading the memory of process {pid}: {os.strerror(number)}")
        done += got


@dataclass
class Neighbour:
    """One other rank: its socket, and its process as this one sees it."""

    socket: socket.socket
    pid: int
    gone: bool = False


@dataclass
class Neighbours:
    """All other ranks of a group, by number. Words are datagrams of a few bytes, in order."""

    of: dict[int, Neighbour]
    _poll: select.poll = field(default_factory=select.poll)
    _rank_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, other in self.of.items():
            other.socket.setblocking(False)
            self._rank_of[other.socket.fileno()] = rank
            self._poll.register(other.socket.fileno(), select.POLLIN)

    def tell(self, rank: int, word: bytes) -> bool:
        """Whether the word went off; not when the other's queue is full, nor when it is gone."""
        other = self.of[rank]
        try:
            other.socket.send(word)
        except BlockingIOError:
            return False
        except OSError:
            self._lost(other)
        return not other.gone

    def hear(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Words that have arrived; waits for the first one. A rank that is gone is marked, and says nothing more."""
        heard = []
        for descriptor, _ in self._poll.poll(timeout_s * 1000):
            rank = self._rank_of[descriptor]
            other = self.of[rank]
            try:
                word = other.socket.recv(256)
            except BlockingIOError:
                continue
            except OSError:
                word = b""
            if word:
                heard.append((rank, word))
            else:
                self._lost(other)
        return heard

    def read(self, rank: int, address: int, into: int, length: int) -> None:
        read_memory(self.of[rank].pid, address, into, length)

    def _lost(self, other: Neighbour) -> None:
        if not other.gone:
            other.gone = True
            self._poll.unregister(other.socket.fileno())

    def close(self) -> None:
        for other in self.of.values():
            other.socket.close()


def meet(rank: int, size: int, exchange: Callable[[bytes], list[bytes]]) -> Neighbours | None:
    """The other ranks, if all are on this host and may read each other; every rank gets the same answer.

    ``exchange`` gives every rank's bytes, in rank order: all take part in each, whatever they found before.
    """
    meeting = _Meeting(rank, size)
    try:
        for question in (meeting.invite, meeting.call, meeting.answer, meeting.prove):
            said = exchange(question())
            if not all(said):
                return None
            meeting.said = said
        return meeting.neighbours()
    finally:
        meeting.close()


class _Meeting:
    """Each step says something that is not empty where it went well, and uses what all said in the step before."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.said: list[bytes] = []
        self._listener: socket.socket | None = None
        self._secret = secrets.token_bytes(32)
        self._token = ctypes.create_string_buffer(secrets.token_bytes(_TOKEN), _TOKEN)
        self._met: dict[int, tuple[socket.socket, int]] = {}  # the other's token lies at

    def invite(self) -> bytes:
        """Where this rank listens, and on which host."""
        host = _host()
        if _READ is None or not host:
            return b""
        _let_siblings_read()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = b"\0zerun-" + secrets.token_hex(8).encode()  # no file; known within the network namespace
        self._listener.bind(name)
        self._listener.listen(self.size)
        return b" ".join((host, self._secret.hex().encode(), name[1:]))

    def call(self) -> bytes:
        """Calls every lower rank; the answer to the call comes from the queue of who listens."""
        invitations = [said.split(b" ") for said in self.said]
        if len({host for host, _, _ in invitations}) > 1:
            return b""
        for other in range(self.rank):
            _, secret, name = invitations[other]
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.settimeout(_PATIENCE_S)
            self._met[other] = caller, 0
            try:
                caller.connect(b"\0" + name)
                caller.send(_HELLO.pack(bytes.fromhex(secret.decode()), self.rank, self._lies_at))
            except OSError:
                return b""  # another network namespace
        return b"called"

    def answer(self) -> bytes:
        """Hears who called (whoever does not know the secret is sent away), and says where the own token lies."""
        assert self._listener is not None
        end = time.monotonic() + _PATIENCE_S
        while len(self._met) < self.size - 1:
            self._listener.settimeout(max(0.001, end - time.monotonic()))
            try:
                called, _ = self._listener.accept()
                called.settimeout(_PATIENCE_S)
                hello = called.recv(_HELLO.size)
                secret, other, lies_at = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0)
                if not secrets.compare_digest(secret, self._secret) or not self.rank < other < self.size:
                    called.close()
                    continue
                called.send(_HELLO.pack(secret, self.rank, self._lies_at))
            except OSError:
                return b""
            self._met[other] = called, lies_at
        return self._token.raw

    def prove(self) -> bytes:
        """Reads every other rank's token from its memory."""
        for other, (met, lies_at) in self._met.items():
            there = ctypes.create_string_buffer(_TOKEN)
            try:
                if other < self.rank:
                    _, _, lies_at = _HELLO.unpack(met.recv(_HELLO.size))
                read_memory(_process(met), lies_at, ctypes.addressof(there), _TOKEN)
            except (OSError, struct.error):
                return b""
            if there.raw != self.said[other]:
                return b""
        return b"proven"

    def neighbours(self) -> Neighbours:
        found = Neighbours({other: Neighbour(met, _process(met)) for other, (met, _) in self._met.items()})
        self._met = {}
        return found

    def close(self) -> None:
        for met, _ in self._met.values():
            met.close()
        if self._listener is not None:
            self._listener.close()

    @property
    def _lies_at(self) -> int:
        return ctypes.addressof(self._token)


def _process(met: socket.socket) -> int:
    """The other side's process as this one sees it, by the kernel's word; it must be of the same user."""
    pid, user, _ = struct.unpack("iII", met.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid <= 0 or user != os.geteuid():
        raise PermissionError("the process at the other side is not this user's, or not to be seen from here")
    return int(pid)


def _host() -> bytes:
    """What this boot of this kernel has alone; empty where that is not to be had."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _let_siblings_read() -> None:
    """Where the kernel allows reads to a process's ancestors only (Yama's ptrace_scope 1, as Ubuntu has it), they are
    allowed to those that have the same parent: a launcher's ranks. Elsewhere this does nothing."""
    try:
        restricted = Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii").strip() == "1"
    except OSError:
        return
    if restricted and os.getppid() > 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
