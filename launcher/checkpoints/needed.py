"""What each node of a new attempt reads of a checkpoint, and what of that it lacks: whole shards, or ranges of them.

A node is given ranges of a shard when that spares something, when it is certain which elements its ranks will read, and
when another node of the attempt has the whole shard or gets it: what an attempt went on from stays whole on the nodes
that go on, whoever leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..contract.manifest import Manifest, ShardFile
from ..contract.partition import ITEM_BYTES, Layout, build
from ..contract.ranges import NoRanges, Range, count, of_tensors, without
from ..contract.slices import reshard_tensor
from ..contract.topology import Topology
from ..contract.train import AdamW, Batch, Checkpointing, Data, TrainConfig
from .moving import size

SPARES_BYTES = 2**20  # ranges that are hardly less than the shard are not worth a shard that is not whole

Runs = Mapping[str, Sequence[Range]]
"""Unit → elements of a shard of it, of every tensor that the shard has of the unit; ``buffer``: all of them."""


@dataclass(frozen=True)
class Wanted:
    """A shard that a node lacks; with ``ranges`` those bytes of it and no more."""

    shard: ShardFile
    ranges: tuple[Range, ...] = ()

    @property
    def bytes(self) -> int:
        return count(self.ranges) if self.ranges else self.shard.bytes


@dataclass(frozen=True)
class Held:
    """What a node has: whole shards by file name, ranges by rank (of the very shards that the manifest means).
    ``unfit``: of these ranks' shards it had ranges that were no use."""

    files: Mapping[str, int]
    ranges: Mapping[int, tuple[Range, ...]]
    unfit: frozenset[int] = frozenset()


def relayout(
    old: Layout, ranks: int, bucket_bytes: int | None = None, *, tensor: int | None = None, replicas: int = 1
) -> Layout:
    """The same units over another number of data-parallel ranks (bucket sizes and tensor degree as they were
    unless told; at another degree the engine's own units differ, only the ranks are to be relied on). ``ranks`` are
    those of one of ``replicas``."""
    if bucket_bytes is None:
        bucket_bytes = max((u.bucket * ITEM_BYTES[u.dtype] for u in old.units), default=1)
    return build(
        [(u.name, u.parameters) for u in old.units],
        ranks=ranks,
        bucket_bytes=bucket_bytes,
        tensor=tensor or old.tensor,
        replicas=replicas,
        rule=old.rule,
        modules={u.name: u.modules for u in old.units},
    )


def needed_shards(old: Layout, new: Layout, ranks: Sequence[int], *, stage: int = 3, buffers: bool = False) -> set[int]:
    """The ranks whose shards (of ``old``) the ``ranks`` (of ``new``) read. Without partitioned optimizer
    state (stage 0), or at another tensor degree, every rank is given all; buffers lie in rank 0's."""
    if stage == 0 or old.tensor != new.tensor:
        return set(range(old.ranks * old.tensor))
    needed = {0} if buffers else set()
    for rank in ranks:
        data_rank, tensor_rank = divmod(rank, new.tensor)
        data_rank %= new.ranks  # of its replica: every one of them reads the same
        if old == new:  # what tensor ranks hold alike, the first of them has saved
            needed |= {data_rank * old.tensor + tensor_rank, data_rank * old.tensor}
        else:
            needed |= {copy.source_rank for copy in reshard_tensor(old, new, data_rank, tensor_rank)}
    return needed


def needed_runs(old: Layout, new: Layout, ranks: Sequence[int], *, buffers: bool = False) -> dict[int, dict[str, Any]]:
    """Shard → what of it the ``ranks`` of ``new`` read (:data:`Runs`), at the same tensor degree and above stage 0."""
    needed: dict[int, dict[str, list[Range]]] = {0: {"buffer": []}} if buffers else {}
    for rank in ranks:
        data_rank, tensor_rank = divmod(rank, new.tensor)
        for copy in reshard_tensor(old, new, data_rank % new.ranks, tensor_rank):
            unit = old.units[copy.source_unit].name
            run = (copy.source_offset, copy.source_offset + copy.numel)
            needed.setdefault(copy.source_rank, {}).setdefault(unit, []).append(run)
    return needed


def needs(
    manifest: Manifest, topology: Topology, train: TrainConfig, saved: TrainConfig | None
) -> list[dict[int, Any]]:
    """Of each node: the shards that its ranks read, each with its :data:`Runs`, or None where it is not certain which.

    ``saved``: what the attempt that wrote the checkpoint trained. Only where no more than ranks, buckets and what does
    not touch the partition has changed does the launcher know the engine's partition to the element.
    """
    old, zero = manifest.layout, train.zero
    new = relayout(old, topology.shard_ranks, zero.bucket_bytes, tensor=train.tensor, replicas=zero.replicas)
    everything = zero.stage == 0 or zero.unit != old.rule  # another rule's units are not known here
    certain = not everything and old.tensor == new.tensor and saved is not None and _same_units(old, train, saved)
    found: list[dict[int, Any]] = []
    for index in range(len(topology.slots)):
        ranks, buffers = topology.ranks_on(index), bool(manifest.buffers)
        if certain and old != new:
            found.append(dict(needed_runs(old, new, ranks, buffers=buffers)))
        else:
            shards = needed_shards(old, new, ranks, stage=0 if everything else zero.stage, buffers=buffers)
            found.append(dict.fromkeys(shards))
    return found


def _same_units(old: Layout, train: TrainConfig, saved: TrainConfig) -> bool:
    """And the layout that was saved is the one that is computed here."""
    if _partitioned_by(train) != _partitioned_by(saved):
        return False
    zero = saved.zero
    return relayout(old, old.ranks, zero.bucket_bytes, tensor=saved.tensor, replicas=zero.replicas) == old


def _partitioned_by(train: TrainConfig) -> TrainConfig:
    """With what no partition depends on, or what it is computed from here, left out; a key that is newer counts."""
    zero = replace(
        train.zero, stage=3, bucket_bytes=1, gradient_dtype="", reduce_every=None, reshard="", prefetch=0, replicas=1,
        reduce_with="", overlap_gather=None, same_host="",
    )  # fmt: skip
    return replace(
        train, zero=zero, optimizer=AdamW(0.0), batch=Batch(1, 1), steps=0, data=Data(), seed=0,
        evaluate=None, checkpoint=Checkpointing(), recompute="", activations="", nonfinite="", weights=None,
    )  # fmt: skip


def lacks(
    manifest: Manifest, needed: Sequence[Mapping[int, Any]], held: Sequence[Held], headers: Mapping[int, Any]
) -> list[tuple[Wanted, ...]]:
    """Of each node what has to come. ``headers``: shard → ``{"header", "base"}`` as a node that has it told."""
    shards = {shard.rank: shard for shard in manifest.shards}
    wanted: list[dict[int, tuple[Range, ...]]] = []
    for reads, have in zip(needed, held, strict=True):
        coming: dict[int, tuple[Range, ...]] = {}
        for rank in sorted(set(reads) & set(shards)):
            if have.files.get(shards[rank].file) != shards[rank].bytes:
                certain = reads[rank] if rank not in have.unfit else None
                coming[rank] = _ranges(shards[rank], certain, headers.get(rank))
        wanted.append(coming)
    for rank, shard in shards.items():
        whole = any(have.files.get(shard.file) == shard.bytes for have in held)
        takers = [node for node in wanted if rank in node]
        if takers and not whole and all(node[rank] for node in takers):
            max(takers, key=lambda node: count(node[rank]))[rank] = ()
    found = []
    for node, have in zip(wanted, held, strict=True):
        left = [(shards[rank], ranges, without(ranges, have.ranges.get(rank, ()))) for rank, ranges in node.items()]
        found.append(tuple(Wanted(shard, lacking) for shard, ranges, lacking in left if lacking or not ranges))
    return found


def _ranges(shard: ShardFile, runs: Runs | None, header: Any) -> tuple[Range, ...]:
    """The bytes of the shard that hold ``runs``; empty when it is to come whole."""
    if runs is None or not isinstance(header, dict):
        return ()
    try:
        ranges = of_tensors(header["header"], int(header["base"]), runs)
    except (NoRanges, LookupError, TypeError, ValueError):
        return ()  # a damaged header: whoever moves the shard finds out
    spared = shard.bytes - count(ranges)
    return ranges if spared >= SPARES_BYTES and ranges[-1][1] <= shard.bytes else ()


def told(wanted: Sequence[Wanted], form: str = "{} ({})") -> str:
    """``1 shard (3.4 MiB)``, ``ranges of 2 shards (1.1 MiB of 6.8 MiB)``, or both."""
    whole = [w for w in wanted if not w.ranges]
    some = [w for w in wanted if w.ranges]
    said = [form.format(_shards(len(whole)), size(total(whole)))] if whole or not some else []
    if some:
        bytes_said = f"{size(total(some))} of {size(sum(w.shard.bytes for w in some))}"
        said.append(form.format(f"ranges of {_shards(len(some))}", bytes_said))
    return " and ".join(said)


def total(wanted: Sequence[Wanted]) -> int:
    return sum(w.bytes for w in wanted)


def _shards(number: int) -> str:
    return f"{number} shard{'' if number == 1 else 's'}"
