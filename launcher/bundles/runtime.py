"""The runtime: agent, engine and contract in a zip that Python runs as it is. Inside it the package is called
``_zerun``, so that no folder of a user's, whatever its name, can stand in front of it."""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

from ..contract.errors import UsageError
from .blob import Bundle, named

_MAIN = """\
import sys

from _zerun.agent.main import main

raise SystemExit(main(sys.argv[1:]))
"""
_TRAVELS = ("contract", "agent", "engine")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the zip format's first moment: equal sources give equal bytes


def runtime_bundle() -> Bundle:
    """The zip that nodes run: the agent, the engine and the contract, and the module ``zerun``."""
    package = Path(__file__).parents[1]
    sources = {"__main__.py": _MAIN.encode(), "zerun.py": _public_module().read_bytes()}
    sources["_zerun/__init__.py"] = (package / "__init__.py").read_bytes()
    for room in _TRAVELS:
        for path in sorted((package / room).rglob("*.py")):
            sources[f"_zerun/{path.relative_to(package).as_posix()}"] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(sources):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, sources[name], compresslevel=6)
    return named(buffer.getvalue(), ".zip")


def _public_module() -> Path:
    spec = importlib.util.find_spec("zerun")
    if spec is None or spec.origin is None:
        raise UsageError("the module 'zerun' is not installed beside the package", hint="pip install zerun")
    return Path(spec.origin)
