"""The train config: what the engine on every rank reads. Written by planning, never by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple, Union


@dataclass(frozen=True)
class GPT:
    """The reference model: pre-norm, learned positions, tied embedding (engine/gpt.py)."""

    layers: int
    hidden: int
    heads: int
    seq_len: int
    vocab: int = 256
    dropout: float = 0.0


@dataclass(frozen=True)
class Factory:
    """A user's model: ``module:function`` called with ``options``; ``loss`` and ``data`` likewise."""

    factory: str
    options: Dict[str, Any] = field(default_factory=dict)
    loss: Optional[str] = None


@dataclass(frozen=True)
class Data:
    """Exactly one of ``text`` (a corpus every machine has), ``tokens`` (token files) and ``factory``."""

    text: Optional[str] = None  # "python-stdlib"
    tokens: Optional[str] = None
    heldout: Optional[str] = None
    factory: Optional[str] = None
    options: Dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Units:
    """Which modules stage 3 gathers together (``contract.units``): exactly one of the three is given."""

    classes: Tuple[str, ...] = ()
    names: Tuple[str, ...] = ()  # patterns of modules' names
    size_bytes: Optional[int] = None


@dataclass(frozen=True)
class Zero:
    stage: int
    bucket_bytes: int = 25_000_000
    gradient_dtype: str = "fp32"
    reduce_every: Optional[str] = None  # micro_step | step; None: step at stages 0 and 1, micro_step at 2 and 3
    unit: Optional[Units] = None  # None: each block
    reshard: str = "keep_last"  # stage 3 after forward: keep_last | after_forward | keep
    prefetch: int = 1  # units gathered ahead of use at stage 3
    replicas: int = 1  # groups of data-parallel ranks that each hold everything once, partitioned inside
    reduce_with: str = "ordered"  # ordered | native: at stage 0, the library's own all-reduce
    overlap_gather: Optional[bool] = None  # stages 1, 2: parameters arrive in the next forward; None: the model says
    same_host: str = "read"  # read | send: on CPU, ranks of one host read each other's memory, or send by sockets


@dataclass(frozen=True)
class AdamW:
    lr: float
    weight_decay: float = 0.0
    betas: Tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: Optional[float] = None  # global norm
    warmup: int = 0  # steps of linear warm-up
    schedule: str = "cosine"  # cosine (to lr_floor × lr at the last step) | constant
    lr_floor: float = 0.1


@dataclass(frozen=True)
class SGD:
    """As ``torch.optim.SGD``: weight decay is added to the gradient; ``momentum`` 0 keeps no state."""

    lr: float
    momentum: float  # no default: a plain mapping with it is SGD, one without is AdamW
    nesterov: bool = False
    weight_decay: float = 0.0
    clip: Optional[float] = None  # global norm
    warmup: int = 0
    schedule: str = "cosine"
    lr_floor: float = 0.1


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose name matches (``contract.groups``) train with these instead of the optimizer's own."""

    match: Tuple[str, ...]
    lr: Optional[float] = None  # at the height of the schedule, which all groups share
    weight_decay: Optional[float] = None


@dataclass(frozen=True)
class Batch:
    """Samples a step = micro × accumulation × data-parallel ranks; the product is derived, never stored."""

    micro: int
    accumulation: int

    def global_batch(self, data_parallel: int) -> int:
        return self.micro * self.accumulation * data_parallel


@dataclass(frozen=True)
class Evaluate:
    every: int  # steps; the last step is always evaluated
    tokens: int


@dataclass(frozen=True)
class Checkpointing:
    """``every`` steps or seconds (one of them); the newest ``keep`` whole ones stay (None: all). ``background``:
    training goes on while a host copy is written."""

    every_steps: Optional[int] = None
    every_s: Optional[float] = None
    keep: Optional[int] = None
    background: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """Exactly one of ``gpt`` and ``factory`` is set."""

    zero: Zero
    optimizer: Union[AdamW, SGD]
    batch: Batch
    steps: int
    data: Data
    gpt: Optional[GPT] = None
    factory: Optional[Factory] = None
    precision: str = "fp32"
    seed: int = 0
    tensor: int = 1
    evaluate: Optional[Evaluate] = None
    checkpoint: Checkpointing = Checkpointing()
    recompute: Union[str, Tuple[int, ...]] = "none"  # none | block | numbers of blocks: activations made again
    activations: str = "whole"  # where what recompute stores waits: whole | partitioned | host
    nonfinite: str = "stop"  # a step whose gradients are no numbers: stop | skip
    split: Dict[str, str] = field(default_factory=dict)
    """A factory model's layers at a tensor degree above 1: name pattern → column | column/3 | row | vocabulary."""
    groups: Tuple[ParameterGroup, ...] = ()
    group_function: Optional[str] = None  # or ``module:function`` of the model that gives them
    weights: Optional[str] = None  # safetensors that the first attempt begins with: absolute, or inside the code
    policy: str = "zero"  # which engine trains; others stand beside ours later
