"""What this process and its children may use of the machine: the cores they are bound to, the memory they may take.

Slurm binds and limits by affinity and cgroups, a container by cgroups, a login shell by ``ulimit``; what the machine
itself has says nothing about that.
"""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Dict, Iterator, NamedTuple, Optional, Tuple

_CGROUPS = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


class Allowance(NamedTuple):
    """``cpus`` as ``0-3,8``; ``memory_by`` is what limits: machine, cgroup v1, cgroup v2, RLIMIT_AS, RLIMIT_DATA."""

    cores: int
    cpus: str
    memory_bytes: Optional[int]
    memory_by: str


def here() -> Allowance:
    cpus = sorted(os.sched_getaffinity(0))
    memory, by = memory_limit()
    return Allowance(len(cpus), ranges(cpus), memory, by)


def ranges(cpus: "list[int]") -> str:
    """``[0, 1, 2, 8]`` → ``0-2,8``."""
    parts: "list[list[int]]" = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def memory_limit(cgroups: str = _CGROUPS, own: str = "/proc/self/cgroup") -> Tuple[Optional[int], str]:
    """The least of all limits on this process, and whose it is."""
    found = list(_limits(cgroups, own))
    return min(found, key=lambda limit: limit[0]) if found else (None, "")


def _limits(cgroups: str, own: str) -> Iterator[Tuple[int, str]]:
    with contextlib.suppress(ValueError, OSError):
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "machine"
    for kind, name in ((resource.RLIMIT_AS, "RLIMIT_AS"), (resource.RLIMIT_DATA, "RLIMIT_DATA")):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft, name
    groups = _groups(own)
    if "memory" in groups:
        for limit in _up(os.path.join(cgroups, "memory"), groups["memory"], "memory.limit_in_bytes"):
            yield limit, "cgroup v1"
    if "" in groups:
        for limit in _up(cgroups, groups[""], "memory.max"):
            yield limit, "cgroup v2"


def _groups(own: str) -> Dict[str, str]:
    """Controller → this process's group; the one of cgroup v2 under the empty name."""
    found: Dict[str, str] = {}
    try:
        with open(own, encoding="utf-8", errors="replace") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                found.update({controller: path for controller in controllers.split(",")})
    except (OSError, ValueError):
        return found
    return found


def _up(mount: str, group: str, name: str) -> Iterator[int]:
    """The limits of a group and of all that it lies in: each of them holds. In a container the path that /proc tells
    is the host's and may not be below the mount; then the mount's own root is the group."""
    group = group.strip("/")
    while True:
        try:
            with open(os.path.join(mount, group, name), encoding="ascii") as file:
                text = file.read().strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                yield int(text)
        except (OSError, ValueError):
            pass
        if not group:
            return
        group = os.path.dirname(group)
