"""Working precisions, and the loss scale of fp16.

Parameters are held, gathered and used in the working precision; the optimizer updates an fp32 master.
fp16 gradients underflow, so the loss is multiplied by a scale that halves whenever a gradient overflows
(that step is skipped, by all ranks, because they judge by the one global norm) and doubles after a
number of steps that went well. The state is two numbers; both are in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""fp32 is not here: it leaves the model's own dtype alone."""


def working_dtype(precision: str, own: torch.dtype) -> torch.dtype:
    """What a floating-point tensor of dtype ``own`` is held in."""
    return DTYPES.get(precision, own) if own.is_floating_point else own


def gradient_dtype(name: str, precision: str) -> torch.dtype | None:
    """The accumulated gradient's dtype, or None for the optimizer state's."""
    return None if name == "fp32" else DTYPES[precision]


@dataclass
class LossScale:
    """1 for all but fp16. ``smallest``: below it the gradient itself is not finite, which scaling cannot mend."""

    value: float = 1.0
    good_steps: int = 0
    adapts: bool = False
    grow_after: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    @classmethod
    def of(cls, precision: str) -> LossScale:
        return cls(value=2.0**16, adapts=True) if precision == "fp16" else cls()

    def went_well(self) -> None:
        if not self.adapts:
            return
        self.good_steps += 1
        if self.good_steps >= self.grow_after:
            self.value, self.good_steps = min(self.value * 2, self.largest), 0

    def overflowed(self) -> bool:
        """Halves the scale; False when it is as small as it gets, so that the overflow is real."""
        if not self.adapts or self.value <= self.smallest:
            return False
        self.value, self.good_steps = max(self.value / 2, self.smallest), 0
        return True
