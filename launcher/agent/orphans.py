"""What goes on without its agent: an attempt's processes on a node where the agent was killed.

The kernel ends ranks with their agent, but not what those had started. It goes on using the slots that the agent had
leased, so they count as held for as long as any of it lives. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Dict, List, Sequence, Tuple

from ..contract.leases import Lease
from ..contract.records import ProcessId
from . import processes
from .processes import Stat

_TOKEN = b"ZERUN_TOKEN="


def mark_of(token: str) -> str:
    """What may stand in a file that all can read: it finds who carries the token, and is not the token."""
    return hashlib.sha256(token.encode("utf-8")).hexdigest()


def sessions_below(pid: int, known: Sequence[ProcessId] = ()) -> Tuple[ProcessId, ...]:
    """The sessions of what ``pid`` has started, by their leaders; not its own. ``known`` ones may have lost theirs."""
    stats = processes.all_stats()
    by_pid = {stat.pid: stat for stat in stats}
    own = by_pid[pid].session if pid in by_pid else 0
    leaders = {stat.session for stat in processes.descendants([pid], stats)} - {own}
    boot = processes.boot_id()
    found = {leader.pid: leader for leader in known if leader.pid in leaders}
    found.update((n, ProcessId(n, by_pid[n].started_ticks, boot)) for n in leaders if n in by_pid)
    return tuple(found[n] for n in sorted(found))


def is_gone(process: ProcessId) -> bool:
    """Whether it has surely ended: what /proc hides of other users' processes still answers to a signal."""
    if processes.is_alive(process):
        return False
    stat = processes.read_stat(process.pid)
    if stat is not None or process.boot not in ("", processes.boot_id()):
        return True
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def left_of(lease: Lease, user: int) -> List[Stat]:
    """The processes of the lease's attempt that live on this node. ``user`` is whose lease it is."""
    if lease.process.boot not in ("", processes.boot_id()):
        return []
    found = {stat.pid: stat for stat in _in_sessions(lease.sessions, user)}
    if lease.mark:
        found.update((stat.pid, stat) for stat in processes.carrying(lambda has: _carries(has, lease.mark), user))
    return list(found.values())


def _carries(entries: Sequence[bytes], mark: str) -> bool:
    tokens = [entry[len(_TOKEN) :] for entry in entries if entry.startswith(_TOKEN)]
    return any(hashlib.sha256(token).hexdigest() == mark for token in tokens)


def _in_sessions(leaders: Sequence[ProcessId], user: int) -> List[Stat]:
    """A session's number is given to nobody else while any process is in it. Once it was, its first process is no
    longer the leader that we knew."""
    known: Dict[int, ProcessId] = {leader.pid: leader for leader in leaders}
    found = []
    for stat in processes.all_stats() if known else []:
        leader = known.get(stat.session)
        if leader is None or stat.dead or stat.started_ticks < leader.started_ticks:
            continue
        first = processes.read_stat(leader.pid)
        if first is not None and first.started_ticks != leader.started_ticks:
            continue
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{stat.pid}").st_uid == user:
                found.append(stat)
    return found
