"""What a :class:`ZeroEngine` is made from: the part of a train config that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Union

from ..contract.bounds import NOT_NEGATIVE, OPTIMIZER
from ..contract.errors import UsageError
from ..contract.plain import PlainError, from_plain
from ..contract.train import SGD, AdamW, TrainConfig, Zero
from .comm.choose import READ, SEND

PRECISIONS = ("fp32", "bf16", "fp16")
RESHARD = ("keep_last", "after_forward", "keep")


@dataclass(frozen=True)
class EngineConfig:
    """``accumulation`` micro-steps make a step; ``nonfinite`` gradients stop the run or skip the step.

    ``precision`` bf16 and fp16 hold and gather the parameters in 16 bits and update an fp32 master; fp32
    leaves the model's own dtype (also float64). fp16 scales the loss by a factor that adapts.
    """

    zero: Zero
    optimizer: Union[AdamW, SGD]
    accumulation: int = 1
    precision: str = "fp32"
    nonfinite: str = "stop"  # stop | skip
    recompute: Union[str, tuple[int, ...]] = "none"  # none | block | numbers of blocks
    activations: str = "whole"  # whole | partitioned (over the tensor group) | host: what recompute stores

    def __post_init__(self) -> None:
        if self.zero.stage not in (0, 1, 2, 3):
            raise UsageError(f"zero.stage is {self.zero.stage}; accepted are 0, 1, 2 and 3")
        if self.precision not in PRECISIONS:
            raise UsageError(f"precision is {self.precision!r}; accepted are {', '.join(PRECISIONS)}")
        if self.zero.gradient_dtype not in ("fp32", self.precision):
            raise UsageError(
                f"zero.gradient_dtype is {self.zero.gradient_dtype!r}; accepted are fp32 and the precision "
                f"itself ({self.precision})"
            )
        if self.zero.reduce_every not in (None, "micro_step", "step"):
            raise UsageError(f"zero.reduce_every is {self.zero.reduce_every!r}; accepted are micro_step and step")
        if self.zero.bucket_bytes < 1:
            raise UsageError(f"zero.bucket_bytes is {self.zero.bucket_bytes}; at least one byte is needed")
        _check_gathering(self.zero)
        _check_sums(self)
        if isinstance(self.recompute, str) and self.recompute not in ("none", "block"):
            raise UsageError(f"recompute is {self.recompute!r}; accepted are none, block and numbers of blocks")
        if self.activations not in ("whole", "partitioned", "host"):
            raise UsageError(f"activations is {self.activations!r}; accepted are whole, partitioned and host")
        _check_optimizer(self.optimizer)
        if isinstance(self.optimizer, SGD) and self.optimizer.nesterov and self.optimizer.momentum <= 0:
            raise UsageError("optimizer.nesterov needs a momentum above 0")
        if self.accumulation < 1:
            raise UsageError(f"accumulation is {self.accumulation}; at least 1 is needed")
        if self.nonfinite not in ("stop", "skip"):
            raise UsageError(f"nonfinite is {self.nonfinite!r}; accepted are stop and skip")

    @property
    def reduces_every_micro_step(self) -> bool:
        chosen = self.zero.reduce_every or ("step" if self.zero.stage < 2 else "micro_step")
        return chosen == "micro_step"

    @classmethod
    def of(cls, config: ConfigLike) -> EngineConfig:
        """From an EngineConfig, a TrainConfig, or a mapping of an EngineConfig's keys::

        {"zero": {"stage": 2}, "optimizer": {"lr": 3e-4, "clip": 1.0}, "accumulation": 4}

        An optimizer with a ``momentum`` is SGD, any other AdamW; a ``kind`` may say which. Raises :class:`UsageError`.
        """
        if isinstance(config, EngineConfig):
            return config
        if isinstance(config, TrainConfig):
            return cls(
                config.zero,
                config.optimizer,
                config.batch.accumulation,
                config.precision,
                nonfinite=config.nonfinite,
                recompute=config.recompute,
                activations=config.activations,
            )
        try:
            return from_plain(cls, config, "config")
        except PlainError as error:
            # In the message: a traceback shows a hint from Python 3.11 on.
            raise UsageError(f"{error}; {error.hint}" if error.hint else str(error)) from None

    def with_stage(self, stage: int) -> EngineConfig:
        return replace(self, zero=replace(self.zero, stage=stage))


def _check_optimizer(optimizer: AdamW | SGD) -> None:
    """By the bounds that a job's description is held to (``contract.bounds``)."""
    for key, bounds in OPTIMIZER.items():
        given = getattr(optimizer, key, None)
        if key == "betas" and given is not None and len(given) != 2:
            raise UsageError(f"optimizer.betas has {len(given)} numbers; accepted: two, [0.9, 0.95]")
        for value in given if isinstance(given, (list, tuple)) else () if given is None else (given,):
            problem = bounds.problem(value)
            if problem:
                raise UsageError(f"optimizer.{key}: {problem}")
    if optimizer.schedule not in ("cosine", "constant"):
        raise UsageError(f"optimizer.schedule is {optimizer.schedule!r}; accepted are cosine and constant")


def checked_rate(key: str, value: Any) -> float:
    """A learning rate that is set between steps, where a schedule may begin at 0; also a tensor's or numpy's number."""
    value = value if isinstance(value, str) else getattr(value, "item", lambda: value)()
    problem = NOT_NEGATIVE.problem(value)
    if problem:
        raise UsageError(f"{key}: {problem}")
    return float(value)


def _check_gathering(zero: Zero) -> None:
    """What a plain mapping may have wrong of what stage 3 gathers, and when."""
    if zero.reshard not in RESHARD:
        raise UsageError(f"zero.reshard is {zero.reshard!r}; accepted are {', '.join(RESHARD)}")
    if zero.overlap_gather and zero.stage not in (1, 2):
        raise UsageError(
            f"zero.overlap_gather goes with stages 1 and 2, not with {zero.stage}",
            hint="stage 0 has nothing to gather after its step, stage 3 gathers in forward anyhow",
        )
    if zero.prefetch < 0:
        raise UsageError(f"zero.prefetch is {zero.prefetch}; at least 0 is needed")
    rule = zero.unit
    if rule is not None and sum(map(bool, (rule.classes, rule.names, rule.size_bytes))) != 1:
        raise UsageError(f"zero.unit is {rule}; exactly one of classes, names and size_bytes is needed, above 0")


def _check_sums(config: EngineConfig) -> None:
    """How gradients are summed: over which ranks, by whom."""
    zero = config.zero
    if zero.replicas < 1:
        raise UsageError(f"zero.replicas is {zero.replicas}; at least 1 is needed")
    if zero.reduce_with not in ("ordered", "native"):
        raise UsageError(f"zero.reduce_with is {zero.reduce_with!r}; accepted are ordered and native")
    if zero.same_host not in (READ, SEND):
        raise UsageError(f"zero.same_host is {zero.same_host!r}; accepted are {READ} and {SEND}")
    if zero.reduce_with == "native" and (zero.stage or zero.replicas > 1 or config.reduces_every_micro_step):
        raise UsageError(
            "zero.reduce_with: native is the library's all-reduce of whole gradients over all ranks",
            hint="it goes with stage 0 alone, without replicas, and with reduce_every: step",
        )


ConfigLike = Union[EngineConfig, TrainConfig, Mapping[str, Any]]
