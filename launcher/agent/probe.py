"""The verb ``probe``: what a job would meet on this machine, for ``zerun cluster check``."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from . import environment, outlive
from .space import free_bytes

_LIMIT_S = 40.0
_TOLD_LINES = 4
# Runs in the ranks' Python, whatever its version: looks for modules without importing them.
_FACTS = """
import json, sys
from importlib import metadata, util
modules = sys.argv[1:]
versions = {}
for name in modules:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = "?" if util.find_spec(name) else None
print(json.dumps({"executable": sys.executable, "version": sys.version.split()[0], "modules": versions}))
"""


def probe(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{python, modules, resolve, path, setup?}`` → facts.

    ``python_problem`` is a sentence when the ranks' Python did not answer; ``unresolved`` lists names that
    this machine does not know; ``gpus`` is null where there is no nvidia-smi; ``began`` and ``now`` are this
    machine's clock at the first and the last moment of the answer.
    """
    began = time.time()
    facts = _python(str(request["python"]), [str(m) for m in request["modules"]], str(request.get("setup") or ""))
    facts.update(
        host=os.uname().nodename,
        agent_version=sys.version.split()[0],
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        gpus=_gpus(),
        free_bytes=free_bytes(str(request["path"])),
        writable=_writable(str(request["path"])),
        unresolved=[str(n) for n in request["resolve"] if not _resolves(str(n))],
        outlives=outlive.facts(),
        began=began,
        now=time.time(),
    )
    return facts


def _python(python: str, modules: List[str], setup: str) -> Dict[str, Any]:
    expanded = os.path.expanduser(python)
    done = _run([*environment.shell_after_setup(setup), expanded, "-c", _FACTS, *modules], environment.site(os.environ))
    if done is None:
        return {"python": None, "python_problem": f"{python}: no answer within {_LIMIT_S:g} s (with `setup`)"}
    lines = done.stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if done.returncode == 0 else None
    except (ValueError, IndexError):
        said = None
    if said is None:
        return {"python": None, "python_problem": _why_not(python, setup, done.returncode, done.stderr)}
    missing = [name for name, version in said["modules"].items() if version is None]
    return {
        "python": said["version"],
        "executable": said["executable"],
        "modules": said["modules"],
        "missing": missing,
        "python_problem": None,
    }


def _why_not(python: str, setup: str, status: int, stderr: str) -> str:
    """Why the ranks' Python did not answer, with what ``setup`` said: most often something is wrong there."""
    after = " after `setup`" if setup else ""
    name = os.path.expanduser(python)  # bash takes it for the script's own name: "python: line 3: module: not found"
    said = [line.replace(f"{name}: line ", "line ", 1) for line in stderr.splitlines() if line.strip()]
    last = said.pop() if said else f"exit {status}"
    if status in (126, 127) and f"{name}: " in last:
        last = "command not found" if status == 127 else "it cannot be run"
    told = [f"setup said: {line}" for line in said[-_TOLD_LINES:]] if setup else []
    return "\n".join([f"`{python}`{after}: {last}", *told])


def _run(argv: Sequence[str], env: Optional[Dict[str, str]] = None) -> "Optional[subprocess.CompletedProcess[str]]":
    try:
        return subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=_LIMIT_S,
            universal_newlines=True,
            errors="replace",
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> Optional[int]:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _gpus() -> Optional[List[str]]:
    if shutil.which("nvidia-smi") is None:
        return None
    done = _run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if done is None or done.returncode:
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _writable(path: str) -> bool:
    """Whether the folder can be written, or made."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):
        return False
