"""The reference GPT seen from the planner: its partition, its shapes, its arithmetic operations.

Tensor parallelism cuts what Megatron cuts: attention by heads, the MLP by its inner width, embedding and
head by vocabulary (padded to the degree); norms, positions and the biases of the two projections back are
whole on every rank. ``engine.tensor.gpt`` is the model; a test holds the two against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..contract import groups as patterns
from ..contract import partition, units
from ..contract.train import Units
from ..specs.models import GptModel, Job
from .reasons import Reason

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_AXES = {
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.out.weight": 1,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
    "embedding.weight": 0,
}


@dataclass(frozen=True)
class Shapes:
    """Sizes of one micro-step on one rank: ``item`` bytes an element of the working precision."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab: int
    micro: int
    tensor: int
    item: int
    dropout: float = 0.0

    @classmethod
    def of(cls, model: GptModel, *, micro: int, tensor: int, item: int) -> Shapes:
        return cls(
            model.layers, model.hidden, model.heads, model.seq_len, model.vocab, micro, tensor, item, model.dropout
        )

    @property
    def tokens(self) -> int:
        return self.micro * self.seq_len

    @property
    def stream(self) -> int:
        """Bytes of one tensor (micro, seq, hidden)."""
        return self.tokens * self.hidden * self.item


Patterns = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Partition:
    """Over what the parameters are partitioned, beside the model's own sizes. ``groups`` are the patterns of
    ``optimizer.groups``, which share no flat buffer; ``unit`` and ``replicas`` as ``train.Zero`` has them."""

    ranks: int
    bucket_bytes: int
    tensor: int = 1
    precision: str = "fp32"
    groups: Patterns = ()
    unit: Units | None = None
    replicas: int = 1


def gpt_layout(model: GptModel, **over: Any) -> partition.Layout:
    """The reference GPT's partition, :class:`Partition` ``over``: what the engine builds, without torch.

    Raises ValueError for a rule of units that chooses nothing.
    """
    return _layout((model.layers, model.hidden, model.seq_len, model.vocab), Partition(**over))


@lru_cache(maxsize=64)
def _layout(sizes: tuple[int, int, int, int], over: Partition) -> partition.Layout:
    parameters = [p for _, row in partition.gpt_parameters(*sizes) for p in row]
    if over.groups:
        numbers = patterns.assign([[p.name] for p in parameters], over.groups)
        parameters = [replace(p, group=number) for p, number in zip(parameters, numbers, strict=True)]
    dtype = DTYPES[over.precision]
    if over.tensor > 1 or dtype != "float32":
        parameters = [replace(p, dtype=dtype, **(_cut(p.name) if over.tensor > 1 else {})) for p in parameters]
    grouped = units.group(parameters, units.gpt_tree(sizes[0], over.tensor), over.unit, tensor=over.tensor)
    return partition.build(
        [(one.name, one.parameters) for one in grouped],
        ranks=over.ranks,
        bucket_bytes=over.bucket_bytes,
        tensor=over.tensor,
        replicas=over.replicas,
        rule=over.unit,
        modules={one.name: one.modules for one in grouped},
    )


def _cut(name: str) -> dict[str, Any]:
    """How a parameter is divided over tensor ranks: q, k and v lie one behind the other, words may be padded."""
    inside = name.split(".", 2)[2] if name.startswith("blocks.") else name
    return {
        "tensor_axis": _AXES.get(inside),
        "tensor_parts": 3 if inside.startswith("attention.qkv") else 1,
        "tensor_padded": inside == "embedding.weight",
    }


def gpt_numel(model: GptModel) -> int:
    """Ψ: every parameter once, the tied embedding too (contract.partition.gpt_parameters, summed)."""
    h = model.hidden
    return 12 * model.layers * h * h + 13 * model.layers * h + (model.vocab + model.seq_len + 2) * h


def check_tensor(job: Job, tensor: int, world_size: int) -> list[Reason]:
    """A tensor degree has to divide the ranks and everything that is cut."""
    counts = [("ranks", world_size)]
    if isinstance(job.model, GptModel):
        counts += [("hidden", job.model.hidden), ("heads", job.model.heads)]
    return [
        Reason("tensor", f"parallel.tensor: {tensor} does not divide {what} {count}")
        for what, count in counts
        if count % tensor
    ]


def recomputed_blocks(job: Job, layers: int) -> int:
    """How many blocks compute their activations again in backward."""
    if job.recompute == "none":
        return 0
    return layers if job.recompute == "block" else len(job.recompute)


def step_flops(model: GptModel, *, samples: int, recomputed: int) -> int:
    """Operations of one optimizer step over ``samples``, all ranks together.

    6Ψ a token (2 forward, 4 backward) and 2Ψ more for what is computed again; attention beside that: scores and
    weighted values are 2·2·s·h a token and layer forward, a causal kernel may skip half of it, so half is counted.
    """
    psi, tokens = gpt_numel(model), samples * model.seq_len
    attention = 2 * model.seq_len * model.hidden * model.layers  # forward, a token
    return tokens * (6 * psi + 3 * attention) + tokens * (2 * psi + attention) * recomputed // model.layers
