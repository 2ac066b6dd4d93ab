"""Shipped code that no run needs any more: what goes from ``.blobs`` when a run is removed.

A submit sends code before its run has a folder. So what is younger than a day stays whoever names it, and a submit
gives what it finds there and needs a new date (agent.expand.look, bundles.keep).
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import Any, Dict, Iterator, NamedTuple, Optional, Sequence, Set

from .bundle import SUFFIX, read_listing
from .errors import VerificationFailed
from .folder import blob, content, is_safe_name
from .holdings import attempt_numbers, names_in
from .plain import loads, read_file

YOUNG_S = 86400.0
_AGEING_S = YOUNG_S / 2  # from then on it is given a new date: it must not become old before its run has a folder


class Shipped(NamedTuple):
    path: str
    bytes: int


def unused(runs: str, without: str) -> Sequence[Shipped]:
    """Files of shipped code below ``runs`` that no run but ``without`` was made with, older than a day.

    None at all where a run's own files cannot be read: it may need any of them.
    """
    named = _named_by_runs(runs, without)
    if named is None:
        return ()
    needed = {str(blob(runs, name, "")) for name in named}
    for name in named:
        if name.endswith(SUFFIX):
            try:
                needed |= {str(content(runs, digest)) for digest in read_listing(blob(runs, name, "")).sizes}
            except (FileNotFoundError, VerificationFailed):
                continue  # it is sent anew, and then what it names is too
            except OSError:
                return ()
    return [found for found in _old(runs) if found.path not in needed]


def clear_unused(runs: str, without: str) -> int:
    """Removes what :func:`unused` names; bytes that are free again. What a submit took up meanwhile stays."""
    freed = 0
    for found in unused(runs, without):
        with contextlib.suppress(OSError):
            if _is_old(os.lstat(found.path)):
                os.unlink(found.path)
                freed += found.bytes
    return freed


def touch(path: str) -> None:
    """What is needed again is young again; who may not say so has no scratch disk that purges, and removes nothing."""
    with contextlib.suppress(OSError):
        if time.time() - os.lstat(path).st_mtime > _AGEING_S:
            os.utime(path)


def _named_by_runs(runs: str, without: str) -> Optional[Set[str]]:
    """Names in ``.blobs`` that the runs' own files tell of; None when something of a run cannot be read."""
    found: Set[str] = set()
    try:
        for run in os.listdir(runs):
            folder = os.path.join(runs, run)
            if run == without or not is_safe_name(run) or not os.path.isdir(folder):
                continue
            about = _read(os.path.join(folder, "run.json"))
            code = about.get("code") or {}
            paths = [code.get("name")]
            for number in attempt_numbers(folder):
                launch = _read(os.path.join(folder, "attempts", str(number), "launch.json"))
                paths += [launch.get("runtime"), launch.get("code")]
            found |= {os.path.basename(path) for path in paths if path}
    except (OSError, ValueError, AttributeError, TypeError):
        return None
    return found


def _read(path: str) -> Dict[str, Any]:
    """{} where there is no such file: a folder of another kind, or an attempt that is not sent yet."""
    try:
        found = loads(read_file(path))
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no mapping")
    return found


def _old(runs: str) -> Iterator[Shipped]:
    top = str(blob(runs, "x", "").parent)
    contents = os.path.join(top, "contents")
    for folder in (top, *(os.path.join(contents, name) for name in names_in(contents))):
        for name in names_in(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                about = os.lstat(path)
                if stat.S_ISREG(about.st_mode) and _is_old(about):
                    yield Shipped(path, about.st_size)


def _is_old(about: os.stat_result) -> bool:
    return time.time() - about.st_mtime > YOUNG_S
