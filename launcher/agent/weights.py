"""The verb ``weights``: which tensors lie in a folder of safetensors here. Headers alone are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

from ..contract.weights import read_weights


def weights(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{path}`` → ``{tensors: {name: [tag, shape, file]}}``; UsageError says what is missing or not whole."""
    found = read_weights(Path(str(request["path"])))
    return {"tensors": {name: [about.tag, list(about.shape), str(about.file)] for name, about in found.items()}}
