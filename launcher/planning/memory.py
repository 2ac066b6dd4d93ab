"""State memory in closed form: what a rank owns, in exact integers (ZeRO paper §3.1 and §5).

Owning state is one question, fitting a step is another: activations, gathered parameters, buckets and
temporaries are not here. With Ψ trainable parameters and N data-parallel ranks a rank holds

    stage 0   (w + g + k)·Ψ                    w  bytes of a weight in the working precision
    stage 1   (w + g)·Ψ + k·Ψ/N                g  bytes of a gradient (``zero.gradient_dtype``)
    stage 2   w·Ψ + (g + k)·Ψ/N                k  optimizer bytes: moments, and an fp32 master
    stage 3   (w + g + k)·Ψ/N                     where w is not fp32 itself

Frozen parameters cost weights only. Parameters of a known layout are divided unit by unit and padded,
as contract.partition does; a plain count is divided once and replicated without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from ..contract.errors import UsageError
from ..contract.partition import Layout
from .plan import StageMemory, StatePlan, TableRow, Verdict

ZERO_STAGES = (0, 1, 2, 3)
PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MOMENTS = {"adamw": 2, "momentum": 1, "sgd": 0}
"""fp32 values that an optimizer keeps for each parameter."""

_PADDING_SEARCH = 4096


@dataclass(frozen=True)
class ElementBytes:
    """State bytes of one trainable parameter, undivided. The paper's K is ``optimizer``."""

    weights: int
    gradients: int
    optimizer: int
    whole_gradients: bool = False
    """Kept whole at any stage, because they are summed once a step (``zero.reduce_every: step``)."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def element_bytes(precision: str, gradient_dtype: str, optimizer: str = "adamw") -> ElementBytes:
    """fp32 AdamW: 4 + 4 + 8; bf16 and fp16 keep an fp32 master beside the moments: 2 + g + 12."""
    master = 0 if precision == "fp32" else 4
    return ElementBytes(PRECISION_BYTES[precision], PRECISION_BYTES[gradient_dtype], master + 4 * MOMENTS[optimizer])


@dataclass(frozen=True)
class Elements:
    """How many parameters there are, tied ones counted once.

    Of a layout: the units of one tensor rank, each padded when it is divided, wherever it lies (a flat
    buffer carries its padding also where it is whole). Of a plain count: all of it, as one piece that is
    divided without padding; a share that is no whole number is rounded up to a byte, not to an element.
    Each of ``replicas`` groups of ranks holds all of it, partitioned inside.
    """

    trainable: tuple[int, ...]
    frozen: tuple[int, ...] = ()
    padded: bool = False
    tensor: int = 1
    replicas: int = 1

    @cached_property
    def trainable_sizes(self) -> Counter[int]:
        """A transformer's blocks are alike: each size once, with how often."""
        return Counter(self.trainable)

    @cached_property
    def frozen_sizes(self) -> Counter[int]:
        return Counter(self.frozen)

    @classmethod
    def of_count(cls, parameters: int, *, frozen: int = 0, tensor: int = 1) -> Elements:
        return cls((parameters,), (frozen,) if frozen else (), False, tensor)

    @classmethod
    def of_layout(cls, layout: Layout) -> Elements:
        """The layout's own number of ranks plays no part."""
        return cls(
            tuple(unit.numel for unit in layout.units if unit.trainable),
            tuple(unit.numel for unit in layout.units if not unit.trainable),
            True,
            layout.tensor,
            layout.replicas,
        )


def rank_bytes(zero_stage: int, elements: Elements, each: ElementBytes, ranks: int) -> int:
    """State bytes of one rank; of ``ranks`` data-parallel ranks (of one replica) the one that owns most."""
    replicated, divided = _split(zero_stage, each)
    frozen_replicated, frozen_divided = (0, each.weights) if zero_stage >= 3 else (each.weights, 0)
    if elements.padded:
        replicas = elements.replicas
        shard, frozen_shard = (
            sum(-(-n // (ranks * replicas)) * replicas * times for n, times in pieces.items())
            for pieces in (elements.trainable_sizes, elements.frozen_sizes)
        )
        whole = (replicated * shard + frozen_replicated * frozen_shard) * ranks
        return whole + divided * shard + frozen_divided * frozen_shard
    trainable, frozen = sum(elements.trainable), sum(elements.frozen)
    whole = replicated * trainable + frozen_replicated * frozen
    return -(-(whole * ranks + divided * trainable + frozen_divided * frozen) // (ranks * elements.tensor))


def stage_memory(
    zero_stage: int, elements: Elements, each: ElementBytes, ranks: int, device_bytes: int | None = None
) -> StageMemory:
    """State of one of ``ranks`` data-parallel ranks (times the tensor degree: the world size)."""
    weights = rank_bytes(zero_stage, elements, replace(each, gradients=0, optimizer=0), ranks)
    with_gradients = rank_bytes(zero_stage, elements, replace(each, optimizer=0), ranks)
    total = rank_bytes(zero_stage, elements, each, ranks)
    return StageMemory(
        zero_stage=zero_stage,
        parameters_bytes=weights,
        gradients_bytes=with_gradients - weights,
        optimizer_bytes=total - with_gradients,
        total_bytes=total,
        all_ranks_bytes=_all_ranks(zero_stage, elements, each, ranks, total),
        floor_bytes=floor_bytes(zero_stage, elements, each),
        fits=None if device_bytes is None else total <= device_bytes,
        smallest_ranks_that_fit=(
            None if device_bytes is None else smallest_ranks(zero_stage, elements, each, device_bytes)
        ),
    )


def _all_ranks(zero_stage: int, elements: Elements, each: ElementBytes, ranks: int, total: int) -> int:
    """Over the whole world. A padded layout is equal on all ranks; a plain count is divided exactly."""
    if elements.padded:
        return total * ranks * elements.tensor * elements.replicas
    replicated, divided = _split(zero_stage, each)
    frozen_copies = 1 if zero_stage >= 3 else ranks
    return (replicated * ranks + divided) * sum(elements.trainable) + each.weights * sum(
        elements.frozen
    ) * frozen_copies


def _split(zero_stage: int, each: ElementBytes) -> tuple[int, int]:
    """Bytes of a trainable parameter that every rank holds, and bytes that are divided."""
    replicated = each.total
    replicated -= each.optimizer if zero_stage >= 1 else 0
    replicated -= each.gradients if zero_stage >= 2 and not each.whole_gradients else 0
    replicated -= each.weights if zero_stage >= 3 else 0
    return replicated, each.total - replicated


def floor_bytes(zero_stage: int, elements: Elements, each: ElementBytes) -> int:
    """What a rank never goes below, however many ranks there are: the limit of N to infinity, unpadded."""
    replicated, _ = _split(zero_stage, each)
    frozen = 0 if zero_stage >= 3 else each.weights * sum(elements.frozen)
    floor = replicated * sum(elements.trainable) + frozen
    return floor if elements.padded else -(-floor // elements.tensor)


def smallest_ranks(zero_stage: int, elements: Elements, each: ElementBytes, device_bytes: int) -> int | None:
    """The smallest world size (a multiple of tensor degree and replicas) whose state fits; None: no number helps."""

    def without_padding(ranks: int) -> int:
        """Falls as ranks are added; below ``rank_bytes`` by the padding of what is replicated."""
        if not elements.padded:
            return rank_bytes(zero_stage, elements, each, ranks)
        divided = ElementBytes(
            each.weights if zero_stage >= 3 else 0,
            each.gradients if zero_stage >= 2 and not each.whole_gradients else 0,
            each.optimizer if zero_stage >= 1 else 0,
        )
        alone = replace(elements, frozen=elements.frozen if zero_stage >= 3 else ())
        return floor_bytes(zero_stage, elements, each) + rank_bytes(zero_stage, alone, divided, ranks)

    # From here on a rank would own less than one parameter, which is none.
    most = max((*elements.trainable, *elements.frozen, 1))
    low, high = 1, most if elements.padded else -(-most // elements.tensor)
    if without_padding(high) > device_bytes:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if without_padding(middle) <= device_bytes else (middle + 1, high)
    # Padding comes and goes with the number of ranks: the first that fits is at most a little further.
    for ranks in range(low, low + _PADDING_SEARCH):
        if rank_bytes(zero_stage, elements, each, ranks) <= device_bytes:
            return ranks * elements.tensor * elements.replicas
    return None


def largest_model(zero_stage: int, each: ElementBytes, ranks: int, device_bytes: int, *, tensor: int = 1) -> int:
    """The most parameters whose state fits on each of ``ranks`` data-parallel × ``tensor`` ranks."""
    replicated, divided = _split(zero_stage, each)
    # whole parameters with (replicated + divided / ranks) / tensor bytes each
    return device_bytes * ranks * tensor // (replicated * ranks + divided)


NO_DEVICE = "the cluster's description has no device memory (device: {memory: …})"


def plan_state(
    elements: Elements | None,
    each: ElementBytes,
    *,
    chosen: int | None,
    world_size: int,
    device_bytes: int | None,
    parameters: int | None = None,
) -> StatePlan:
    """All four stages on ``world_size`` ranks, and whether the ``chosen`` one fits the device.

    ``elements`` None: nobody counted the parameters (a model of the user's own). ``parameters`` is told
    where it differs from the sum of the elements (tensor parallelism).
    """
    if elements is None:
        because = "the parameters of a factory's model are not counted here: --simulate makes the model and counts them"
        return StatePlan(None, (), chosen, device_bytes, "cannot be said", because)
    ranks = world_size // (elements.tensor * elements.replicas)
    stages = tuple(stage_memory(stage, elements, each, ranks, device_bytes) for stage in ZERO_STAGES)
    count = parameters if parameters is not None else sum(elements.trainable) + sum(elements.frozen)
    verdict, because = _judge(stages, chosen, world_size, device_bytes)
    largest: tuple[int, ...] = ()
    if device_bytes is not None:
        largest = tuple(largest_model(s, each, ranks, device_bytes, tensor=elements.tensor) for s in ZERO_STAGES)
    return StatePlan(count, stages, chosen, device_bytes, verdict, because, largest)


def state_table(
    elements: Elements, each: ElementBytes, worlds: Iterable[int], device_bytes: int | None = None
) -> tuple[TableRow, ...]:
    """All stages at each of the world sizes that the tensor degree and the replicas divide."""
    copies = elements.tensor * elements.replicas
    return tuple(
        TableRow(
            world,
            tuple(stage_memory(s, elements, each, world // copies, device_bytes) for s in ZERO_STAGES),
        )
        for world in sorted(set(worlds))
        if world % copies == 0
    )


def plan_parameters(
    parameters: int,
    *,
    ranks: int,
    tensor: int = 1,
    precision: str = "bf16",
    gradient_dtype: str | None = None,
    optimizer: str = "adamw",
    frozen: int = 0,
    device_bytes: int | None = None,
) -> StatePlan:
    """State memory without a job: ``parameters`` on ``ranks`` ranks in all, of which ``tensor`` share a model.

    ``gradient_dtype`` left out is the working precision, the paper's case; ``frozen`` parameters come beside the
    trainable ones. No stage is chosen, so the verdict is for the reader; each stage says for itself whether it fits.
    """
    count = Count(parameters, frozen, ranks, tensor, precision, gradient_dtype, optimizer)
    total = parameters + frozen
    return plan_state(
        count.elements, count.each, chosen=None, world_size=ranks, device_bytes=device_bytes, parameters=total
    )


@dataclass(frozen=True)
class Count:
    """A model of which only its size is known. Raises UsageError where the values make no sense together."""

    parameters: int
    frozen: int = 0
    ranks: int = 1
    tensor: int = 1
    precision: str = "bf16"
    gradient_dtype: str | None = None
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        _check_count(self)

    @property
    def elements(self) -> Elements:
        return Elements.of_count(self.parameters, frozen=self.frozen, tensor=self.tensor)

    @property
    def each(self) -> ElementBytes:
        return element_bytes(self.precision, self.gradient_dtype or self.precision, self.optimizer)


def _check_count(count: Count) -> None:
    for name, value, known in (
        ("precision", count.precision, PRECISION_BYTES),
        ("gradient dtype", count.gradient_dtype or count.precision, PRECISION_BYTES),
        ("optimizer", count.optimizer, MOMENTS),
    ):
        if value not in known:
            raise UsageError(f"{name} {value!r} is not known; accepted: {', '.join(known)}")
    ranks, tensor = count.ranks, count.tensor
    if count.parameters < 1 or count.frozen < 0 or ranks < 1 or tensor < 1 or ranks % tensor:
        raise UsageError(
            f"{count.parameters} parameters on {ranks} ranks with a tensor degree of {tensor}: all must be at least 1, "
            "and the degree must divide the ranks"
        )


def _judge(
    stages: tuple[StageMemory, ...], chosen: int | None, world_size: int, device_bytes: int | None
) -> tuple[Verdict, str]:
    if chosen is None:
        return "cannot be said", "no ZeRO stage was chosen; each stage says for itself whether it fits"
    stage = stages[chosen]
    if device_bytes is None:
        return "cannot be said", NO_DEVICE
    if stage.fits:
        owns, device = readable(stage.total_bytes), readable(device_bytes)
        return "fits", f"stage {chosen} owns {owns} a rank of {device}; what a step needs beside is not in this"
    if stage.smallest_ranks_that_fit is None:
        floor, device = _apart(stage.floor_bytes, device_bytes)
        because = f"stage {chosen}: the floor {floor} is above the {device} of a device: no number of ranks helps"
    else:
        owns, device = _apart(stage.total_bytes, device_bytes)
        because = (
            f"stage {chosen} owns {owns} a rank, above the {device} of a device: "
            f"it needs ≥ {stage.smallest_ranks_that_fit} ranks, the job has {world_size}"
        )
    return "does not fit", because + _way_out(stages, chosen)


def _way_out(stages: tuple[StageMemory, ...], chosen: int) -> str:
    """The next stage that would fit, tried rather than guessed."""
    for stage in stages[chosen + 1 :]:
        if stage.fits:
            return f"; stage {stage.zero_stage} would fit ({readable(stage.total_bytes)} a rank)"
    for stage in stages[chosen + 1 :]:
        if stage.smallest_ranks_that_fit is not None:
            return f"; stage {stage.zero_stage} would fit from {stage.smallest_ranks_that_fit} ranks on"
    return ""


def _apart(above: int, below: int) -> tuple[str, str]:
    """Two sizes as text that can be told apart."""
    texts = readable(above), readable(below)
    return texts if texts[0] != texts[1] else (f"{above} B", f"{below} B")


def readable(count: int) -> str:
    """Decimal units, three digits: ``14 GB``, ``31.4 GB``, ``512 B``. Half is rounded up."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{three_digits(count, size)} {unit}"
    return f"{count} B"


def three_digits(count: int, size: int) -> str:
    """``count / size`` as the paper's tables print it: whole numbers from 100 on truncated, smaller ones to
    three significant digits at most (two after the point), half up, without trailing zeros."""
    if count >= 100 * size:
        return str(count // size)
    places = 1 if count >= 10 * size else 2
    scaled = (2 * count * 10**places + size) // (2 * size)  # half up, in integers
    text = f"{scaled // 10**places}.{scaled % 10**places:0{places}d}"
    return text.rstrip("0").rstrip(".")
