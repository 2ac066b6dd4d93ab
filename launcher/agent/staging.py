"""``stage_to: node_local``: a job's data, copied once a node to its own disk before the ranks start.

A copy is named after its digest, so that runs with equal data share it; it is proven after it was written, and
again whenever it is not the very file that was proven before (its size, modification time and inode say so).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional

from ..contract.data_files import DataFile
from ..contract.errors import NoSpace, UsageError, VerificationFailed, ZerunError
from ..contract.holdings import read_json
from ..contract.launch import LaunchSpec
from ..contract.plain import dumps, write_atomically
from . import environment
from .digest import copy_file, of_file
from .expand import expand_path
from .space import free_bytes

FOLDER = "zerun-data"
_SPARE_BYTES = 64 << 20
Say = Callable[[str], object]


def stage(spec: LaunchSpec, base: Mapping[str, str], code: str, say: Say) -> Dict[str, str]:
    """Copies what is not there yet. Returns the variable that tells the ranks where: path as written → copy.

    ``base`` is the environment after setup, in which ``paths.node_local`` is expanded; ``code`` the folder that
    relative paths begin in. Raises UsageError, NoSpace (before anything is copied) and VerificationFailed.
    """
    if not spec.stage:
        return {}
    folder = os.path.join(_node_local(spec, base), FOLDER)
    targets = {file.path: os.path.join(folder, _name(file)) for file in spec.stage}
    lacking = [file for file in spec.stage if not _is_proven(targets[file.path], file)]
    for file in spec.stage:
        if file not in lacking:
            say(f"data: {file.path} is at {targets[file.path]} already ({file.bytes} bytes)")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _check_room(folder, lacking)
        for file in lacking:
            _copy(spec, base, (os.path.join(code, file.path), targets[file.path]), file)
            say(f"data: {file.path} copied to {targets[file.path]} ({file.bytes} bytes, {file.digest})")
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"no space for the data in {folder}: {problem.strerror}") from problem
        raise ZerunError(f"the data could not be staged to {folder}: {problem}") from problem
    return {environment.STAGED: json.dumps(targets)}


def _node_local(spec: LaunchSpec, base: Mapping[str, str]) -> str:
    if not spec.node_local:
        raise UsageError("data.stage_to: node_local needs paths.node_local in the cluster's description")
    try:
        return expand_path(spec.node_local, {**base, **spec.env})
    except ValueError as problem:
        raise UsageError(f"paths.node_local: {problem}") from problem


def _name(file: DataFile) -> str:
    return f"{file.digest.partition(':')[2][:32]}-{os.path.basename(file.path)}"


def _mark(target: str) -> str:
    return f"{target}.proven"


def _identity(target: str) -> Optional[List[int]]:
    try:
        about = os.stat(target)
    except OSError:
        return None
    return [about.st_size, about.st_mtime_ns, about.st_ino]


def _is_proven(target: str, file: DataFile) -> bool:
    known, now = read_json(_mark(target)), _identity(target)
    return isinstance(known, dict) and now is not None and known == {"identity": now, "digest": file.digest}


def _check_room(folder: str, files: List[DataFile]) -> None:
    wanted, free = sum(file.bytes for file in files), free_bytes(folder)
    if wanted and free is not None and wanted + _SPARE_BYTES > free:
        raise NoSpace(f"{wanted} bytes of data are to be staged to {folder}, {free} are free")


def _copy(spec: LaunchSpec, base: Mapping[str, str], ends: "tuple[str, str]", file: DataFile) -> None:
    source, target = ends
    part = f"{target}.{os.getpid()}.part"
    try:
        found = _copied(spec, base, (source, part), file.digest.partition(":")[0])
        if found is None:  # no xxhash anywhere: the copy is held against its source
            copy_file(source, part)
            right = of_file(source, "sha256") == of_file(part, "sha256")
        else:
            right = found == file.digest
        if not right:
            told = f" (it is {found})" if found else ""
            raise VerificationFailed(
                f"{source}, copied to this node, is not {file.digest}, which it was when the job was submitted{told}"
            )
        os.replace(part, target)
        write_atomically(_mark(target), dumps({"identity": _identity(target), "digest": file.digest}))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _copied(spec: LaunchSpec, base: Mapping[str, str], ends: "tuple[str, str]", algorithm: str) -> Optional[str]:
    """Copied and read again by the ranks' Python; its digest, None when that has no such algorithm."""
    request = {"files": {ends[1]: algorithm}, "copy": {"source": ends[0], "target": ends[1]}}
    own = {**base, **spec.env}
    try:
        python = environment.resolve(spec.python, own, os.path.dirname(ends[1]))
    except UsageError:  # inside a container perhaps
        return None
    done = subprocess.run(
        [python, spec.runtime, "digest"],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment.encoded(own),
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    if "error" in answer:
        raise NoSpace(str(answer["error"])) if done.returncode == 6 else ZerunError(str(answer["error"]))
    found = answer["digests"][ends[1]]
    return None if found is None else str(found)
