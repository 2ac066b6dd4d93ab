"""What a user names as ``module:function``, found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from ..contract.errors import UsageError


def resolve(name: str, what: str) -> Callable[..., Any]:
    """The object that ``module:function`` names in the shipped code."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"{what} is {name!r}; expected module:function")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(f"{what}: no module {error.name!r} in the shipped code or the cluster's Python") from error
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{what}: module {module} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{what}: {name} is no function")
    called: Callable[..., Any] = found
    return called
