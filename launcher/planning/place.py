"""Which nodes and slots a job takes on a cluster, as far as that is known before an allocation."""

from __future__ import annotations

from typing import Literal

from ..contract.launch import Node
from ..specs.models import Cluster, NodeEntry
from .reasons import Reason

SlotsWish = int | Literal["all"]


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
    if slots != "all" and slots < 1:
        reasons.append(Reason("slots", f"slots_per_node: {slots} leaves no rank on a node"))
    if reasons:
        return (Node("", 1 if slots == "all" else max(1, slots)),), reasons
    if cluster.backend == "slurm":
        # Nodes that the description does not name are as many as Slurm has, all alike.
        return _unnamed(entries or (NodeEntry(name="a-node", slots=cluster.slots or 1),) * nodes, nodes, slots)
    chosen = []
    for entry in entries[:nodes]:
        take = entry.slots if slots == "all" else slots
        if take > entry.slots:
            reasons.append(_too_many(entry, take))
            continue
        devices = entry.devices[:take] if entry.devices is not None else None
        chosen.append(Node(entry.name, take, entry.address or "", devices))
    return tuple(chosen) or (Node("", 1),), reasons


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
        return (Node("", slots),) * nodes, [_too_many(max(entries, key=lambda e: e.slots), slots)]
    if len(enough) < nodes:
        message = f"{nodes} nodes with {slots} slots were asked for, the cluster has {_named(tuple(enough))} of them"
        return (Node("", slots),) * nodes, [Reason("slots", message)]
    return (Node("", slots),) * nodes, []


def _too_many(entry: NodeEntry, take: int) -> Reason:
    return Reason("slots", f"slots_per_node: {take} ranks were asked for, node {entry.name} has {entry.slots}")


def _named(entries: tuple[NodeEntry, ...]) -> str:
    names = [entry.name for entry in entries]
    return f"{len(entries)} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})"
