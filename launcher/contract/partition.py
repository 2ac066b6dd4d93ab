"""The partition: the map from flat parameters to shards. The one source of every size.

Engine, planner and checkpoint all ask this file; none of them adds, pads or divides on its own.

Parameters that are gathered together form a **unit**; a unit's parameters lie one after the other in
one flat range. The unit is cut into **buckets** of constant size, the messages of communication; each
bucket is divided evenly over the N data-parallel ranks, rank r owning the r-th part, so that a bucket
is gathered and reduced in place. Only the last bucket of a unit is padded, to a multiple of N::

    unit "blocks.0", 10 elements, N = 2, bucket of 4      (. is padding: here none, 10 = 4 + 4 + 2)

      flat      0 1 2 3 | 4 5 6 7 | 8 9
      owner     0 0 1 1 | 0 0 1 1 | 0 1
      shard of rank 0:   0 1 4 5 8          shard of rank 1:   2 3 6 7 9

A rank's shard of a unit is the concatenation of its parts, in bucket order; all stages of ZeRO use the
same partition and differ only in *what* of it is held whole. With tensor parallelism of degree T a
parameter that is split along an axis enters with its local shape, and there is one such layout a
tensor rank. They are equal, because T divides the axis or the last rank's slice is padded (vocabularies).
Split and replicated parameters never share a unit, so that what is replicated enters the norm once and
is saved once; ``contract.slices`` knows which elements a tensor rank has.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .train import Units

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
MOST_ELEMENTS = 2**80  # more is a damaged number


@dataclass(frozen=True)
class Parameter:
    """One parameter, once (tied names are listed in ``tied``). ``shape`` is the whole, undivided one.

    With tensor parallelism ``tensor_axis`` is cut over the tensor ranks. ``tensor_parts`` > 1: the axis
    holds so many equal stretches (fused q, k and v), each of which is cut. ``tensor_padded``: the degree
    need not divide the axis (a vocabulary); the last rank's slice is padded to the size of the others.
    """

    name: str
    shape: Tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    group: int = 0
    tensor_axis: Optional[int] = None
    tied: Tuple[str, ...] = ()
    tensor_parts: int = 1
    tensor_padded: bool = False

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0 or self.numel > MOST_ELEMENTS or self.tensor_parts < 1:
            raise ValueError(f"{self.name}: {list(self.shape)} in {self.tensor_parts} stretches is no parameter")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name} is of {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        if self.tensor_axis is not None and not 0 <= self.tensor_axis < len(self.shape):
            raise ValueError(f"{self.name}: {list(self.shape)} has no axis {self.tensor_axis}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def is_split(self, tensor: int) -> bool:
        """Whether each of ``tensor`` ranks holds a slice, or all of them the whole."""
        return tensor > 1 and self.tensor_axis is not None

    def local_shape(self, tensor: int) -> Tuple[int, ...]:
        if self.tensor_axis is None or tensor == 1:
            return self.shape
        axis = self.tensor_axis
        if self.shape[axis] % (tensor * self.tensor_parts) and not self.tensor_padded:
            stretches = f" in {self.tensor_parts} stretches" if self.tensor_parts > 1 else ""
            raise ValueError(
                f"{self.name}: axis {axis} of {self.shape}{stretches} does not divide by the tensor degree {tensor}"
            )
        return tuple(-(-n // tensor) if i == axis else n for i, n in enumerate(self.shape))

    def local_numel(self, tensor: int) -> int:
        return prod(self.local_shape(tensor))


class Placed(NamedTuple):
    """A parameter's range [start, stop) in its unit's flat elements."""

    parameter: Parameter
    start: int
    stop: int


class Part(NamedTuple):
    """What one rank owns of one bucket: flat [start, stop) of the unit, at ``offset`` in the rank's shard."""

    start: int
    stop: int
    offset: int


class Piece(NamedTuple):
    """A contiguous run of one parameter inside one shard: local elements [start, stop) of the parameter
    lie at [offset, offset + stop - start) of the rank's shard of the unit."""

    parameter: Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Unit:
    """Parameters of one dtype, group and trainability that are gathered, reduced and released together.

    ``modules`` are those whose forward uses it; without any it stays gathered from forward to backward. ``replicas``
    groups of ``ranks`` hold it each; a shard divides by them too, because they sum it among themselves.
    """

    name: str
    parameters: Tuple[Parameter, ...]
    ranks: int
    bucket: int  # elements; a multiple of ranks × replicas
    tensor: int = 1
    modules: Tuple[str, ...] = ()
    replicas: int = 1

    def __post_init__(self) -> None:
        even = self.ranks * self.replicas
        if min(self.ranks, self.replicas, self.tensor) < 1:
            raise ValueError(f"unit {self.name} is of {self.ranks} x {self.tensor} ranks, {self.replicas} replicas")
        if self.bucket < even or self.bucket % even:
            raise ValueError(f"unit {self.name}: a bucket of {self.bucket} does not divide over {even} ranks")
        kinds = {(p.dtype, p.group, p.trainable, p.is_split(self.tensor)) for p in self.parameters}
        if len(kinds) != 1:
            raise ValueError(f"unit {self.name} mixes dtypes, groups or trainability: {sorted(map(str, kinds))}")

    @property
    def dtype(self) -> str:
        return self.parameters[0].dtype

    @property
    def trainable(self) -> bool:
        return self.parameters[0].trainable

    @property
    def group(self) -> int:
        return self.parameters[0].group

    @property
    def split(self) -> bool:
        """Whether each tensor rank holds parameters of its own here, or all of them the same."""
        return self.parameters[0].is_split(self.tensor)

    @cached_property
    def placed(self) -> Tuple[Placed, ...]:
        """Where each parameter lies, in order, without gaps."""
        result: List[Placed] = []
        at = 0
        for parameter in self.parameters:
            numel = parameter.local_numel(self.tensor)
            result.append(Placed(parameter, at, at + numel))
            at += numel
        return tuple(result)

    @cached_property
    def numel(self) -> int:
        """Elements that are parameters."""
        return self.placed[-1].stop if self.placed else 0

    @cached_property
    def padded(self) -> int:
        """Elements with the padding at the end: a multiple of ``ranks`` × ``replicas``."""
        even = self.ranks * self.replicas
        return -(-self.numel // even) * even

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included: the same on every rank."""
        return self.padded // self.ranks

    @property
    def buckets(self) -> range:
        """The flat start of each bucket; it ends at the next start or at ``padded``."""
        return range(0, self.padded, self.bucket)

    def bucket_range(self, index: int) -> Tuple[int, int]:
        start = index * self.bucket
        return start, min(start + self.bucket, self.padded)

    def parts(self, rank: int) -> Iterator[Part]:
        """What ``rank`` owns, bucket by bucket."""
        offset = 0
        for start in self.buckets:
            width = (min(start + self.bucket, self.padded) - start) // self.ranks
            yield Part(start + rank * width, start + (rank + 1) * width, offset)
            offset += width

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The runs of parameters in the shard of ``rank``, in shard order; padding belongs to none."""
        starts = [p.start for p in self.placed]
        for part in self.parts(rank):
            at = part.start
            stop = min(part.stop, self.numel)
            index = bisect_right(starts, at) - 1
            while at < stop:
                placed = self.placed[index]
                end = min(stop, placed.stop)
                if end > at:
                    yield Piece(placed.parameter, at - placed.start, end - placed.start, part.offset + at - part.start)
                    at = end
                index += 1


@dataclass(frozen=True)
class Layout:
    """All units of one model on N ranks × T tensor ranks: plain data, kept in manifests.

    N are the data-parallel ranks, or those of one of ``replicas`` groups of them. ``rule`` made the units.
    """

    ranks: int
    tensor: int
    units: Tuple[Unit, ...]
    replicas: int = 1
    rule: Optional[Units] = None

    @cached_property
    def by_name(self) -> Dict[str, Parameter]:
        return {p.name: p for u in self.units for p in u.parameters}

    @cached_property
    def psi(self) -> int:
        """Ψ: elements of the whole model, tied parameters once, whatever the tensor degree; padding left out."""
        return sum(p.numel for p in self.by_name.values())

    @property
    def numel(self) -> int:
        """Parameters that a tensor rank holds together over its data-parallel group, padding left out."""
        return sum(u.numel for u in self.units)

    @property
    def trainable_numel(self) -> int:
        return sum(u.numel for u in self.units if u.trainable)

    @property
    def shard_numel(self) -> int:
        return sum(u.shard_numel for u in self.units)

    @property
    def padding(self) -> int:
        return sum(u.padded - u.numel for u in self.units)


def build(
    groups: Iterable[Tuple[str, Sequence[Parameter]]],
    *,
    ranks: int,
    bucket_bytes: int,
    tensor: int = 1,
    replicas: int = 1,
    rule: Optional[Units] = None,
    modules: Optional[Mapping[str, Tuple[str, ...]]] = None,
) -> Layout:
    """The layout of parameters that come grouped into named units (``contract.units``), in the order of use.

    A named unit whose parameters differ in dtype, optimizer group, trainability or in being split over
    tensor ranks is cut into one unit for each kind (``name``, ``name#1``, …), because only equal kinds
    share a flat buffer. ``modules`` tells of each name which modules use it.
    """
    units: List[Unit] = []
    even = ranks * replicas
    for name, parameters in groups:
        kinds: Dict[Tuple[str, int, bool, bool], List[Parameter]] = {}
        for parameter in parameters:
            kind = (parameter.dtype, parameter.group, parameter.trainable, parameter.is_split(tensor))
            kinds.setdefault(kind, []).append(parameter)
        users = (modules or {}).get(name, ())
        for index, members in enumerate(kinds.values()):
            bucket = max(1, bucket_bytes // ITEM_BYTES[members[0].dtype] // even) * even
            own = name if index == 0 else f"{name}#{index}"
            units.append(Unit(own, tuple(members), ranks, bucket, tensor, users, replicas))
    return Layout(ranks, tensor, tuple(units), replicas, rule)


def stored_dtype(dtype: str) -> str:
    """The dtype of the optimizer's state and of what checkpoints hold: fp32 for parameters in 16 bits."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


class StateBytes(NamedTuple):
    """Bytes of model state on one rank, in closed form; padding included."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    layout: Layout, zero_stage: int, *, gradient_bytes: Optional[int] = None, moments: int = 2, whole: bool = False
) -> StateBytes:
    """What ``ZeroEngine.memory()`` must show for ``layout`` at a ZeRO stage, to the byte.

    ``gradient_bytes`` is the item size of the accumulated gradient (default: 4, or 8 for a float64 model);
    ``moments`` counts the optimizer's tensors of a parameter's shape; parameters in 16 bits have an fp32
    master beside them. ``whole`` says that gradients are
    kept whole between the micro-steps (``reduce_every: step``), which stages 2 and 3 pay with memory.
    Frozen parameters have neither gradient nor optimizer state. On one rank nothing is partitioned.
    """
    sharded = layout.ranks > 1
    parameters = gradients = optimizer = 0
    for unit in layout.units:
        full = ITEM_BYTES[stored_dtype(unit.dtype)]
        parameters += ITEM_BYTES[unit.dtype] * (unit.shard_numel if sharded and zero_stage >= 3 else unit.padded)
        if unit.trainable:
            whole_gradient = not sharded or zero_stage < 2 or whole
            gradients += (gradient_bytes or full) * (unit.padded if whole_gradient else unit.shard_numel)
            master = int(stored_dtype(unit.dtype) != unit.dtype)
            updated = unit.shard_numel if sharded and zero_stage >= 1 else unit.padded
            optimizer += (moments + master) * full * updated
    return StateBytes(parameters, gradients, optimizer)


class Copy(NamedTuple):
    """``numel`` elements from ``source_offset`` of the shard of (``source_rank``, ``source_unit``) in the
    old layout to ``offset`` of ``unit`` in this rank's new shard."""

    source_rank: int
    source_unit: int
    source_offset: int
    unit: int
    offset: int
    numel: int


def reshard(old: Layout, new: Layout, rank: int) -> List[Copy]:
    """What data rank ``rank`` of ``new`` has to read from the shards of ``old`` to fill its own.

    Both layouts hold the same parameters at the same tensor degree, in any units, bucket sizes and
    numbers of ranks. Every element of the new shard but padding is written exactly once.

    Raises ``ValueError`` naming the first parameter that the layouts do not share.
    """
    if old.tensor != new.tensor:
        raise ValueError(f"tensor degree {old.tensor} cannot be read as {new.tensor}")
    check_same_parameters(old, new)
    # Where the old layout holds each parameter: (start, stop, rank, unit, offset), by start.
    held: Dict[str, List[Tuple[int, int, int, int, int]]] = {}
    for index, unit in enumerate(old.units):
        for source in range(old.ranks):
            for piece in unit.pieces(source):
                row = (piece.start, piece.stop, source, index, piece.offset)
                held.setdefault(piece.parameter.name, []).append(row)
    for rows in held.values():
        rows.sort()
    starts = {name: [row[0] for row in rows] for name, rows in held.items()}
    copies: List[Copy] = []
    for index, unit in enumerate(new.units):
        for piece in unit.pieces(rank):
            rows = held[piece.parameter.name]
            at = piece.start
            next_row = bisect_right(starts[piece.parameter.name], at) - 1
            while at < piece.stop:
                start, stop, source, source_unit, offset = rows[next_row]
                end = min(stop, piece.stop)
                target = piece.offset + at - piece.start
                copies.append(Copy(source, source_unit, offset + at - start, index, target, end - at))
                at, next_row = end, next_row + 1
    return copies


def check_same_parameters(old: Layout, new: Layout) -> None:
    """Raises ``ValueError`` naming the first parameter whose name, shape or dtype differs."""
    for name, parameter in new.by_name.items():
        other = old.by_name.get(name)
        if other is None:
            raise ValueError(f"parameter {name} is not in the checkpoint")
        if other.shape != parameter.shape:
            raise ValueError(f"parameter {name}: shape {other.shape} in the checkpoint, {parameter.shape} in the model")
        if stored_dtype(other.dtype) != stored_dtype(parameter.dtype):
            raise ValueError(f"parameter {name}: {other.dtype} in the checkpoint, {parameter.dtype} in the model")
    for name in old.by_name:
        if name not in new.by_name:
            raise ValueError(f"parameter {name} of the checkpoint is not in the model")


def gpt_parameters(layers: int, hidden: int, seq_len: int, vocab: int) -> List[Tuple[str, List[Parameter]]]:
    """The reference GPT's parameters by unit, in module order: a closed form that needs no torch.

    A test holds it against the real module (engine.gpt). Ψ = 12·L·h² + 13·L·h + (vocab + seq)·h + 2·h.
    """
    h = hidden
    units: List[Tuple[str, List[Parameter]]] = [
        ("embedding", [Parameter("embedding.weight", (vocab, h)), Parameter("position.weight", (seq_len, h))])
    ]
    for i in range(layers):
        b = f"blocks.{i}"
        units.append(
            (
                b,
                [
                    Parameter(f"{b}.norm1.weight", (h,)),
                    Parameter(f"{b}.norm1.bias", (h,)),
                    Parameter(f"{b}.attention.qkv.weight", (3 * h, h)),
                    Parameter(f"{b}.attention.qkv.bias", (3 * h,)),
                    Parameter(f"{b}.attention.out.weight", (h, h)),
                    Parameter(f"{b}.attention.out.bias", (h,)),
                    Parameter(f"{b}.norm2.weight", (h,)),
                    Parameter(f"{b}.norm2.bias", (h,)),
                    Parameter(f"{b}.mlp.up.weight", (4 * h, h)),
                    Parameter(f"{b}.mlp.up.bias", (4 * h,)),
                    Parameter(f"{b}.mlp.down.weight", (h, 4 * h)),
                    Parameter(f"{b}.mlp.down.bias", (h,)),
                ],
            )
        )
    units.append(("norm", [Parameter("norm.weight", (h,)), Parameter("norm.bias", (h,))]))
    return units
