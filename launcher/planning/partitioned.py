"""How a job's ``zero:`` comes to be on given nodes: what the engine reads, and what cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract import train
from ..contract.launch import Node
from ..contract.partition import Layout
from ..contract.topology import Topology
from ..specs.models import GptModel, Job, Zero
from . import shapes
from .reasons import Reason

_REPLICAS = "zero.replicas"


def zero_of(zero: Zero, nodes: int) -> train.Zero:
    """``zero`` as the engine reads it; ``replicas: nodes`` is one a node."""
    rule = zero.unit
    return train.Zero(
        stage=zero.stage,
        bucket_bytes=zero.bucket,
        gradient_dtype=zero.gradient_dtype,
        reduce_every=zero.reduce_every,
        unit=None if rule is None else train.Units(rule.class_ or (), rule.names or (), rule.size),
        reshard=zero.reshard,
        prefetch=zero.prefetch,
        replicas=nodes if zero.replicas == "nodes" else zero.replicas,
        reduce_with=zero.reduce_with,
        overlap_gather=zero.overlap_gather if zero.stage in (1, 2) else None,
        same_host=zero.same_host,
    )


def check_zero(job: Job, nodes: Sequence[Node], tensor: int) -> list[Reason]:
    """Replicas have to divide the data-parallel ranks and leave something to partition over; a rule of units has to
    choose something; the library's sum knows neither replicas nor stages above 0."""
    if job.zero is None:
        return []
    zero, slots = zero_of(job.zero, len(nodes)), [node.slots for node in nodes]
    found = []
    data_parallel = sum(slots) // tensor
    said = f"zero.replicas: {job.zero.replicas}"
    if job.zero.replicas == "nodes" and len(set(slots)) > 1:
        message = f"{said} needs as many slots on every node, not {', '.join(map(str, slots))}"
        found.append(Reason("zero", message, key=_REPLICAS))
    elif data_parallel % zero.replicas:
        even = [n for n in range(1, data_parallel // 2 + 1) if data_parallel % n == 0]
        message = f"{said} does not divide {data_parallel} data-parallel ranks"
        found.append(Reason("zero", message, f"zero.replicas: {' or '.join(map(str, even)) or 1}", _REPLICAS))
    elif zero.replicas > 1 and data_parallel == zero.replicas:
        message = f"{said} leaves one data-parallel rank to each: there is nothing to partition over"
        found.append(Reason("zero", message, "zero.stage: 0 copies everything to every rank", _REPLICAS))
    if zero.reduce_with == "native" and (zero.stage or zero.replicas > 1 or zero.reduce_every == "micro_step"):
        said = "zero.reduce_with: native goes with stage 0 alone, without replicas, and sums once a step"
        found.append(Reason("zero", said, key="zero.reduce_with"))
    if isinstance(job.model, GptModel) and zero.unit is not None:
        try:
            shapes.gpt_layout(job.model, ranks=1, bucket_bytes=1, tensor=tensor, unit=zero.unit)
        except ValueError as problem:
            found.append(Reason("zero", str(problem), key="zero.unit"))
    return found


def layout_of(job: Job, model: GptModel, topology: Topology, zero: train.Zero) -> Layout:
    """The reference GPT's partition over ``topology``."""
    return shapes.gpt_layout(
        model,
        ranks=topology.shard_ranks,
        bucket_bytes=zero.bucket_bytes,
        tensor=topology.tensor,
        precision=job.precision,
        groups=tuple(group.match for group in job.optimizer.groups) if job.optimizer else (),
        unit=zero.unit,
        replicas=topology.replicas,
    )


def rows(layout: Layout) -> list[list[int]]:
    """Numbers of the units that are gathered together, in the order of use; units that stay are in none. A block's
    split and replicated parameters are units of their own, used by the same modules."""
    found: dict[tuple[str, ...], list[int]] = {}
    for number, unit in enumerate(layout.units):
        if unit.modules:
            found.setdefault(unit.modules, []).append(number)
    return list(found.values())


def staying(layout: Layout, reshard: str) -> list[bool]:
    """Of each row: whether it stays gathered from forward to backward."""
    count = len(rows(layout))
    kept = {"keep": count, "keep_last": 1, "after_forward": 0}[reshard]
    return [at >= count - kept for at in range(count)]


def kept_elements(layout: Layout, reshard: str) -> int:
    """Elements that stay gathered from forward to backward: gathered once instead of twice."""
    given = rows(layout)
    stays = staying(layout, reshard)
    released = {number for row, stay in zip(given, stays, strict=True) if not stay for number in row}
    return sum(unit.padded for number, unit in enumerate(layout.units) if number not in released)
