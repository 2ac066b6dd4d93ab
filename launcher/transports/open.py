"""From a cluster's description to a transport."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..contract.errors import UsageError
from .local import LocalTransport
from .protocol import Transport
from .target import SshSettings, SshTarget, hops, resolve

if TYPE_CHECKING:
    from ..specs.models import Cluster
    from .fabric import FabricTransport
    from .master import Master


class Connector:
    """Opens one cluster's transports; those behind one jump host share one login there."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()  # guards the maps, and is never held while a process or a machine is asked
        self._making: dict[str | None, threading.Lock] = {}
        self._opened: dict[str | None, Transport] = {}
        self._gateway_lock = threading.RLock()  # a jump host is made once, whoever comes first
        self._gateways: dict[str, FabricTransport] = {}
        self._gate_masters: dict[str, Master] = {}

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
        entry = entries[name]
        return self._ssh(name, entry.ssh or name, address=None if entry.ssh else entry.address)

    def _ssh(
        self, name: str, host: str, *, user: str | None = None, port: int | None = None, address: str | None = None
    ) -> Transport:
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
        if self._by_openssh:
            from .openssh import OpenSshTransport

            return OpenSshTransport(name, self._master(name, target, settings))
        from .fabric import FabricTransport

        gateway = self._gateway(target, settings.jump) if settings.jump else None
        return FabricTransport(name, target, settings=settings, gateway=gateway, login_command=self._login_command)

    @property
    def _by_openssh(self) -> bool:
        said = self._cluster.login.via if self._cluster.login is not None else self._cluster.ssh.via
        return said == "openssh"

    @property
    def _login_command(self) -> str:
        return f"zerun login {self._cluster.name}"

    def _master(self, name: str, target: SshTarget, settings: SshSettings) -> Master:
        """The login to a machine; the jump hosts before it have one each, for all that is behind them."""
        from .master import Master

        gate: Master | None = None
        with self._gateway_lock:
            for hop in hops(target, settings.jump) if settings.jump else ():
                key = f"{hop.user}@{hop.host}:{hop.port}"
                if key not in self._gate_masters:
                    hop_target, said = resolve(hop)
                    if gate is None and said.jump and said.jump != settings.jump:
                        made = self._master(hop.host, hop_target, said)  # it has a jump host of its own
                    else:
                        made = Master(
                            hop.host, hop_target, settings=said, gateway=gate, login_command=self._login_command
                        )
                    self._gate_masters[key] = made
                gate = self._gate_masters[key]
        return Master(name, target, settings=settings, gateway=gate, login_command=self._login_command)

    def masters(self) -> list[Master]:
        """The logins that ``zerun login`` opens, one a machine, jump hosts first: none is opened here.

        Raises UsageError where nothing is logged into by the system's ssh.
        """
        from .openssh import OpenSshTransport

        names = [None] if self._cluster.backend == "slurm" else [entry.name for entry in self._cluster.node_list]
        found = [self.transport(name) for name in names]
        masters = [transport.master for transport in found if isinstance(transport, OpenSshTransport)]
        if not masters:
            raise UsageError(
                f"cluster {self._cluster.name} keeps no login open",
                hint="write via: openssh under login: (Slurm) or ssh: (direct) in its description",
            )
        with self._gateway_lock:
            return [*self._gate_masters.values(), *masters]

    def _gateway(self, target: SshTarget, jump: str) -> FabricTransport:
        from .fabric import FabricTransport

        with self._gateway_lock:
            if jump not in self._gateways:
                previous: FabricTransport | None = None
                for hop in hops(target, jump):
                    hop_target, settings = resolve(hop)
                    if previous is None and settings.jump and settings.jump != jump:
                        previous = self._gateway(hop_target, settings.jump)
                    previous = FabricTransport(
                        hop.host, hop_target, settings=settings, gateway=previous, login_command=self._login_command
                    )
                assert previous is not None
                self._gateways[jump] = previous
            return self._gateways[jump]


def connect(cluster: Cluster, node: str | None = None) -> Transport:
    """A transport to a node of a direct cluster, or to the login side of a Slurm cluster."""
    return Connector(cluster).transport(node)
