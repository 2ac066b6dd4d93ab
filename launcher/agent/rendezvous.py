"""Where ranks and agents meet: the address of the first node and two ports that are bound before they are told.

No port is guessed free and hoped for: the socket that listens is the one that rank 0 inherits (or that
is closed in the moment before a program of the user's binds it again).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ..contract.errors import UsageError, ZerunError
from ..contract.launch import LaunchSpec
from ..contract.plain import PlainError, dumps, from_plain, loads, write_atomically
from ..contract.records import Announcement

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 0x1
_EPHEMERAL = (32768, 60999)
_LOWEST, _HIGHEST = 10000, 65000
_BACKLOG = 4096


class Meeting(NamedTuple):
    """The two listening sockets of node rank 0, and what is announced of them."""

    announcement: Announcement
    ranks: socket.socket
    control: socket.socket


def open_meeting(spec: LaunchSpec, name: str, address: str) -> Meeting:
    """Binds and listens on node rank 0, then says where.

    ``name`` is the node's own, ``address`` what others should connect to (empty: found out here).
    Raises :class:`ZerunError` when no candidate port can be bound.
    """
    alone = len(spec.nodes) == 1
    if spec.interface and not address and not alone:
        address = address_of(spec.interface, name)
    own = own_address(name, address, [n.address or n.name for n in spec.nodes], alone=alone)
    # On loopback nothing has to be open to the network; elsewhere the announced address may be a
    # translated one that no interface here carries.
    host = own if own.startswith("127.") else ""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    ports = candidates(spec.run, spec.attempt, spec.ports, ephemeral_range())
    ranks = listen_at(family, host, ports)
    try:
        control = listen_at(family, host, ports)
    except ZerunError:
        ranks.close()
        raise
    return Meeting(Announcement(own, ranks.getsockname()[1], control.getsockname()[1]), ranks, control)


def candidates(run: str, attempt: int, allowed: Optional[Tuple[int, int]], ephemeral: Tuple[int, int]) -> Iterator[int]:
    """Ports to try, in an order that is this attempt's own, so that jobs on one node seldom collide.

    Ports of the ephemeral range are left out (any connection may hold one), unless the site allows
    no others.
    """
    low, high = allowed or (_LOWEST, _HIGHEST)
    pool = [port for port in range(low, high + 1) if not ephemeral[0] <= port <= ephemeral[1]]
    pool = pool or list(range(low, high + 1))
    digest = hashlib.sha256(f"{run}/{attempt}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") % len(pool)
    return iter(pool[start:] + pool[:start])


def ephemeral_range() -> Tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
            low, high = file.read().split()
            return int(low), int(high)
    except (OSError, ValueError):
        return _EPHEMERAL


def listen_at(family: int, host: str, ports: Iterator[int]) -> socket.socket:
    """The first of ``ports`` that can be had, listening."""
    refused = "no candidate was left"
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port still held by closed connections of an earlier attempt is free enough.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(_BACKLOG)
            return listener
        except OSError as problem:
            listener.close()
            refused = str(problem)
    raise ZerunError(
        f"no port could be bound for the rendezvous: {refused}", hint="give other `network.ports` in the cluster"
    )


def own_address(name: str, address: str, others: Sequence[str], *, alone: bool) -> str:
    """What the other nodes connect to. Numeric wherever it is found out here: nobody has to resolve it.

    A job of one node stays on loopback; a name that resolves to loopback (Debian's 127.0.1.1) is of no
    use to others, so then the address that routes to them is taken.
    """
    if address in ("localhost", "127.0.0.1") or (not address and (alone or name == "localhost")):
        return "127.0.0.1"
    if address:
        return address
    with contextlib.suppress(OSError):
        for family, _, _, _, place in socket.getaddrinfo(name, None, 0, socket.SOCK_STREAM):
            found = str(place[0])
            if family == socket.AF_INET and not found.startswith("127."):
                return found
    launched_from = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    for target in [*others, launched_from, "192.0.2.1"]:
        found_towards = local_address_towards(target) if target and target != name else None
        if found_towards and not found_towards.startswith("127."):
            return found_towards
    for _, found in interfaces():
        if not found.startswith("127."):
            return found
    raise UsageError(
        f"node {name}: no address was found that other nodes can connect to", hint="give the node an `address:`"
    )


def address_of(interface: str, node: str) -> str:
    """The IPv4 address of this node's ``interface``. Raises UsageError where it has none, saying what there is."""
    here = interfaces()
    for name, address in here:
        if name == interface:
            return address
    have = ", ".join(f"{name} ({address})" for name, address in here)
    raise UsageError(
        f"node {node}: network.interface is {interface}, which is not up here with an IPv4 address; there are {have}",
        hint="mend `network.interface` in the cluster, or leave it out: it is found by the route to the first node",
    )


def local_address_towards(target: str) -> Optional[str]:
    """The local address that packets to ``target`` leave from. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(target, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interfaces() -> List[Tuple[str, str]]:
    """(interface, its first IPv4 address) of all interfaces that are up."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode("utf-8")[:15])
            with contextlib.suppress(OSError):
                flags = struct.unpack_from("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request), 16)[0]
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if flags & _IFF_UP:
                    found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def interface_towards(target: str) -> Optional[str]:
    """The name of the interface through which this node reaches ``target``: gloo must not guess it."""
    local = local_address_towards(target)
    if local is None:
        return None
    if local.startswith("127."):
        return "lo"
    return next((name for name, address in interfaces() if address == local), None)


def interface_of(spec: LaunchSpec, meeting: str) -> Optional[str]:
    """The interface that this node's ranks talk through: the one that the cluster names, else the one on the way
    to ``meeting``. Never loopback for ranks of several machines, though the first node may know its own name so."""
    found = spec.interface or interface_towards(meeting)
    if found != "lo" or len(spec.nodes) == 1 or meeting in ("localhost", "127.0.0.1"):
        return found
    others = (interface_towards(node.address or node.name) for node in spec.nodes if node.address or node.name)
    real = (name for name, address in interfaces() if not address.startswith("127."))
    return next((name for name in others if name not in (None, "lo")), None) or next(real, found)


def announce(announcement: Announcement, path: Path) -> None:
    write_atomically(path, dumps(announcement))


def read_announcement(path: Path) -> Optional[Announcement]:
    """What node rank 0 announced, or None when it has not yet."""
    try:
        return from_plain(Announcement, loads(path.read_bytes()))
    except (OSError, PlainError, ValueError):
        return None
