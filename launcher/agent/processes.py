"""What /proc says of processes, and how the agent binds its children to itself.

A pid alone names nothing for long: everything that is signalled later is kept as pid, start time and
boot (:class:`~..contract.records.ProcessId`), and checked again right before the signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set

from ..contract.records import ProcessId

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_RESET = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGPIPE,
    signal.SIGCHLD,
)


class Stat(NamedTuple):
    """One line of /proc/PID/stat, the fields that matter here."""

    pid: int
    state: str
    parent: int
    session: int
    started_ticks: int

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"


def read_stat(pid: int) -> Optional[Stat]:
    """The process's state, or None when there is none of that pid."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The command stands in brackets and may hold spaces and brackets itself: count from the last one.
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Stat(pid, fields[0].decode("ascii"), int(fields[1]), int(fields[3]), int(fields[19]))


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def process_id(pid: int) -> Optional[ProcessId]:
    stat = read_stat(pid)
    return None if stat is None else ProcessId(pid, stat.started_ticks, boot_id())


def is_alive(process: ProcessId) -> bool:
    """Whether this very process (not a later one of the same pid) runs on this machine. Zombies do not."""
    stat = read_stat(process.pid)
    if stat is None or stat.dead or stat.started_ticks != process.started_ticks:
        return False
    return process.boot in ("", boot_id())


def arguments(pid: int) -> List[bytes]:
    """The argument list of a process; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return []


def all_stats() -> List[Stat]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                found.append(stat)
    return found


def descendants(roots: Iterable[int], stats: Optional[List[Stat]] = None) -> List[Stat]:
    """Every living process below ``roots``, parents before children. Sessions and groups do not matter."""
    children: Dict[int, List[Stat]] = {}
    for stat in all_stats() if stats is None else stats:
        children.setdefault(stat.parent, []).append(stat)
    found: List[Stat] = []
    seen: Set[int] = set(roots)
    front = list(seen)
    while front:
        for stat in children.get(front.pop(), ()):
            if stat.pid not in seen:
                seen.add(stat.pid)
                front.append(stat.pid)
                if not stat.dead:
                    found.append(stat)
    return found


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except OSError:
        pass
    return False


def listeners(pid: int, number: int) -> List[Stat]:
    """The process itself if it handles the signal, else the topmost of its descendants that do: a program
    behind a wrapper, but not the helpers that it forked."""
    stats = all_stats()
    children: Dict[int, List[Stat]] = {}
    for stat in stats:
        children.setdefault(stat.parent, []).append(stat)
    found: List[Stat] = []
    front = [stat for stat in stats if stat.pid == pid]
    while front:
        stat = front.pop()
        if not stat.dead and catches(stat.pid, number):
            found.append(stat)
        else:
            front.extend(children.get(stat.pid, ()))
    return found


def send(stat: Stat, number: int) -> bool:
    """Signals the process if it is still the same one. False when it is gone."""
    now = read_stat(stat.pid)
    if now is None or now.dead or now.started_ticks != stat.started_ticks:
        return False
    try:
        os.kill(stat.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def marked(token: str) -> List[Stat]:
    """This user's processes that carry ``ZERUN_TOKEN=token``, and what they started; never the caller.

    This is how an attempt's processes are found when their agent is gone.
    """
    wanted = b"ZERUN_TOKEN=" + token.encode("utf-8")
    return carrying(lambda entries: wanted in entries, os.geteuid())


def carrying(wanted: Callable[[List[bytes]], bool], user: int) -> List[Stat]:
    """The user's processes whose environment is ``wanted``, and what they started; never the caller. Of another user's
    nothing is seen, but by root."""
    stats = all_stats()
    roots = []
    for stat in stats:
        try:
            if stat.dead or stat.pid == os.getpid() or os.stat(f"/proc/{stat.pid}").st_uid != user:
                continue
            with open(f"/proc/{stat.pid}/environ", "rb") as file:
                if wanted(file.read().split(b"\0")):
                    roots.append(stat)
        except OSError:
            continue
    known = {stat.pid for stat in roots} | _ancestors(os.getpid(), stats)
    return roots + [stat for stat in descendants([s.pid for s in roots], stats) if stat.pid not in known]


def _ancestors(pid: int, stats: List[Stat]) -> Set[int]:
    parents = {stat.pid: stat.parent for stat in stats}
    found: Set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def end_all(find: Callable[[], List[Stat]], grace_s: float, limit_s: float = 5.0) -> Set[int]:
    """SIGTERM to what ``find`` returns, SIGKILL after ``grace_s``, again until it returns nothing.

    Returns the pids that were signalled. Blocks; for commands, not for the agent's event loop.
    """
    signalled: Set[int] = set()
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        left = find()
        if not left or waited > grace_s + limit_s:
            return signalled
        for stat in left:
            # SIGTERM once each: a process that cleans up must not be interrupted at it again.
            if waited >= grace_s:
                send(stat, signal.SIGKILL)
            elif stat.pid not in signalled:
                send(stat, signal.SIGTERM)
            signalled.add(stat.pid)
        time.sleep(0.05)


def become_subreaper() -> bool:
    """From now on orphans below this process become its children, whatever sessions they made."""
    result: int = _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    return result == 0


def bind_to_parent(parent: int) -> Callable[[], None]:
    """What a child does between fork and exec: die with ``parent``, and start with default signals.

    SIGUSR2 alone starts ignored: Slurm sends its warning to every process of a step, and that must not
    kill a rank that has no handler, or none yet. (A shell cannot trap what it found ignored: a shell
    script that wants to hear the warning takes another ``stop_signal``.)
    """

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(127)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        with contextlib.suppress(ValueError, OSError):
            signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return prepare
