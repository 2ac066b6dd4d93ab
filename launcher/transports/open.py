"""From a cluster's description to a transport."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..contract.errors import UsageError
from .local import LocalTransport
from .protocol import Transport
from .target import SshTarget, hops, resolve

if TYPE_CHECKING:
    from ..specs.models import Cluster
    from .fabric import FabricTransport


class Connector:
    """Opens one cluster's transports; those behind one jump host share one login there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # guards the maps, and is never held while a process or a machine is asked
        self._making: dict[str | None, threading.Lock] = {}
        self._opened: dict[str | None, Transport] = {}
        self._gateway_lock = threading.RLock()  # a jump host is made once, whoever comes first
        self._gateways: dict[str, FabricTransport] = {}

    def transport(self, node: str | None = None) -> Transport:
        """``node`` of a direct cluster (None: its first); the login side of a Slurm cluster (None).

        Connects on first use only. Raises UsageError for an unknown node, Refused for an unsafe name.
        Called from several threads, it asks OpenSSH about that many nodes side by side.
        """
        with self._lock:
            making = self._making.setdefault(node, threading.Lock())
        with making:
            with self._lock:
                found = self._opened.get(node)
            if found is None:
                found = self._make(node)
                with self._lock:
                    self._opened[node] = found
            return found

    def close(self) -> None:
        with self._gateway_lock, self._lock:
            for transport in [*self._opened.values(), *reversed(self._gateways.values())]:
                transport.close()
            self._opened.clear()
            self._gateways.clear()

    def _make(self, node: str | None) -> Transport:
        cluster = self._cluster
        if cluster.backend == "slurm":
            if cluster.login is None:
                return LocalTransport()
            login = cluster.login
            return self._ssh(login.host, login.host, user=login.user, port=login.port)
        if cluster.local:
            return LocalTransport()
        entries = {entry.name: entry for entry in cluster.node_list}
        name = node if node is not None else next(iter(entries))
        if name not in entries:
            raise UsageError(f"cluster {cluster.name} has no node {name!r}")
        return self._ssh(name, name, address=entries[name].address)

    def _ssh(
        self, name: str, host: str, *, user: str | None = None, port: int | None = None, address: str | None = None
    ) -> Transport:
        from .fabric import FabricTransport

        ssh = self._cluster.ssh
        asked = SshTarget(
            host,
            user=user or ssh.user,
            port=port or ssh.port,
            key=ssh.key,
            config=ssh.config,
            jump=ssh.jump,
            address=address,
        )
        target, settings = resolve(asked)
        gateway = self._gateway(target, settings.jump) if settings.jump else None
        return FabricTransport(name, target, settings=settings, gateway=gateway)

    def _gateway(self, target: SshTarget, jump: str) -> FabricTransport:
        from .fabric import FabricTransport

        with self._gateway_lock:
            if jump not in self._gateways:
                previous: FabricTransport | None = None
                for hop in hops(target, jump):
                    hop_target, settings = resolve(hop)
                    if previous is None and settings.jump and settings.jump != jump:
                        previous = self._gateway(hop_target, settings.jump)
                    previous = FabricTransport(hop.host, hop_target, settings=settings, gateway=previous)
                assert previous is not None
                self._gateways[jump] = previous
            return self._gateways[jump]


def connect(cluster: Cluster, node: str | None = None) -> Transport:
    """A transport to a node of a direct cluster, or to the login side of a Slurm cluster."""
    return Connector(cluster).transport(node)
