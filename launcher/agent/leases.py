"""Slot leases: where no scheduler gives slots out, an agent locks a file a slot before it starts ranks.

``/tmp/zerun-leases`` belongs to all users of a node (mode 1777; whoever is first makes it)::

    slot-3            the lock: flock, held by the agent and its ranks while they live. Never written, never removed
    slot-3.2001.json  who user 2001 is there for (contract.leases.Lease), that user's own file
    choosing          locked while slots are chosen, so that two agents never take half of a node each

The kernel lets a lock go with its processes, however they ended: nothing stale is ever in the way, also after
a power cut. What a killed agent left running keeps the slots: ranks and most of what they start inherit the lock,
and who closed it is found by what the lease tells of the attempt's processes (:mod:`.orphans`). Nobody writes
into a file that another user made, and no link is followed, so the folder can harm nobody; a user who is set on
it can hold slots for ever, as such a user could fill the devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pwd
import re
import stat
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..contract.errors import Busy, Refused
from ..contract.folder import is_safe_name
from ..contract.launch import LaunchSpec
from ..contract.leases import Lease
from ..contract.moment import moment
from ..contract.plain import PlainError, dumps, from_plain, loads
from ..contract.records import ProcessId
from . import orphans
from .strangers import Stranger, strangers

FOLDER = "/tmp/zerun-leases"
_CHOOSING_S = 10.0
_SETTLED_S = 1.0  # what the kernel ends together with an agent takes a moment
_EVERY_BEATS = 32
_LEASE_BYTES = 64 * 1024
_MOST_SESSIONS = 256  # so that what is written is no longer than what is read
_PIDS = 2**31
_NOFOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in our way must not stop us
_INFO = re.compile(r"slot-([0-9]{1,6})\.([0-9]{1,10})\.json")


class Wish(NamedTuple):
    """``number`` slots ``among`` those of a node; ``gpu``: the slots are devices that strangers may compute on."""

    among: Tuple[int, ...]
    number: int
    gpu: bool


class Held:
    """The slots that this process holds, from :func:`take` to :meth:`release`, or as long as any process lives that
    inherited ``handles``."""

    def __init__(self, slots: Tuple[int, ...], handles: Sequence[int], lease: Lease) -> None:
        self.slots = slots
        self.handles = tuple(handles)
        self._lease = lease
        self._beats = 0

    def beat(self) -> None:
        """Keeps the files young: what looks forgotten in /tmp is swept away after some days. Now and then writes down
        what this process has started, by which it is found should this process be killed."""
        for handle in self.handles:
            with contextlib.suppress(OSError):
                os.utime(handle)
        self._beats += 1
        if self._beats % _EVERY_BEATS == 0 or self._beats & (self._beats - 1) == 0:
            self.note_processes()

    def note_processes(self) -> None:
        sessions = orphans.sessions_below(os.getpid(), self._lease.sessions)
        if self.handles and sessions != self._lease.sessions:
            self._lease = dataclasses.replace(self._lease, sessions=sessions)
            with contextlib.suppress(Refused, OSError), _folder() as at:
                for slot in self.slots:
                    _write(at, self._lease, slot)

    def release(self, *, but_for_heirs: bool = False) -> None:
        """``but_for_heirs``: processes that could not be ended keep the slots, and the lease goes on saying whose."""
        if not but_for_heirs:
            with contextlib.suppress(Refused, OSError), _folder() as at:
                for slot in self.slots:
                    with contextlib.suppress(OSError):
                        os.unlink(_info_name(slot), dir_fd=at)
        for handle in self.handles:
            if not but_for_heirs:
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone waits for whoever is at its very end
            os.close(handle)
        self.handles = ()


def take(wish: Wish, lease: Lease) -> Held:
    """Locks ``wish.number`` slots, the first that are free; ``lease`` says for whom (its ``slot`` is filled in).

    Raises :class:`Busy` naming every holder when there are not enough, and then holds none;
    :class:`Refused` when the folder is not one that all users may use.
    """
    with _folder() as at, _choosing(at):
        seen = _look(at, wish)
        if len(seen.free) < wish.number:
            raise Busy(_refusal(lease.node, wish, seen), hint=_HINT)
        taken: Dict[int, int] = {}
        try:
            for slot in seen.free:
                handle = _lock(at, slot) if len(taken) < wish.number else None
                if handle is not None:
                    taken[slot] = handle
            if len(taken) < wish.number:  # somebody did not wait for our choosing
                raise Busy(_refusal(lease.node, wish, _look(at, wish)), hint=_HINT)
        except BaseException:
            for handle in taken.values():
                os.close(handle)
            raise
        for slot in taken:
            _write(at, lease, slot)
    return Held(tuple(taken), list(taken.values()), lease)


def hold(spec: LaunchSpec, node_rank: int, node: str, own: ProcessId) -> Tuple[LaunchSpec, Optional[Held]]:
    """The lease of this agent's node, and the specification with the devices that it got. None where a scheduler
    gives slots out. Raises as :func:`take` does."""
    entry = spec.nodes[node_rank]
    if entry.among is None:
        return spec, None
    mark = orphans.mark_of(spec.token)
    lease = Lease(0, user_name(os.geteuid()), spec.run, spec.attempt, node, time.time(), own, mark)
    held = take(Wish(entry.among, entry.slots, spec.device_kind == "gpu"), lease)
    nodes = list(spec.nodes)
    nodes[node_rank] = dataclasses.replace(entry, devices=held.slots)
    return dataclasses.replace(spec, nodes=tuple(nodes)), held


def slots(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{node, among, count, gpu}`` → ``{free, held, strangers, refusal}``: what :func:`take` would meet now.

    ``refusal`` is a sentence when fewer than ``count`` are free, else null. Nothing is kept.
    """
    wish = Wish(tuple(int(n) for n in request["among"]), int(request["count"]), bool(request.get("gpu")))
    with _folder() as at, _choosing(at):
        seen = _look(at, wish)
    enough = len(seen.free) >= wish.number
    return {
        "free": list(seen.free),
        "held": [{"slot": slot, "by": _holder(holder)} for slot, holder in seen.held],
        "strangers": [s._asdict() for s in seen.foreign],
        "refusal": None if enough else _refusal(str(request["node"]), wish, seen),
        "hint": _HINT,
    }


# --- telling --------------------------------------------------------------------------------------

_HINT = "--wait-free waits until they are free; zerun cluster check says who holds what"


class _Holder(NamedTuple):
    """``lease`` None: nobody said who. ``gone``: its agent is, and what it started is not."""

    lease: Optional[Lease]
    gone: bool = False


class _Seen(NamedTuple):
    free: Tuple[int, ...]
    held: Tuple[Tuple[int, _Holder], ...]
    foreign: Tuple[Stranger, ...]


def _usable(among: Sequence[int], foreign: Sequence[Stranger]) -> Tuple[int, ...]:
    return tuple(slot for slot in among if all(s.device != slot for s in foreign))


def _look(at: int, wish: Wish) -> _Seen:
    """Call it while choosing: for a moment it locks what is free. Where an agent is gone and too little is free, it
    looks again until what the kernel ends with the agent has had its time."""
    foreign = strangers() if wish.gpu else []
    end = time.monotonic() + _SETTLED_S
    while True:
        seen = _look_once(at, wish, foreign)
        enough = len(seen.free) >= wish.number
        if enough or time.monotonic() > end or not any(holder.gone for _, holder in seen.held):
            return seen
        time.sleep(0.1)


def _look_once(at: int, wish: Wish, foreign: Sequence[Stranger]) -> _Seen:
    free, held = [], []
    left: Dict[Tuple[str, int, int], bool] = {}
    for slot in wish.among:
        handle = _lock(at, slot)
        try:
            holder = _who(_leases(at, slot)) if handle is None else _orphaned(_leases(at, slot), left)
        finally:
            if handle is not None:
                os.close(handle)
        if holder is not None:
            held.append((slot, holder))
        else:
            free.append(slot)
    # What computes on a device that a lease covers is that run's own.
    strange = tuple(s for s in foreign if s.device in free)
    return _Seen(_usable(free, strange), tuple(held), strange)


def _refusal(node: str, wish: Wish, seen: _Seen) -> str:
    noun = "GPU" if wish.gpu else "slot"
    by: Dict[str, List[int]] = {}
    for slot, who in seen.held:
        by.setdefault(_holder(who), []).append(slot)
    told = [f"{noun} {', '.join(map(str, numbers))} held by {holder}" for holder, numbers in by.items()]
    told += [s.sentence() for s in seen.foreign]
    free = f"{len(seen.free)} of {len(wish.among)} {'is' if len(seen.free) == 1 else 'are'} free"
    return f"node {node}: {wish.number} {noun}{'' if wish.number == 1 else 's'} asked for, {free}: {'; '.join(told)}"


def _holder(holder: _Holder) -> str:
    lease, gone = holder
    if lease is None:
        return "a process that did not say who it is"
    told = f"run {lease.run} of {lease.user} since {moment(lease.since)}"
    if not gone:
        return f"{told} (pid {lease.process.pid})"
    how = "" if lease.user == user_name(os.geteuid()) else f", by {lease.user},"
    return (
        f"{told}, whose agent (pid {lease.process.pid}) is gone while what it started lives on "
        f"(zerun cancel {lease.run}{how} ends it)"
    )


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# --- files ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder() -> Iterator[int]:
    """The folder, open, and as it has to be."""
    path = os.environ.get("ZERUN_LEASES") or FOLDER
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    try:
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NOFOLLOW)
    except OSError as problem:
        raise Refused(f"{path}, where slots are leased, is no folder for all users: {problem.strerror}") from problem
    try:
        if os.fstat(at).st_uid == os.geteuid():
            os.fchmod(at, 0o1777)
        end = time.monotonic() + 1.0
        while stat.S_IMODE(os.fstat(at).st_mode) != 0o1777:  # its maker is at the line above
            if time.monotonic() > end:
                owner = user_name(os.fstat(at).st_uid)
                raise Refused(f"{path} is not open to all users (mode 1777)", hint=f"ask {owner}, who made it: chmod")
            time.sleep(0.02)
        yield at
    finally:
        os.close(at)


@contextlib.contextmanager
def _choosing(at: int) -> Iterator[None]:
    """Alone with the locks. Who holds this for long is not waited for: each slot has its own lock still."""
    handle = _open(at, "choosing")
    try:
        end = time.monotonic() + _CHOOSING_S
        while not _flock(handle) and time.monotonic() < end:
            time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def _open(at: int, name: str) -> int:
    """A lock file, made when it is not there. Raises Refused when something else has its name."""
    end = time.monotonic() + 1.0
    while True:
        try:
            handle = os.open(name, os.O_RDONLY | _NOFOLLOW, dir_fd=at)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                # Not with O_CREAT above: the kernel forbids that for another user's file in a sticky folder.
                made = os.open(name, os.O_RDONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o644, dir_fd=at)
                os.fchmod(made, 0o666)  # so that whoever holds it may keep it young
                return made
            continue
        except OSError as problem:
            if problem.errno == errno.EACCES and time.monotonic() < end:  # its maker is at the lines above
                time.sleep(0.02)
                continue
            raise Refused(f"the lease file {name} cannot be opened: {problem.strerror}") from problem
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise Refused(f"the lease file {name} is no plain file")
        return handle


def _lock(at: int, slot: int) -> Optional[int]:
    """The slot's file, locked; None when another process holds it."""
    name = f"slot-{slot}"
    while True:
        handle = _open(at, name)
        if not _flock(handle):
            os.close(handle)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(name, dir_fd=at, follow_symlinks=False).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # swept away in between: the name stands for another file now


def _flock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _info_name(slot: int) -> str:
    return f"slot-{slot}.{os.geteuid()}.json"


def _write(at: int, lease: Lease, slot: int) -> None:
    """Who holds it. The lock counts, so a name that somebody else took is no reason to stop."""
    mine = dataclasses.replace(lease, slot=slot, sessions=lease.sessions[:_MOST_SESSIONS])
    beside = f".slot-{slot}.{os.geteuid()}.{os.getpid()}.part"
    with contextlib.suppress(OSError):
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o644, dir_fd=at)
        try:
            os.fchmod(handle, 0o644)
            data = dumps(mine)
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, "no room for the whole of it")
            os.replace(beside, _info_name(slot), src_dir_fd=at, dst_dir_fd=at)
        except OSError:
            os.unlink(beside, dir_fd=at)
        finally:
            os.close(handle)


class _Told(NamedTuple):
    """A lease file: whose it is, and when it was written."""

    lease: Lease
    user: int
    at: float

    @property
    def lives(self) -> bool:
        """Whether the agent is there to be seen (another user's /proc may be hidden)."""
        try:
            pid = self.lease.process.pid
            return not orphans.is_gone(self.lease.process) and os.stat(f"/proc/{pid}").st_uid == self.user
        except OSError:
            return False


def _leases(at: int, slot: int) -> List[_Told]:
    """What users say of a slot, each in a file of their own."""
    found: List[_Told] = []
    for name in os.listdir(at):
        match = _INFO.fullmatch(name)
        if match is None or int(match[1]) != slot:
            continue
        try:
            handle = os.open(name, os.O_RDONLY | _NOFOLLOW, dir_fd=at)
        except OSError:
            continue
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != int(match[2]):
                continue
            with contextlib.suppress(OSError, PlainError, ValueError):
                lease = from_plain(Lease, loads(file.read(_LEASE_BYTES)))
                if is_safe_name(lease.run) and 0 < lease.process.pid < _PIDS:
                    # With the name of the user whose file it is, whatever the file says.
                    named = dataclasses.replace(lease, slot=slot, user=user_name(about.st_uid))
                    found.append(_Told(named, about.st_uid, about.st_mtime))
    return found


def _who(told: Sequence[_Told]) -> _Holder:
    """Who holds a locked slot: the file whose process lives, else the newest."""
    if not told:
        return _Holder(None)
    best = max(told, key=lambda one: (one.lives, one.at))
    return _Holder(best.lease, orphans.is_gone(best.lease.process))


def _orphaned(told: Sequence[_Told], left: Dict[Tuple[str, int, int], bool]) -> Optional[_Holder]:
    """Who still uses a slot that nobody has locked. ``left`` keeps what was found, for the other slots."""
    for one in told:
        if orphans.is_gone(one.lease.process):
            key = (one.lease.run, one.lease.attempt, one.user)
            if key not in left:
                left[key] = bool(orphans.left_of(one.lease, one.user))
            if left[key]:
                return _Holder(one.lease, gone=True)
    return None
