"""What a job keeps in files of its own: outputs to collect, and checkpoints that only it can read.

Patterns are globs (``*``, ``?``, ``[…]`` within a name, ``**`` over folders). They begin in the job's working folder
(``RUN/code``), or with ``$ZERUN_RUN_DIR/`` in the run's own. Nothing is followed out of the run's folder: symbolic
links are passed over, and what the launcher keeps there itself is no job's.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

RUN_DIR = "$ZERUN_RUN_DIR/"
OURS = ("attempts", "checkpoints", "code", "data")
"""Folders of a run that are not the job's to name by ``$ZERUN_RUN_DIR/``; ``code`` is what patterns begin in."""


@dataclass(frozen=True)
class Foreign:
    """Checkpoints of the job's own: each match of ``pattern`` is one, a folder or a file.

    ``whole_when`` names the file that says that it is whole: inside the folder, or beside it where ``{}`` stands for
    its name. Without it a match is whole: whoever writes it renames it when it is done.
    """

    pattern: str
    whole_when: Optional[str] = None


def pattern_problem(pattern: str) -> Optional[str]:
    """What is wrong with a pattern, or None."""
    rest = pattern[len(RUN_DIR) :] if pattern.startswith(RUN_DIR) else pattern
    parts = rest.split("/")
    if not rest or rest.startswith(("/", "~", "$")) or any(part in ("", ".", "..") for part in parts):
        return f"{pattern!r} is no pattern inside the run; accepted: samples/**, or {RUN_DIR}out/*.png"
    if rest != pattern and (len(parts) == 1 or parts[0] in OURS or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", parts[0])):
        return f"{pattern!r} begins in the run's own folder: name a folder of your own there, {RUN_DIR}out/*"
    return None


def whole_when_problem(name: str) -> Optional[str]:
    if not name or "/" in name.replace("{}", "") or name in (".", "..") or name.startswith("-"):
        return f"{name!r} is no file's name; accepted: DONE (inside), or {{}}.done (beside it)"
    return None


def is_kept(name: str) -> bool:
    """Whether ``name``, relative to the run's folder, may be a file of the job's own: what comes from elsewhere is
    held against it before it is written here."""
    parts = name.split("/")
    inside = all(part not in ("", ".", "..") for part in parts) and name.isprintable()
    return (
        inside
        and len(parts) > 1
        and not parts[0].startswith((".", "-"))
        and (parts[0] == "code" or parts[0] not in OURS)
    )


def matches(run_dir: str, pattern: str) -> List[Tuple[str, os.stat_result]]:
    """What matches here: names relative to ``run_dir``, files and folders, in order; a link is neither."""
    own = pattern.startswith(RUN_DIR)
    parts = (pattern[len(RUN_DIR) :] if own else pattern).split("/")
    begin = "" if own else "code"
    found = {name: facts for name, facts in _walk(run_dir, begin, parts) if is_kept(name)}
    return sorted(found.items())


def _walk(run_dir: str, begin: str, parts: Sequence[str]) -> Iterator[Tuple[str, os.stat_result]]:
    """No recursion, and no folder twice for the same part: a job makes folders as deep and as many as it likes."""
    waiting, seen = [(begin, 0)], {(begin, 0)}
    while waiting:
        at, index = waiting.pop()
        head, last = parts[index], index == len(parts) - 1
        found = [(at, index + 1)] if head == "**" and not last else []
        for name, facts in _entries(run_dir, at):
            path = f"{at}/{name}" if at else name
            folder = stat.S_ISDIR(facts.st_mode)
            if head == "**":
                if folder:
                    found.append((path, index))
                elif last:
                    yield path, facts
            elif fnmatch.fnmatchcase(name, head) and (not name.startswith(".") or head.startswith(".")):
                if last:
                    yield path, facts
                elif folder:
                    found.append((path, index + 1))
        waiting += [item for item in found if item not in seen]
        seen.update(found)


def _entries(run_dir: str, at: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Plain files and folders; hidden ones too, which only a pattern that says so takes."""
    folder = os.path.join(run_dir, at)
    try:
        names = sorted(os.listdir(folder)) if not os.path.islink(folder) else []
    except OSError:
        return
    for name in names:
        try:
            facts = os.lstat(os.path.join(folder, name))
        except OSError:
            continue
        if (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)) and name != "__pycache__":
            yield name, facts


def outputs_here(run_dir: str, patterns: Sequence[str]) -> List[Dict[str, Any]]:
    """Files that match, without those that were shipped and are unchanged (their time is the epoch)."""
    found: Dict[str, Dict[str, Any]] = {}
    for pattern in patterns:
        for name, facts in matches(run_dir, pattern):
            if stat.S_ISREG(facts.st_mode):
                found[name] = _row(name, facts)
            else:
                found.update({row["path"]: row for row in _below(run_dir, name)})
    return [row for _, row in sorted(found.items()) if row["modified"] > 0]


def _below(run_dir: str, folder: str) -> List[Dict[str, Any]]:
    files = [(n, f) for n, f in _walk(run_dir, folder, ["**"]) if is_kept(n) and stat.S_ISREG(f.st_mode)]
    return [_row(name, facts) for name, facts in files]


def _row(name: str, facts: os.stat_result) -> Dict[str, Any]:
    return {"path": name, "bytes": facts.st_size, "modified": facts.st_mtime}


def foreign_here(run_dir: str, foreign: Optional[Foreign]) -> List[Dict[str, Any]]:
    """The job's own checkpoints that lie here, newest last: ``{name, step, whole, problem, bytes, files, written_at,
    marker}``.

    ``step`` is the last number in the name, None where there is none; ``marker`` the row of the file that makes it
    whole, where that is here.
    """
    found = []
    for name, facts in matches(run_dir, foreign.pattern) if foreign is not None else ():
        assert foreign is not None
        rows = _below(run_dir, name) if stat.S_ISDIR(facts.st_mode) else [_row(name, facts)]
        marker = marker_of(name, foreign.whole_when) if foreign.whole_when else None
        marked = None if marker is None else _plain_file(run_dir, marker)
        lacks = os.path.basename(marker) if marker is not None and marked is None else None
        numbers = re.findall(r"[0-9]+", os.path.basename(name))
        found.append(
            {
                "name": name,
                "step": int(numbers[-1]) if numbers and len(numbers[-1]) < 16 else None,
                "whole": lacks is None,
                "problem": None if lacks is None else f"{lacks} is not there: it was never finished",
                "bytes": sum(row["bytes"] for row in rows),
                "files": rows,
                "written_at": max([row["modified"] for row in rows], default=facts.st_mtime),
                "marker": marked,
            }
        )
    return sorted(found, key=lambda row: (row["step"] or 0, row["written_at"]))


def files_of(run_dir: str, name: str) -> List[Dict[str, Any]]:
    """The plain files of the checkpoint ``name`` that lie here, ``{path, bytes, modified}``; none where a link leads
    there."""
    path = os.path.join(run_dir, name)
    if not is_kept(name) or os.path.realpath(path) != os.path.join(os.path.realpath(run_dir), name):
        return []
    if os.path.isdir(path):
        return _below(run_dir, name)
    return [_row(name, os.lstat(path))] if os.path.isfile(path) else []


def _plain_file(run_dir: str, name: str) -> Optional[Dict[str, Any]]:
    """The row of a file, where that is there and no link; ``changed`` when it came to its place."""
    try:
        facts = os.lstat(os.path.join(run_dir, name))
    except OSError:
        return None
    return {**_row(name, facts), "changed": facts.st_ctime} if stat.S_ISREG(facts.st_mode) else None


def marker_of(name: str, whole_when: str) -> str:
    """The file that says that the checkpoint ``name`` is whole, relative to the run's folder as ``name`` is."""
    if "{}" in whole_when:
        return os.path.join(os.path.dirname(name), whole_when.replace("{}", os.path.basename(name)))
    return os.path.join(name, whole_when)
