"""What only torch can write or read, done by an engine process: the launcher itself never loads torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..bundles import runtime_bundle
from ..contract.errors import Exit, JobFailed, NoSpace, UsageError
from ..contract.plain import open_file
from .export import Exported, Wish, write
from .moving import SPARE_BYTES, size
from .parts import beside

Notice = Callable[[str], None]


def export_dcp(
    checkpoint: Path, target: Path, wish: Wish, notice: Notice, progress: Callable[[int, int], None] | None = None
) -> Exported:
    """As ``export``, but in the form of torch.distributed.checkpoint.

    The same verified safetensors are written beside first and mapped from there, so twice the bytes must be free.
    """
    with beside(target, notice) as folder:
        plain = folder / ".weights"
        plain.mkdir()
        _, found = write(checkpoint, plain, wish, notice, progress, room=2)
        answer = in_engine({"kind": "dcp", "source": str(plain), "target": str(folder / ".dcp")})
        shutil.rmtree(plain)
        for file in (folder / ".dcp").iterdir():
            file.rename(folder / file.name)
        (folder / ".dcp").rmdir()
    return Exported(found.step, str(target), "dcp", tuple(answer["files"]), int(answer["bytes"]), found.tensors)


def import_state(source: Path, target: Path, most_bytes: int, notice: Notice) -> tuple[Exported, str]:
    """A plain torch state dict as safetensors in ``target``; also the prefix that was taken off its names."""
    try:
        with open_file(source) as file:
            needed = os.fstat(file.fileno()).st_size
    except OSError as problem:
        raise UsageError(f"{source} cannot be read: {problem.strerror}") from problem
    with beside(target, notice) as folder:
        free = shutil.disk_usage(folder).free
        notice(f"{source}: {size(needed)}; {size(free)} are free there")
        if needed + SPARE_BYTES > free:
            raise NoSpace(f"{target.parent}: {size(needed)} are to be written, {size(free)} are free")
        answer = in_engine(
            {"kind": "import", "source": str(source.resolve()), "target": str(folder), "most_bytes": most_bytes}
        )
    made = Exported(0, str(target), "safetensors", tuple(answer["files"]), int(answer["bytes"]), int(answer["tensors"]))
    return made, str(answer["prefix"])


def in_engine(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine process answers. ``ZERUN_TORCH_PYTHON`` names a Python with torch, where ours has none."""
    python = os.environ.get("ZERUN_TORCH_PYTHON") or sys.executable
    with tempfile.TemporaryDirectory(prefix="zerun-convert-") as folder:
        runtime = Path(folder) / "runtime.zip"
        runtime.write_bytes(runtime_bundle().data)
        try:
            done = subprocess.run(
                [python, str(runtime), "convert"], input=json.dumps(request).encode(), capture_output=True, check=False
            )
        except OSError as problem:
            raise UsageError(f"ZERUN_TORCH_PYTHON: {python} cannot be started: {problem.strerror}") from problem
    try:
        answer = json.loads(done.stdout)
    except ValueError as problem:
        last = "\n".join(done.stderr.decode(errors="replace").strip().splitlines()[-12:])
        raise JobFailed(f"the engine process ended with status {done.returncode} and no answer:\n{last}") from problem
    if not isinstance(answer, dict) or "error" in answer:
        kinds = {int(Exit.USAGE): UsageError, int(Exit.NO_SPACE): NoSpace}
        raise kinds.get(done.returncode, JobFailed)(str(answer["error"]), hint=answer.get("hint"))
    return answer
