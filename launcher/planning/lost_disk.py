"""What the loss of one node's disk would cost, where nothing is shared."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.launch import Node
from ..specs.models import Cluster, Job


def copies_of(job: Job, cluster: Cluster, nodes: Sequence[Node]) -> int:
    """How many copies of every shard other nodes keep: never more than there are other nodes."""
    if cluster.paths.shared or cluster.local or job.model is None:
        return 0
    return max(0, min(job.checkpoint.replicas, len(nodes) - 1))


def disk_remarks(job: Job, cluster: Cluster, nodes: Sequence[Node]) -> tuple[str, ...]:
    """One sentence about checkpoints whose shards lie on the nodes' own disks."""
    copies = job.checkpoint.replicas
    if cluster.paths.shared or cluster.local or job.model is None or len(nodes) < 2:
        if not copies:
            return ()
        why = "runs lie on a shared filesystem" if cluster.paths.shared else "there is one node"
        return (f"checkpoint.replicas: {copies} makes no copies here: {why}",)
    if not copies:
        return ("one lost disk loses the checkpoint: each node keeps its own ranks' shards; checkpoint.replicas: 1 "
                "copies them to the next node",)  # fmt: skip
    kept = copies_of(job, cluster, nodes)
    if kept == 1:
        return ("one lost disk loses no checkpoint: each node keeps a copy of the shards of the node before it",)
    return (f"{kept} lost disks lose no checkpoint: each node keeps a copy of the shards of {kept} nodes before it",)
