"""The public names, under a module name that no folder of a user's shadows: ``from zerun import ZeroEngine``.

On the nodes the package travels as ``_zerun``; on the laptop it is installed as ``launcher``. Names are
looked up on first use, so that importing this loads neither torch nor anything of the launcher. What each
is for: docs/zero.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher import app
    from launcher.contract.train import SGD, AdamW, Units, Zero
    from launcher.engine import EngineConfig, Ranks, ZeroEngine
    from launcher.engine.comm import connect
    from launcher.engine.tensor.by_name import split_layers
    from launcher.engine.watching.trace import Trace

__all__ = [
    "SGD",
    "AdamW",
    "EngineConfig",
    "Ranks",
    "Trace",
    "Units",
    "Zero",
    "ZeroEngine",
    "app",
    "connect",
    "split_layers",
]

_HOMES = {
    "ZeroEngine": ".engine",
    "EngineConfig": ".engine",
    "Ranks": ".engine",
    "Zero": ".contract.train",
    "Units": ".contract.train",
    "AdamW": ".contract.train",
    "SGD": ".contract.train",
    "Trace": ".engine.watching.trace",
    "connect": ".engine.comm",
    "split_layers": ".engine.tensor.by_name",
    "app": ".app",
}


def _package() -> str:
    try:
        importlib.import_module("_zerun")
    except ModuleNotFoundError:
        return "launcher"
    return "_zerun"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zerun' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = importlib.import_module(_HOMES[name], _package())
    return module if name == "app" else getattr(module, name)
