"""What a rank sends in a step, by collective and by link, and what of it a link cannot do faster.

Volume in whole messages, Ψ the padded parameters of one tensor rank, `a` micro-steps a step, b·s·h one micro-batch's
stream, L blocks of which R are recomputed::

    stage 0      reduce-scatter Ψ, all-gather Ψ (of gradients)          data-parallel ranks
                 or the library's all-reduce of Ψ, counted twice
    stage 1      reduce-scatter Ψ, all-gather Ψ (of parameters)
    stage 2      reduce-scatter a·Ψ, all-gather Ψ
    stage 3      reduce-scatter a·Ψ, all-gather a·(2Ψ − kept)           kept: embedding, last norm, and by ``reshard``
                 ``reduce_every`` decides whether the sums are a·Ψ or Ψ, at any stage
    replicas > 1 the above inside each, and all-reduce Ψ/S, counted twice    S ranks hold a replica
    tensor > 1   all-reduce a·(4·L + 2·R + 2)·b·s·h, each counted twice   tensor ranks
    partitioned  all-gather a·R·b·s·h                                   tensor ranks

Of a message of M bytes over N ranks, m of them on a node, a rank sends M·(N−1)/N in all. On GPUs the library's
collectives are taken at their best: M·(m−1)/m a rank inside, M·(N−m)/N out of a node, which no algorithm undercuts.
On CPUs the engine sends each part to each rank: M·(m−1)/N inside, m·M·(N−m)/N out of a node. An all-reduce
passes twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

from ..contract.topology import Topology
from ..specs.models import Cluster
from .partitioned import kept_elements
from .plan import Bounds, Traffic
from .step import Step

Collective = Literal["all-gather", "reduce-scatter", "all-reduce"]
Group = Literal["data", "replica", "tensor"]
Link = Literal["compute", "inside", "between"]


@dataclass(frozen=True)
class Message:
    """All messages of one kind in one step of one rank, together: ``elements`` of ``item`` bytes. ``native``: the
    library's collective also on CPUs."""

    what: str
    collective: Collective
    group: Group
    elements: int
    item: int
    native: bool = False

    @property
    def passes(self) -> int:
        return 2 if self.collective == "all-reduce" else 1


def step_traffic(step: Step, topology: Topology, accumulation: int) -> tuple[Traffic, ...]:
    """What each rank sends in one optimizer step; nothing on one rank."""
    peer = step.device_kind == "cpu"
    groups: tuple[Group, ...] = ("data", "replica", "tensor")
    shares = {group: _shares(topology, group) for group in groups}
    found = []
    for message in [*_data_messages(step, accumulation), *_tensor_messages(step, accumulation)]:
        size, members = shares[message.group]
        inside, out = _by_link(message, size, members, peer=peer and not message.native)
        found.append(
            Traffic(
                message.what,
                message.collective,
                message.group,
                message.passes * message.elements,
                message.passes * message.elements * message.item * (size - 1) // size,
                inside,
                out,
            )
        )
    return tuple(found)


def _data_messages(step: Step, accumulation: int) -> list[Message]:
    if not step.partitioned:
        return []
    stage, zero, item, layout = step.state.zero_stage, step.zero, step.shapes.item, step.layout
    trainable = sum(unit.padded for unit in layout.units if unit.trainable)
    times = accumulation if step.sums_every_micro_step else 1
    if stage == 0 and zero.reduce_with == "native":
        return [Message("gradients", "all-reduce", "data", trainable, step.gradient_item, native=True)]
    found = [Message("gradients", "reduce-scatter", "data", times * trainable, step.message_item)]
    if layout.replicas > 1:
        share = trainable // layout.ranks
        found.append(Message("gradients across replicas", "all-reduce", "replica", share, step.gradient_item))
    if stage == 0:
        found.append(Message("gradients", "all-gather", "data", trainable, step.gradient_item))
    elif stage < 3:
        found.append(Message("updated parameters", "all-gather", "data", trainable, item))
    else:
        everything = sum(unit.padded for unit in layout.units)
        gathered = accumulation * (2 * everything - kept_elements(layout, zero.reshard))
        found.append(Message("parameters before use", "all-gather", "data", gathered, item))
    return found


def _tensor_messages(step: Step, accumulation: int) -> list[Message]:
    """Two all-reduces a block forward, two backward; one each for the embedding (forward) and the head (backward).
    Where a block is recomputed two more, but the last is only made again if dropout behind it saves something:
    recomputation stops at the last tensor that backward needs. The loss's few bytes a token are left out."""
    shapes = step.shapes
    if shapes.tensor == 1:
        return []
    stream = shapes.tokens * shapes.hidden
    again = 2 if shapes.dropout else 1
    times = accumulation * (4 * shapes.layers + again * step.recomputed + 2)
    found = [Message("activations and their gradients", "all-reduce", "tensor", times * stream, shapes.item)]
    if step.recomputed and step.stored != "whole":  # on the host too each rank of the group keeps its part
        again = accumulation * step.recomputed * stream
        found.append(Message("stored activations", "all-gather", "tensor", again, shapes.item))
    return found


# --- links ----------------------------------------------------------------------------------------

Members = tuple[tuple[int, ...], ...]
"""Of each node: how many ranks each group has there, for the groups that have any."""


def _shares(topology: Topology, group: Group) -> tuple[int, Members]:
    """The size of a group, and what of each group stands on each node. Nodes that are alike are told once."""
    size = {"data": topology.shard_ranks, "replica": topology.replicas, "tensor": topology.tensor}[group]
    of = {
        "data": lambda rank: (topology.replica(rank), topology.tensor_rank(rank)),
        "replica": lambda rank: (topology.shard_rank(rank), topology.tensor_rank(rank)),
        "tensor": topology.data_rank,
    }[group]
    found: dict[tuple[int, ...], None] = {}
    for node in range(len(topology.slots)):
        found[tuple(sorted(Counter(of(rank) for rank in topology.ranks_on(node)).values()))] = None
    return size, tuple(found)


def _by_link(message: Message, size: int, members: Members, *, peer: bool) -> tuple[int, int]:
    """Bytes that the busiest rank sends inside its node, and that leave the busiest node."""
    whole = message.passes * message.elements * message.item

    def inside(here: int) -> Fraction:
        return Fraction(whole * (here - 1), size if peer else here)

    def out(here: int) -> Fraction:
        return Fraction(whole * (size - here) * (here if peer else 1), size)

    busiest = max((inside(here) for node in members for here in node), default=Fraction(0))
    leaving = max((sum((out(here) for here in node), Fraction(0)) for node in members), default=Fraction(0))
    return ceil(busiest), ceil(leaving)


# --- bounds ---------------------------------------------------------------------------------------


def bounds(traffic: Sequence[Traffic], cluster: Cluster, *, flops: int, world_size: int, precision: str) -> Bounds:
    """What a step cannot be shorter than, by links and by the device's peak; each of them alone."""
    missing = []
    peak = cluster.device.peak_flops.get(precision)
    if peak is None:
        missing.append(f"device.peak_flops.{precision}")
    inside_bytes, node_bytes = sum(t.inside_bytes for t in traffic), sum(t.node_bytes for t in traffic)
    inside, between = cluster.network.inside, cluster.network.between
    if inside is None and inside_bytes:
        missing.append("network.inside")
    if between is None and node_bytes:
        missing.append("network.between")
    known: dict[Link, float | None] = {
        "compute": None if peak is None else flops / world_size / peak,
        "inside": _seconds(inside_bytes, inside),
        "between": _seconds(node_bytes, between),
    }
    bounded_by, step_s = _largest(known)
    return Bounds(known["compute"], known["inside"], known["between"], step_s, bounded_by, flops, tuple(missing))


def _largest(known: dict[Link, float | None]) -> tuple[Link | None, float | None]:
    said = {name: value for name, value in known.items() if value}
    if not said:
        return None, None
    name = max(said, key=lambda n: said[n])
    return name, said[name]


def _seconds(count: int, rate: int | None) -> float | None:
    if not count:
        return 0.0
    return None if rate is None else count / rate
