"""Which ranks this one works with: its tensor group, its data-parallel group, and all of them.

With tensor degree T the ranks r·T … r·T + T − 1 hold the pieces of the same layers (``contract.topology``);
ZeRO partitions each piece over the ranks that hold the same one: the data-parallel group, or the part of it that
forms a replica. Every rank makes every group, in one order.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..contract.errors import UsageError
from ..contract.topology import Topology
from .agreement import agree_on_settings
from .comm import Alone, Comm, connect
from .comm.choose import READ, SEND
from .config import EngineConfig


@dataclass(frozen=True)
class Ranks:
    """``world`` agrees on what all must agree on; ``data`` trains on other samples; ``tensor`` holds pieces of the same
    layers. ZeRO partitions over ``shard``: ``data``, or one replica's part of it; ``replica`` then holds the same
    shard, a rank of each replica."""

    world: Comm
    data: Comm
    tensor: Comm
    own_shard: Comm | None = None  # left out: data
    replica: Comm = field(default_factory=Alone)

    @property
    def shard(self) -> Comm:
        return self.own_shard or self.data

    @property
    def degree(self) -> int:
        return self.tensor.size

    def groups(self) -> list[Comm]:
        """Each once, whatever it is used for."""
        every = (self.world, self.data, self.tensor, self.shard, self.replica)
        return list({id(comm): comm for comm in every}.values())

    @classmethod
    def connect(
        cls, tensor: int = 1, *, replicas: int = 1, timeout_s: float | None = None, same_host: str = READ
    ) -> Ranks:
        """The groups of the default process group (of one rank alone where there is none). ``same_host``: see
        :func:`comm.connect`.

        Raises :class:`UsageError` where ``tensor`` does not divide the world size, or ``replicas`` what is left of it;
        and where there is no group though the environment says that this process is one of several ranks.
        """
        if not (dist.is_available() and dist.is_initialized()):
            told = os.environ.get("WORLD_SIZE", "")
            if told.isdecimal() and int(told) > 1:
                raise UsageError(
                    f"WORLD_SIZE is {told}, but there is no process group: every rank would train by itself",
                    hint="call torch.distributed.init_process_group first, or unset WORLD_SIZE to train alone",
                )
            for name, wanted in (("parallel.tensor", tensor), ("zero.replicas", replicas)):
                if wanted != 1:
                    raise UsageError(f"{name}: {wanted} needs as many ranks; there is one")
            alone = Alone()
            return cls(alone, alone, Alone())
        agree_on_groups({"parallel.tensor": tensor, "zero.replicas": replicas, "zero.same_host": same_host})
        partitioned = tensor == replicas == 1  # over all ranks, which otherwise agree on small things alone
        world = connect(same_host=same_host if partitioned else SEND)
        topology = checked_topology((world.size,), tensor, replicas)
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)

        def group(of: Callable[[int], range], *, passing: bool = False) -> Comm:
            """Every rank makes every such group; use_local_synchronization would spare the others the call, and cost
            a deadlock where orders differ."""
            made = {}
            for rank in range(world.size):
                members = of(rank)
                if members[0] == rank:
                    made[rank] = dist.new_group(list(members), timeout=timeout)
            return connect(made[of(world.rank)[0]], passing=passing, same_host=same_host)

        own_tensor = group(topology.tensor_group, passing=True) if tensor > 1 else Alone()
        data = group(topology.data_group) if tensor > 1 else world
        if replicas == 1:
            return cls(world, data, own_tensor)
        return cls(world, data, own_tensor, group(topology.shard_group), group(topology.replica_group))

    @classmethod
    def of_config(cls, config: EngineConfig) -> Ranks:
        """Without tensor parallelism, which needs a model built for it."""
        return cls.connect(replicas=config.zero.replicas, same_host=config.zero.same_host)

    @classmethod
    def of_data(cls, comm: Comm) -> Ranks:
        """One way to communicate for everything: no tensor parallelism."""
        return cls(comm, comm, Alone())

    def check(self, tensor: int | None, replicas: int) -> None:
        """Raises :class:`UsageError` where these are other groups than are wanted; ``tensor`` None: any degree."""
        if tensor not in (None, self.degree):
            raise UsageError(
                f"parallel.tensor is {tensor}, but the ranks were connected at degree {self.degree}",
                hint="Ranks.connect(tensor) makes the groups; build the model with ranks.tensor, give ranks here",
            )
        if replicas != self.replica.size:
            raise UsageError(
                f"zero.replicas is {replicas}, but the ranks were connected for {self.replica.size}",
                hint="Ranks.connect(tensor, replicas=…) makes the groups",
            )


def agree_on_groups(settings: Mapping[str, Any]) -> None:
    """Ranks that are told to make other groups than the others would never meet them. On gloo alone, where a message
    needs no device."""
    if dist.get_backend() == "gloo":
        agree_on_settings(connect(same_host=SEND), settings, torch.device("cpu"))


def checked_topology(slots: Sequence[int], tensor: int, replicas: int) -> Topology:
    """Raises :class:`UsageError` naming the key that does not go with the number of ranks."""
    try:
        Topology(tuple(slots), tensor)
    except ValueError as error:
        raise UsageError(f"parallel.tensor: {error}") from error
    try:
        topology = Topology(tuple(slots), tensor, replicas)
    except ValueError as error:
        raise UsageError(f"zero.replicas: {error}") from error
    if replicas > 1 and topology.shard_ranks == 1:
        raise UsageError(
            f"zero.replicas: {replicas} leaves one data-parallel rank to each: there is nothing to partition over",
            hint="zero.stage: 0 copies everything to every rank",
        )
    return topology
