"""What git says about a tree. Reads only: no lock is taken, no hook, filter or external diff of the repository runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..contract.errors import UsageError

DIFF_BYTES = 1 << 20
_DIFF_NAMES = 1000
_SETTINGS = ("-c", "core.fsmonitor=false", "-c", "core.quotePath=false", "--literal-pathspecs")
_OF_A_HOOK = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE")


@dataclass(frozen=True)
class State:
    """``commit`` is None before the first one, ``branch`` None where HEAD is detached. ``changed`` names what
    differs from the commit: modified, deleted, untracked; relative to the folder that was asked about."""

    commit: str | None
    branch: str | None
    changed: tuple[str, ...]


def root_of(folder: Path) -> Path | None:
    """The working tree that ``folder`` is in; None outside git.

    Raises UsageError where there is one that git will not read: what it ignores would travel otherwise.
    """
    done = _run(folder, "rev-parse", "--show-toplevel")
    if done is not None and done.returncode == 0 and done.stdout.strip():
        return Path(os.fsdecode(done.stdout.removesuffix(b"\n")))
    marked = next((at for at in (folder, *folder.parents) if (at / ".git").exists()), None)
    if marked is None:
        return None
    if done is None:
        raise UsageError(
            f"{marked} is a git tree, and git is not installed here", hint="install git, or give code.root"
        )
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    raise UsageError(f"{marked} is a git tree that git will not read: {said[0] if said else 'no reason given'}")


def files(base: Path) -> list[str]:
    """Tracked and untracked-but-not-ignored names below ``base``. Submodules stand as one name, without files."""
    return _names(base, "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def ignored(base: Path) -> list[str]:
    """Every file below ``base`` that git ignores."""
    return _names(base, "ls-files", "-z", "--others", "--ignored", "--exclude-standard")


def submodules(base: Path) -> dict[str, str]:
    """Name → commit of every submodule in the index below ``base``, checked out or not."""
    found = {}
    for row in _out(base, "ls-files", "-z", "--stage").split(b"\0"):
        about, _, name = row.partition(b"\t")
        if about.startswith(b"160000 "):
            found[os.fsdecode(name)] = about.split()[1].decode()
    return found


def state(base: Path) -> State:
    head = _run(base, "rev-parse", "--verify", "--quiet", "HEAD")
    commit = head.stdout.decode().strip() if head is not None and head.returncode == 0 else None
    branch = _run(base, "symbolic-ref", "--short", "--quiet", "HEAD")
    on = os.fsdecode(branch.stdout.strip()) if branch is not None and branch.returncode == 0 else None
    prefix = os.fsdecode(_out(base, "rev-parse", "--show-prefix").removesuffix(b"\n"))
    rows = _out(base, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--", ".").split(b"\0")
    names = [os.fsdecode(row[3:]) for row in rows if row]
    return State(commit, on, tuple(sorted(name.removeprefix(prefix) for name in names)))


def diff(base: Path, names: Sequence[str]) -> tuple[bytes, bool]:
    """What ``names`` have that their commit has not, at most DIFF_BYTES, and whether it was cut there.

    Files that are not text stand as one line; untracked ones are not in it.
    """
    if not names:
        return b"", False
    some = names[:_DIFF_NAMES]  # an argument list has its limits too
    argv = ["git", "-C", str(base), *_SETTINGS, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv"]
    spoken = [*argv, "--no-renames", "--submodule=short", "--relative", "--", *some]
    with subprocess.Popen(
        spoken, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    ) as process:
        assert process.stdout is not None
        found = process.stdout.read(DIFF_BYTES + 1)
        if len(found) > DIFF_BYTES:
            process.kill()
    return found[:DIFF_BYTES], len(found) > DIFF_BYTES or len(some) < len(names)


def _names(base: Path, *words: str) -> list[str]:
    return sorted({os.fsdecode(name) for name in _out(base, *words).split(b"\0") if name})


def _out(base: Path, *words: str) -> bytes:
    done = _run(base, *words)
    if done is None or done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip() if done is not None else "it is not installed"
        raise UsageError(f"git {words[0]} in {base} failed: {said}")
    return done.stdout


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes] | None:
    """None when git is not installed."""
    argv = ["git", "-C", str(folder), *_SETTINGS, *words]
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=_environment())
    except FileNotFoundError:
        return None


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_HOOK}
    return {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
