"""All rank arithmetic: which node a rank stands on, and which group it belongs to.

Ranks are numbered node by node, in the order in which nodes were named. With tensor parallelism of
degree T the T ranks of one tensor group are neighbours (``rank // T`` is the data rank), so that a
group stays inside a node whenever the node's slots are a multiple of T. With R replicas the data-parallel
ranks fall into R groups of neighbours, each of which holds everything once, partitioned inside.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Tuple


@dataclass(frozen=True)
class Topology:
    """``slots[i]`` ranks stand on node ``i``; ``tensor`` divides the world size, ``replicas`` what is left of it."""

    slots: Tuple[int, ...]
    tensor: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if not self.slots or any(n < 1 for n in self.slots):
            raise ValueError(f"every node needs at least one slot, not {self.slots}")
        if self.tensor < 1 or sum(self.slots) % self.tensor:
            raise ValueError(f"{sum(self.slots)} ranks cannot form tensor groups of {self.tensor}")
        data_parallel = sum(self.slots) // self.tensor
        if self.replicas < 1 or data_parallel % self.replicas:
            raise ValueError(f"{data_parallel} data-parallel ranks cannot form {self.replicas} equal replicas")
        # The first rank of each node, and the world size at the end.
        object.__setattr__(self, "_first", (0, *accumulate(self.slots)))

    @property
    def _starts(self) -> Tuple[int, ...]:
        starts: Tuple[int, ...] = self.__dict__["_first"]
        return starts

    @property
    def world_size(self) -> int:
        return self._starts[-1]

    @property
    def data_parallel(self) -> int:
        """Ranks that train on samples of their own: the world size divided by the tensor degree."""
        return self.world_size // self.tensor

    @property
    def shard_ranks(self) -> int:
        """Ranks over which ZeRO partitions: all data-parallel ones, or those of one replica."""
        return self.data_parallel // self.replicas

    def node_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size}")
        return bisect_right(self._starts, rank) - 1

    def local_rank(self, rank: int) -> int:
        return rank - self._starts[self.node_rank(rank)]

    def ranks_on(self, node_rank: int) -> range:
        return range(self._starts[node_rank], self._starts[node_rank + 1])

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor

    def tensor_group(self, rank: int) -> range:
        """The ranks that hold the pieces of the same layers."""
        first = rank - self.tensor_rank(rank)
        return range(first, first + self.tensor)

    def data_group(self, rank: int) -> range:
        """The ranks that hold shards of the same pieces."""
        return range(self.tensor_rank(rank), self.world_size, self.tensor)

    def on_one_node(self, members: range) -> bool:
        return self.node_rank(members[0]) == self.node_rank(members[-1])

    def replica(self, rank: int) -> int:
        """Which replica a rank belongs to."""
        return self.data_rank(rank) // self.shard_ranks

    def shard_rank(self, rank: int) -> int:
        """Which shard a rank holds, in its replica."""
        return self.data_rank(rank) % self.shard_ranks

    def shard_group(self, rank: int) -> range:
        """The ranks over which this one's pieces are partitioned: its data group inside its replica."""
        first = self.replica(rank) * self.shard_ranks * self.tensor + self.tensor_rank(rank)
        return range(first, first + self.shard_ranks * self.tensor, self.tensor)

    def replica_group(self, rank: int) -> range:
        """The ranks that hold the same shard of the same pieces, one in each replica."""
        stride = self.shard_ranks * self.tensor
        return range(rank % stride, self.world_size, stride)
