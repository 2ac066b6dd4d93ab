"""The verb ``expand``: ``~`` and ``$NAME`` in a path become what they are on this machine.

This file is also sent to a machine as it is, and run there before anything else of ours is on it
(``look``): so it imports nothing of ours and says its errors as ``{"error", "hint"}`` itself.
"""

import contextlib
import json
import os
import re
import stat
import sys
import time
from typing import Any, Dict, Iterable, List, Mapping, Optional

_MANY = 64
_OLD_S = 43200.0  # half of what a removal passes over: what is younger still is when the run's folder stands
_NAME = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


def expand_path(path: str, environment: Optional[Mapping[str, str]] = None) -> str:
    """``~`` or ``~/…`` at the beginning and ``$NAME`` or ``${NAME}`` anywhere; everything else is literal.

    Names are looked up in ``environment`` (left out: this process's own). A value is not expanded again.
    Raises ValueError for a name that is not set here, and for a path that is not absolute in the end.
    """

    def value(match: "re.Match[str]") -> str:
        name = match.group(1) or match.group(2)
        found = (os.environ if environment is None else environment).get(name)
        if found is None and name in ("USER", "LOGNAME"):
            import pwd

            found = pwd.getpwuid(os.getuid()).pw_name
        if not found:
            raise ValueError(f"{path}: ${name} is not set there")
        return found

    whole = path
    if path == "~" or path.startswith("~/"):
        whole = os.path.expanduser("~") + path[1:]
    elif path.startswith("~"):
        raise ValueError(f"{path}: only one's own home is expanded; write the path in full")
    whole = _NAME.sub(value, whole)
    if not os.path.isabs(whole):
        raise ValueError(f"{path} is {whole} there, which is no absolute path")
    return os.path.normpath(whole)


def expand(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{paths}`` → ``{paths}``, each expanded."""
    return {"paths": [expand_path(str(p)) for p in request["paths"]]}


def look(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{runs, literal, blobs, contents?}`` → where runs lie here, which of the shipped blobs are here, which
    ``contents`` of a shipped tree are not, and the clock.

    ``literal``: ``runs`` is a folder as it is called, not a path to be expanded.
    """
    if sys.version_info < (3, 9):
        found = ".".join(str(n) for n in sys.version_info[:3])
        return {"error": f"agent_python is Python {found}", "hint": "name a Python of 3.9 or newer as agent_python"}
    now = time.time()
    runs = str(request["runs"]) if request.get("literal") else expand_path(str(request["runs"]))
    have = [b for b in request["blobs"] if _is_whole(os.path.join(runs, ".blobs", b))]
    paths = [os.path.join(runs, ".blobs", "contents", c[:2], c) for c in request.get("contents", ())]
    lacking = [os.path.basename(path) for path, whole in zip(paths, _are_whole(paths)) if not whole]
    return {"runs": runs, "have": have, "lacking": lacking, "now": now}


def _are_whole(paths: List[str]) -> Iterable[bool]:
    """Several at once where there are many: opening a file on a cluster's disk is mostly waiting for it."""
    if len(paths) < _MANY:
        return map(_is_whole, paths)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_is_whole, paths))


def _is_whole(path: str) -> bool:
    """Whether the file holds what its name, a SHA-256, says: one that a power cut emptied is sent again."""
    import hashlib

    digest = hashlib.sha256()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)  # a FIFO would be waited for without end
        with open(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                return False
            # Scratch disks purge by age, and what a job that queues needs has just become needed again. Said before
            # it is read: a removal that has just found it old takes it meanwhile, and then it is gone at the end.
            old = time.time() - facts.st_mtime > _OLD_S
            if old:
                with contextlib.suppress(OSError):
                    os.utime(path)
            for data in iter(lambda: file.read(1 << 20), b""):
                digest.update(data)
        if old and os.lstat(path).st_ino != facts.st_ino:
            return False
    except OSError:
        return False
    return os.path.basename(path).partition(".")[0] == digest.hexdigest()


if __name__ == "__main__":
    try:
        answer = look(json.load(sys.stdin))
    except (OSError, ValueError, KeyError) as problem:
        answer = {"error": str(problem), "hint": None}
    sys.stdout.write(json.dumps(answer) + "\n")
