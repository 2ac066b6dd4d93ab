"""Which numbers an optimizer's settings may be: what descriptions and the engine's Python API both hold them to."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, Optional


class Bounds(NamedTuple):
    """``low ≤ value < high``, or ``low < value < high``."""

    low: float
    high: float = math.inf
    low_open: bool = False

    def problem(self, value: Any) -> Optional[str]:
        """What is wrong with ``value``, with what is accepted; None where nothing is."""
        accepted = f"accepted: {'more than' if self.low_open else 'at least'} {self.low:g}"
        accepted += "" if self.high == math.inf else f" and less than {self.high:g}"
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"{value!r:.80} is no number; {accepted}"
        found = float(value)
        if not math.isfinite(found):
            return f"{found:g} is not finite; {accepted}"
        if not (self.low < found if self.low_open else self.low <= found) or found >= self.high:
            return f"{found:g} is out of range; {accepted}"
        return None


POSITIVE = Bounds(0.0, low_open=True)
NOT_NEGATIVE = Bounds(0.0)
FRACTION = Bounds(0.0, 1.0)

OPTIMIZER = {
    "lr": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "betas": FRACTION,  # each of the two
    "eps": POSITIVE,
    "momentum": FRACTION,
    "clip": POSITIVE,
    "warmup": NOT_NEGATIVE,
    "lr_floor": NOT_NEGATIVE,
}
"""By key of ``train.AdamW`` and ``train.SGD``."""

GROUP = {"lr": POSITIVE, "lr_scale": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE}
"""By key of a group of parameters."""
