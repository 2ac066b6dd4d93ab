"""The public names, under a module name that no folder of a user's shadows: ``from zerun import ZeroEngine``.

On the nodes the package travels as ``_zerun``; on the laptop it is installed as ``launcher``. Names are
looked up on first use, so that importing this loads neither torch nor anything of the launcher.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher import app
    from launcher.engine import ZeroEngine

__all__ = ["ZeroEngine", "app"]

_HOMES = {"ZeroEngine": ".engine", "app": ".app"}


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
