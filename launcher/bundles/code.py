"""The job's own tree: what the working tree holds at the moment of submit. A file edited afterwards changes nothing."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract.errors import UsageError
from . import git
from .blob import Bundle, named
from .private import holders, masked, private_names
from .tree import Tree, Wish, find, shown


@dataclass(frozen=True)
class CodeBundle(Bundle):
    """The job's tree. ``commit`` is None outside git; ``changed_files`` are those that differ from it."""

    root: str = ""
    num_files: int = 0
    num_bytes: int = 0
    in_git: bool = False
    commit: str | None = None
    branch: str | None = None
    changed_files: tuple[str, ...] = ()
    submodules: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    files: frozenset[str] = field(default=frozenset(), repr=False)  # names below ``root``
    diff: bytes = field(default=b"", repr=False)
    diff_cut: bool = False

    @property
    def changed(self) -> int:
        return len(self.changed_files)

    def holds(self, path: str) -> bool:
        """Whether ``path``, relative to the root, travels."""
        return os.path.normpath(path) in self.files

    def sentence(self, moved: str = "") -> str:
        """One line for whoever submits; ``moved`` says what became of it (``sent``, ``already there``)."""
        words = [f"code: {_count(self.num_files, 'file')}, {told(self.num_bytes)}"]
        if self.in_git:
            plus = f" + {_count(self.changed, 'changed file')}" if self.changed else ""
            words.append(f"{f'commit {self.commit[:7]}' if self.commit else 'no commit yet'}{plus}")
        else:
            words.append(f"no git, all of {self.root}")
        words += [moved] if moved else []
        private = private_names(sorted(self.files))
        if private:
            some = ", ".join(shown(name) for name in private[:3]) + (", …" if len(private) > 3 else "")
            words.append(f"with {some} (keys? a line in .zerunignore keeps them here)")
        return ", ".join(words)

    def about(self) -> dict[str, Any]:
        """``code.json``: which bytes, from which commit, and what differed from it."""
        return {
            "bundle": self.name,
            "root": self.root,
            "files": self.num_files,
            "bytes": self.num_bytes,
            "commit": self.commit,
            "branch": self.branch,
            "dirty": bool(self.changed_files),
            "changed": list(self.changed_files),
            "submodules": dict(self.submodules),
            "notes": list(self.notes),
            "diff_bytes": len(self.diff),
            "diff_cut": self.diff_cut,
        }


def code_bundle(
    folder: Path, *, root: str | None = None, wish: Wish = Wish(), limit: int, without: Path | None = None,
    secrets: Mapping[str, str] | None = None,
) -> CodeBundle:  # fmt: skip
    """The tree that a job in ``folder`` ships, at most ``limit`` bytes before compression.

    ``root`` (relative to ``folder``) names it; otherwise it is the git root of ``folder``, or ``folder``
    itself outside git. ``tree.find`` says which of its files. ``secrets`` are values that must not be seen: a file
    that holds one is named in the notes, and the kept diff has their names instead.

    Raises UsageError when it is larger than ``limit``, naming the five largest files; and for a file that cannot
    be read.
    """
    base = code_root(folder, root)
    tree = find(base, wish, without)
    _check_size(base, tree.files, limit)
    data = {name: _read(base, name) for name in tree.files}
    total = sum(len(d) for d in data.values() if d is not None)
    for name, secret in holders(((n, d) for n, d in data.items() if d is not None), secrets or {}):
        tree.notes.append(f"the value of the secret {secret} stands in {shown(name)}, which travels with the code")
    bundle = named(_tar(base, data), ".tar.gz")
    state, diff, cut = _changes(tree, secrets or {})
    return CodeBundle(
        bundle.name, bundle.data, str(base), len(tree.files), total, tree.in_git, state.commit, state.branch,
        state.changed, tree.submodules, tuple(tree.notes), frozenset(tree.files), diff, cut,
    )  # fmt: skip


def code_root(folder: Path, root: str | None = None) -> Path:
    """The folder that :func:`code_bundle` ships."""
    start = (folder / root).resolve() if root else folder.resolve()
    if not start.is_dir():
        raise UsageError(f"code.root {root!r}: {start} is no folder")
    return start if root else git.root_of(start) or start


def told(num_bytes: int) -> str:
    """``120 kB``."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _changes(tree: Tree, secrets: Mapping[str, str]) -> tuple[git.State, bytes, bool]:
    """What differs from the commit, of what travels or was deleted; files of keys are named, never shown."""
    if not tree.in_git:
        return git.State(None, None, ()), b"", False
    found, travels = git.state(tree.base), set(tree.files)
    here = tuple(n for n in found.changed if n in travels or n in tree.submodules or not (tree.base / n).exists())
    if found.commit is None:
        return git.State(None, found.branch, here), b"", False
    private = set(private_names(here))
    diff, cut = git.diff(tree.base, [n for n in here if n not in private])
    return git.State(found.commit, found.branch, here), masked(diff, secrets), cut


def _check_size(base: Path, files: Sequence[str], limit: int) -> None:
    sizes = sorted(((base / f).lstat().st_size, f) for f in files)
    total = sum(size for size, _ in sizes)
    if total > limit:
        largest = ", ".join(f"{shown(name)} ({size} bytes)" for size, name in reversed(sizes[-5:]))
        raise UsageError(
            f"the code in {base} is {told(total)}, above the limit of {told(limit)}; largest: {largest}",
            hint="ignore them in .gitignore or .zerunignore, list them under code.exclude, or raise code.limit",
        )


def _read(base: Path, name: str) -> bytes | None:
    """None for a link."""
    path = base / name
    try:
        return None if path.is_symlink() else path.read_bytes()
    except OSError as problem:
        raise UsageError(
            f"the code's {shown(name)} cannot be read: {problem.strerror}",
            hint="make it readable, or keep it here by a line in .zerunignore or code.exclude",
        ) from problem


def _tar(base: Path, files: Mapping[str, bytes | None]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, data in files.items():
            path = base / name
            info = tarfile.TarInfo(name)  # by hand: owner, times and hard links of this machine stay here
            if data is None:
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(info)
                continue
            info.size = len(data)
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
