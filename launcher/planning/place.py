"""Which nodes and slots a job takes on a cluster, as far as that is known before an allocation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..contract.launch import Node
from ..specs.models import Cluster, Job, NodeEntry
from .reasons import Reason

SlotsWish = int | Literal["all"]

_MOST_NODES = 2**16
_MOST_RANKS = 2**20


def choose_nodes(cluster: Cluster, nodes: int, slots: SlotsWish) -> tuple[tuple[Node, ...], list[Reason]]:
    """Direct: the first ``nodes`` of the list. Slurm: as many without a name, because Slurm chooses them.

    With reasons the nodes are stand-ins, good for finding further reasons only.
    """
    entries = cluster.node_list
    reasons = []
    if nodes < 1:
        reasons.append(Reason("nodes", f"{nodes} nodes are none: a job needs at least one"))
    elif entries and nodes > len(entries):
        reasons.append(Reason("nodes", f"{nodes} nodes were asked for, the cluster has {_named(entries)}"))
    elif nodes > _MOST_NODES:
        reasons.append(Reason("nodes", f"{nodes} nodes are more than any cluster has (at most {_MOST_NODES})"))
    if slots != "all" and slots < 1:
        reasons.append(Reason("slots", f"slots_per_node: {slots} leaves no rank on a node"))
    most = max((entry.slots for entry in entries), default=cluster.slots or 1) if slots == "all" else slots
    if not reasons and nodes * most > _MOST_RANKS:
        # Said before anything is made that is as long as there are ranks.
        message = f"{nodes} x {most} ranks are more than any cluster has room for (at most {_MOST_RANKS})"
        return (Node("", 1),), [Reason("slots", message)]
    if reasons:
        return (Node("", 1 if slots == "all" else max(1, slots)),), reasons
    if cluster.backend == "slurm":
        if entries:
            return _unnamed(entries, nodes, slots)
        # Nodes that the description does not name are as many as Slurm has, all alike.
        has = cluster.slots or 1
        if slots != "all" and slots > has:
            message = f"slots_per_node: {slots} ranks were asked for, a node has {has}"
            return (Node("", slots),), [Reason("slots", message)]
        return (Node("", has if slots == "all" else slots),) * nodes, []
    first = entries[:nodes]
    small = [entry for entry in first if slots != "all" and entry.slots < slots]
    if small and slots != "all":
        return (Node("", slots),), [_too_many(small, slots)]
    chosen = []
    for entry in first:
        take = entry.slots if slots == "all" else slots
        devices = entry.devices[:take] if entry.devices is not None else None
        among = entry.devices or tuple(range(entry.slots)) if cluster.leases else None
        chosen.append(Node(entry.name, take, entry.address or "", devices, among))
    return tuple(chosen), []


def _unnamed(entries: tuple[NodeEntry, ...], nodes: int, slots: SlotsWish) -> tuple[tuple[Node, ...], list[Reason]]:
    """Slurm may give any of the nodes: the same number of slots is taken on each."""
    sizes = sorted({entry.slots for entry in entries})
    if slots == "all":
        if len(sizes) == 1:
            return (Node("", sizes[0]),) * nodes, []
        has = ", ".join(map(str, sizes))
        message = f"slots_per_node: all is not one number, the cluster's nodes have {has} slots and Slurm chooses"
        return (Node("", sizes[0]),) * nodes, [Reason("slots", message, "say slots_per_node as a number")]
    enough = [entry for entry in entries if entry.slots >= slots]
    if not enough:
        return (Node("", slots),) * nodes, [_too_many(entries[:1], slots)]
    if len(enough) < nodes:
        message = f"{nodes} nodes with {slots} slots were asked for, the cluster has {_named(tuple(enough))} of them"
        return (Node("", slots),) * nodes, [Reason("slots", message)]
    return (Node("", slots),) * nodes, []


def pool_remarks(job: Job, cluster: Cluster) -> tuple[str, ...]:
    """What a person should know of the pool before walking away."""
    pool = cluster.pools.get(cluster.pool or "") if cluster.pools else None
    if pool is None or not pool.preemptible:
        return ()
    told = f"pool {cluster.pool} is preemptible: Slurm may take its nodes away, and starts the job again by itself"
    if job.program is not None:
        return (f"{told}; the program begins again, or goes on from what it kept ($ZERUN_ATTEMPT is above 1)",)
    if job.checkpoint.every_steps is None and job.checkpoint.every_s is None:
        return (f"{told}, from the beginning: without checkpoint.every nothing is saved on the way",)
    return (f"{told}, from the newest whole checkpoint",)


def _too_many(small: Sequence[NodeEntry], slots: int) -> Reason:
    has = ", ".join(f"node {entry.name} has {entry.slots}" for entry in small[:4])
    more = ", …" if len(small) > 4 else ""
    return Reason("slots", f"slots_per_node: {slots} ranks were asked for, {has}{more}")


def _named(entries: tuple[NodeEntry, ...]) -> str:
    names = [entry.name for entry in entries]
    return f"{len(entries)} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})"
