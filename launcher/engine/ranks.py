"""Which ranks this one works with: its tensor group, its data-parallel group, and all of them.

With tensor degree T the ranks r·T … r·T + T − 1 hold the pieces of the same layers (``contract.topology``);
ZeRO partitions each piece over the ranks that hold the same one. Every rank makes every group, in one order.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist

from ..contract.errors import UsageError
from ..contract.topology import Topology
from .comm import Alone, Comm, connect


@dataclass(frozen=True)
class Ranks:
    """``world`` agrees on what all must agree on; ``data`` is ZeRO's; ``tensor`` holds pieces of the same layers."""

    world: Comm
    data: Comm
    tensor: Comm

    @property
    def degree(self) -> int:
        return self.tensor.size

    @classmethod
    def connect(cls, tensor: int = 1, *, timeout_s: float | None = None) -> Ranks:
        """The groups of the default process group (of one rank alone where there is none).

        Raises :class:`UsageError` where ``tensor`` does not divide the world size.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if tensor != 1:
                raise UsageError(f"parallel.tensor: {tensor} needs as many ranks; there is one")
            alone = Alone()
            return cls(alone, alone, Alone())
        world = connect()
        if tensor == 1:
            return cls(world, world, Alone())
        try:
            topology = Topology((world.size,), tensor)
        except ValueError as error:
            raise UsageError(f"parallel.tensor: {error}") from error
        timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
        firsts = range(0, world.size, tensor)
        # use_local_synchronization would spare the others the call, and cost a deadlock where orders differ.
        tensors = {first: dist.new_group(list(topology.tensor_group(first)), timeout=timeout) for first in firsts}
        datas = [dist.new_group(list(topology.data_group(t)), timeout=timeout) for t in range(tensor)]
        mine = topology.tensor_group(world.rank)[0]
        return cls(world, connect(datas[topology.tensor_rank(world.rank)]), connect(tensors[mine]))

    @classmethod
    def of_data(cls, comm: Comm) -> Ranks:
        """One way to communicate for everything: no tensor parallelism."""
        return cls(comm, comm, Alone())
