"""Beside floor 0, on every rank: ZeRO partitioning and the training loop. The one room that knows torch.

Importing this loads no torch; ``ZeroEngine``, ``EngineConfig`` and ``Ranks`` are looked up on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EngineConfig
    from .ranks import Ranks
    from .zero import ZeroEngine

__all__ = ["EngineConfig", "Ranks", "ZeroEngine"]

_HOMES = {"ZeroEngine": ".zero", "EngineConfig": ".config", "Ranks": ".ranks"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
