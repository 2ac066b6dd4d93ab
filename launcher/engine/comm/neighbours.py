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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_HELLO = struct.Struct("<32sIQ")  # the listener's secret, the caller's rank, where the caller's token lies
_TOKEN = 16
_AT_ONCE = 64  # words of one rank, before another's are looked at
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
class Unsaid:
    """How many words about something found no room yet."""

    words: int = 0


@dataclass
class Neighbour:
    """One other rank: its socket, and its process as this one sees it. ``ending``: a descriptor that says when that
    process has ended; the socket's end does not where a process that it forked lives on. -1 where there is none."""

    socket: socket.socket
    pid: int
    ending: int = -1
    gone: bool = False
    deaf: bool = False  # takes no words any more; what it said before may still be there
    unsaid: deque[tuple[bytes, Unsaid]] = field(default_factory=deque)


@dataclass
class Neighbours:
    """All other ranks of a group, by number. Words are datagrams of a few bytes, in order."""

    of: dict[int, Neighbour]
    _poll: select.poll = field(default_factory=select.poll)
    _by_descriptor: dict[int, tuple[int, Neighbour]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, other in self.of.items():
            other.socket.setblocking(False)
            other.ending = _ending_of(other.pid)
            for descriptor in (other.socket.fileno(), other.ending):
                if descriptor >= 0:
                    self._by_descriptor[descriptor] = rank, other
                    self._poll.register(descriptor, select.POLLIN)

    def tell(self, rank: int, word: bytes, unsaid: Unsaid) -> None:
        """Says it at once, or, where the other's queue is full, when there is room and :meth:`hear` is called:
        ``unsaid`` counts it until then. Never waits, since the other may be waiting for this rank elsewhere."""
        other = self.of[rank]
        if other.unsaid or not self._send(other, word):
            if not other.unsaid:
                self._poll.modify(other.socket.fileno(), select.POLLIN | select.POLLOUT)
            other.unsaid.append((word, unsaid))
            unsaid.words += 1

    def hear(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Words that have arrived; waits for the first one, or for room for one that is unsaid. A rank that is gone is
        marked, and says nothing more."""
        heard: list[tuple[int, bytes]] = []
        for descriptor, event in self._poll.poll(timeout_s * 1000):
            rank, other = self._by_descriptor[descriptor]
            if other.gone:
                continue
            if event & ~select.POLLOUT:
                ended = self._receive(rank, other, heard)
                if descriptor == other.ending and not ended:
                    ended = self._receive(rank, other, heard, limit=None)
                if ended or descriptor == other.ending:
                    self._lost(other)
                    continue
            if event & select.POLLOUT:
                self._say_unsaid(other)
        return heard

    def read(self, rank: int, address: int, into: int, length: int) -> None:
        read_memory(self.of[rank].pid, address, into, length)

    def _receive(
        self, rank: int, other: Neighbour, heard: list[tuple[int, bytes]], limit: int | None = _AT_ONCE
    ) -> bool:
        """Whether the other side has closed its end."""
        while limit is None or limit > 0:
            limit = None if limit is None else limit - 1
            try:
                word = other.socket.recv(256)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not word:
                return True
            heard.append((rank, word))
        return False

    def _send(self, other: Neighbour, word: bytes) -> bool:
        """Whether nothing is left to do with this word."""
        try:
            other.deaf or other.socket.send(word)
        except BlockingIOError:
            return False
        except OSError:
            other.deaf = True
        return True

    def _say_unsaid(self, other: Neighbour) -> None:
        while other.unsaid and self._send(other, other.unsaid[0][0]):
            other.unsaid.popleft()[1].words -= 1
        if not other.unsaid:
            self._poll.modify(other.socket.fileno(), select.POLLIN)

    def _lost(self, other: Neighbour) -> None:
        other.gone = other.deaf = True
        for descriptor in (other.socket.fileno(), other.ending):
            if descriptor >= 0:
                self._poll.unregister(descriptor)
        for _, unsaid in other.unsaid:
            unsaid.words -= 1
        other.unsaid.clear()

    def close(self) -> None:
        for other in self.of.values():
            other.socket.close()
            if other.ending >= 0:
                os.close(other.ending)
                other.ending = -1


def _ending_of(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # Linux before 5.3, or a container's filter
        return -1


def meet(rank: int, size: int, exchange: Callable[[bytes], list[bytes]]) -> Neighbours | None:
    """The other ranks, if all are on this host and may read each other; every rank gets the same answer.

    ``exchange`` gives every rank's bytes, in rank order: all take part in each, whatever they found before.
    """
    meeting = _Meeting(rank, size)
    try:
        for question in (meeting.invite, meeting.call, meeting.answer, meeting.prove):
            try:
                answer = question()
            except OSError:  # no descriptor left, another network namespace, or a user that is another
                answer = b""
            said = exchange(answer)
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
        self._listener.listen(128)  # strangers may stand in the queue too
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
            caller.connect(b"\0" + name)
            caller.send(_HELLO.pack(bytes.fromhex(secret.decode()), self.rank, self._lies_at))
        return b"called"

    def answer(self) -> bytes:
        """Hears who called, and says where the own token lies. Whoever does not know the secret is sent away, and who
        says nothing is not waited for."""
        assert self._listener is not None
        self._listener.setblocking(False)
        end = time.monotonic() + _PATIENCE_S
        waiting: dict[int, socket.socket] = {}
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        try:
            while len(self._met) < self.size - 1:
                ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
                if not ready:
                    return b""
                for descriptor, _ in ready:
                    if descriptor == self._listener.fileno():
                        called, _ = self._listener.accept()
                        waiting[called.fileno()] = called
                        poll.register(called.fileno(), select.POLLIN)
                        continue
                    poll.unregister(descriptor)
                    called = waiting.pop(descriptor)
                    if not self._hear_hello(called):
                        called.close()
        finally:
            for stranger in waiting.values():
                stranger.close()
        return self._token.raw

    def _hear_hello(self, called: socket.socket) -> bool:
        """Whether who called is one of this group."""
        called.settimeout(_PATIENCE_S)
        try:
            hello = called.recv(_HELLO.size)
            secret, other, lies_at = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0)
            if not secrets.compare_digest(secret, self._secret) or not self.rank < other < self.size:
                return False
            called.send(_HELLO.pack(secret, self.rank, self._lies_at))
        except OSError:
            return False
        self._met[other] = called, lies_at
        return True

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
