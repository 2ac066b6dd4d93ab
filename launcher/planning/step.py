"""The whole step by arithmetic: what a rank holds beside its state, a line a kind, for the reference GPT.

With b samples, s tokens, width h, a heads, vocabulary v, L blocks, tensor degree T and w bytes an element::

    a block saves for backward   x, norm1(x), x', norm2(x')      4·bsh        whole on every tensor rank
                                 q k v, attention, up, gelu      12·bsh / T   cut
                                 statistics of norms and scores  16·bs + 4·bas / T    in fp32
    a recomputed block stores    x alone                         bsh          / T partitioned; host memory: 0
    the head                     x, norm(x), loss                2·bsh, and 3·bsv / T: log-softmax, and two gradients

The engine on fp32 is what this counts (engine/gpt.py under autograd, engine/reduce/flow.py and
engine/gather/gathering.py); a test holds it against real storages at tensor degree 1. 16-bit precisions and tensor
parallelism are the same arithmetic on other sizes; where a choice of the engine decides that no test has measured, the
line says ``assumed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..contract.partition import Layout
from ..contract.train import Zero
from .memory import PRECISION_BYTES
from .norm import norm_alive, optimizer_scratch
from .partitioned import rows, staying
from .plan import Alive, StageMemory, StepLine
from .shapes import Shapes

PIECE_BYTES = 1 << 18  # what ranks of one host read at once (engine/comm/host.py)
IN_FLIGHT = 2  # bucket buffers of a kind that the engine keeps (engine/reduce/buckets.py)
SLACK_PER_MILLE = 50
"""Allocator slack, an assumption: of what comes and goes within a step, how much is lost to rounding and holes."""

Stored = Literal["whole", "partitioned", "host"]


@dataclass(frozen=True)
class Step:
    """How one rank's step goes. ``recomputed`` counts blocks; ``stored`` says where their inputs are kept."""

    shapes: Shapes
    layout: Layout
    state: StageMemory
    recomputed: int = 0
    stored: Stored = "whole"
    device_kind: Literal["cpu", "gpu"] = "gpu"
    zero: Zero = Zero(0)
    near_shards: bool = False  # the ranks that ZeRO partitions over are on one host, and read each other's memory
    near_replicas: bool = False  # and so are those that hold the same shard
    moments: int = 2  # the optimizer's tensors of a parameter's shape

    @property
    def gradient_item(self) -> int:
        """Bytes of an element of the accumulated gradient."""
        return PRECISION_BYTES[self.zero.gradient_dtype]

    @property
    def sums_every_micro_step(self) -> bool:
        """Gradients are summed in passing buckets, in every micro-step; else as slices of a whole gradient, once."""
        return (self.zero.reduce_every or ("step" if self.state.zero_stage < 2 else "micro_step")) == "micro_step"

    @property
    def message_item(self) -> int:
        """Of the messages that sum gradients: passing buckets are in the working precision, slices of a whole
        gradient in its own."""
        return self.shapes.item if self.sums_every_micro_step else self.gradient_item

    @property
    def partitioned(self) -> bool:
        """On one data-parallel rank nothing is, whatever the stage."""
        return self.layout.ranks > 1

    @property
    def gathers(self) -> bool:
        return self.partitioned and self.state.zero_stage == 3


def step_lines(step: Step) -> tuple[StepLine, ...]:
    """Everything that a rank holds in a step: the state first, then what comes and goes."""
    state = step.state
    always = [
        _constant("parameters", state.parameters_bytes, f"stage {state.zero_stage}, padding included"),
        _constant("gradients", state.gradients_bytes, "accumulated, between micro-steps"),
        _constant("optimizer", state.optimizer_bytes, "moments, and an fp32 master where weights are not fp32"),
    ]
    passing = [
        *_activations(step),
        *_gathered(step),
        _buckets(step),
        *_temporaries(step),
    ]
    return (*always, *passing, _slack([line for line in passing if line.what != "communication buckets"]))


def _constant(what: str, count: int, note: str) -> StepLine:
    return StepLine.of(what, Alive(count, count, count), "arithmetic", note)


# --- activations ----------------------------------------------------------------------------------


def block_bytes(shapes: Shapes, device_kind: str = "gpu") -> int:
    """What one block saves for its backward, its input included."""
    whole = 4 * shapes.stream + 4 * 4 * shapes.tokens
    cut = 12 * shapes.stream + 4 * shapes.tokens * shapes.heads
    if shapes.dropout:
        masks = 2 * shapes.tokens * shapes.hidden
        whole += masks * (shapes.item if device_kind == "cpu" else 1)
        if device_kind == "cpu":  # the fused CPU kernel has no dropout: scores, mask and product are kept
            cut += 3 * shapes.tokens * shapes.heads * shapes.seq_len * shapes.item
    return whole + -(-cut // shapes.tensor)


def stored_bytes(shapes: Shapes, stored: Stored) -> int:
    """What one recomputed block stores on the device from forward to backward: its input."""
    if stored == "host":
        return 0
    return -(-shapes.stream // (shapes.tensor if stored == "partitioned" else 1))


def _activations(step: Step) -> list[StepLine]:
    shapes = step.shapes
    kept = (shapes.layers - step.recomputed) * block_bytes(shapes, step.device_kind)
    lines = [
        StepLine.of(
            "activations of the blocks",
            Alive(kept, kept),
            "arithmetic",
            f"{shapes.layers - step.recomputed} blocks that keep all of theirs",
        )
    ]
    if step.recomputed:
        each = stored_bytes(shapes, step.stored)
        again = block_bytes(shapes, step.device_kind) - (shapes.stream if step.stored == "whole" else 0)
        where = {
            "whole": "on every rank",
            "partitioned": f"partitioned over {shapes.tensor} tensor ranks",
            "host": f"in host memory, {step.recomputed * stored_bytes(shapes, 'partitioned'):,} bytes a rank",
        }[step.stored]
        held = step.recomputed * each
        lines += [
            StepLine.of(
                "stored for recomputation",
                Alive(held, held),
                "arithmetic",
                f"the inputs of {step.recomputed} blocks, {where}",
            ),
            StepLine.of(
                "one block computed again", Alive(0, again), "arithmetic", "its activations, while in backward"
            ),
        ]
    head = 2 * shapes.stream + 2 * 4 * shapes.tokens
    batch = 3 * 8 * shapes.tokens  # token numbers, targets, and the targets made contiguous
    lines.append(
        StepLine.of("activations of the head", Alive(head + batch, batch), "arithmetic", "last norm; the batch itself")
    )
    return lines


# --- parameters and messages ----------------------------------------------------------------------


def _gathered(step: Step) -> list[StepLine]:
    """Stage 3: what stays from forward to backward, and the units around the one in use. In backward the largest such
    window inside the last block counts, which is where everything else is at its most."""
    if not step.gathers:
        return []
    layout, zero, item = step.layout, step.zero, step.shapes.item
    given = rows(layout)
    sizes = [sum(layout.units[number].padded for number in row) * item for row in given]
    root = sum(unit.padded * item for unit in layout.units if not unit.modules)
    stay = sum(size for size, stays in zip(sizes, staying(layout, zero.reshard), strict=True) if stays)
    window = 0
    if sizes:
        last = layout.units[given[-1][0]].modules[-1].split(".")[:2]
        inside = [at for at, row in enumerate(given) if layout.units[row[0]].modules[-1].split(".")[:2] == last]
        window = max(sum(sizes[max(0, at - zero.prefetch) : at + 1]) for at in inside)
        window = max(window, stay) if zero.reshard == "keep" else window
    told = {"keep": "all units from forward to backward", "after_forward": "no unit from forward to backward"}
    count = min(len(sizes), 1 + zero.prefetch)
    note = f"embedding and norm whole, {told.get(zero.reshard, 'the last unit from forward to backward')}"
    note += f"; {count} in use or on their way, of {max(sizes, default=0):,} bytes at most"
    return [StepLine.of("gathered parameters", Alive(root + stay, root + window), "arithmetic", note)]


def bucket_width(layout: Layout) -> int:
    """Elements of the largest message of gradients."""
    return max((min(unit.bucket, unit.padded) for unit in layout.units if unit.trainable), default=0)


def _buckets(step: Step) -> StepLine:
    if not step.partitioned:
        return _constant("communication buckets", 0, "one rank sends nothing")
    if step.state.zero_stage == 0 and step.zero.reduce_with == "native":
        return _constant("communication buckets", 0, "the library sums in place")
    ranks, replicas = step.layout.ranks, step.layout.replicas
    width = bucket_width(step.layout)
    message = width * step.message_item
    others = _of_others(message, ranks, step.message_item, near=step.near_shards)
    held = IN_FLIGHT * others
    note = f"{IN_FLIGHT} buffers of {others:,} bytes for what comes from other ranks, allocated once"
    if step.sums_every_micro_step:
        held += IN_FLIGHT * message
        note = f"{IN_FLIGHT} buffers of {message:,} bytes for gradients, {note}"
    if replicas > 1:
        share = width // ranks * step.gradient_item
        share = _of_others(share, replicas, step.gradient_item, near=step.near_replicas)
        held += IN_FLIGHT * share
        note += f"; {IN_FLIGHT} of {share:,} bytes for sums across replicas"
    return _constant("communication buckets", held, note)


def _of_others(message: int, ranks: int, item: int, *, near: bool) -> int:
    """Bytes of a message that come from other ranks at once; ranks of one host read it in pieces."""
    part = message // ranks
    return (ranks - 1) * (min(PIECE_BYTES // item * item, part) if near else part)


# --- temporaries ----------------------------------------------------------------------------------


def _temporaries(step: Step) -> list[StepLine]:
    shapes = step.shapes
    logits = shapes.tokens * -(-shapes.vocab // shapes.tensor)
    if shapes.item == 4:
        loss = StepLine.of(
            "logits and loss", Alive(3 * 4 * logits), "arithmetic", "log-softmax and the gradients of both sides"
        )
    else:
        loss = StepLine.of(
            "logits and loss",
            Alive((shapes.item + 2 * 4) * logits),
            "assumed",
            "logits in the working precision, softmax and its gradient in fp32",
        )
    embedding = _largest(step, "embedding.weight")
    weight = _largest(step, "mlp.up.weight")
    inside = shapes.stream + -(-4 * shapes.stream // shapes.tensor)
    return [
        loss,
        StepLine.of(
            "gradients inside a block",
            Alive(0, inside + weight),
            "arithmetic",
            "of the stream and the MLP, and of one weight before it is copied into its bucket",
        ),
        StepLine.of(
            "gradient of the tied embedding",
            Alive(0, embedding),
            "arithmetic",
            "the head's part, which autograd holds until the embedding's own",
        ),
        _norm(step),
    ]


def _norm(step: Step) -> StepLine:
    whole = step.state.zero_stage < 2 or not step.sums_every_micro_step
    scratch = optimizer_scratch(step.layout, step.state.zero_stage, step.moments, whole_gradients=whole)
    note = "sums of squares in fp64, where they go, and padding rows of the optimizer"
    return StepLine.of("norm of the gradient", norm_alive(step.layout, scratch), "arithmetic", note)


def _largest(step: Step, name: str) -> int:
    numel = max(p.local_numel(step.layout.tensor) for p in step.layout.by_name.values() if p.name.endswith(name))
    return numel * step.shapes.item


def _slack(passing: list[StepLine]) -> StepLine:
    def part(counts: list[int]) -> int:
        return sum(counts) * SLACK_PER_MILLE // 1000

    alive = Alive(
        part([line.alive.loss for line in passing]),
        part([line.alive.backward for line in passing]),
        part([line.alive.update for line in passing]),
    )
    note = f"{SLACK_PER_MILLE / 10:g} % of what comes and goes; long-lived buffers are allocated once and have none"
    return StepLine.of("allocator slack", alive, "assumed", note)


def together(lines: tuple[StepLine, ...], *, assumed: bool) -> int:
    """The most that is held at one moment, by lines of arithmetic alone or with assumptions."""
    counted = [line.alive for line in lines if assumed or line.source != "assumed"]
    moments = zip(*((a.loss, a.backward, a.update) for a in counted), strict=True)
    return max((sum(moment) for moment in moments), default=0)
