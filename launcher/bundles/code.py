"""The job's own tree: what the working tree holds at the moment of submit. A file edited afterwards changes nothing."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..contract.bundle import SUFFIX, File, Link, Listing
from ..contract.errors import UsageError
from . import git
from .blob import Bundle, named
from .private import holders, masked, private_names
from .tree import Tree, Wish, find, leaves, shown


@dataclass(frozen=True)
class CodeBundle(Bundle):
    """The job's tree: ``data`` is its listing, ``contents`` the bytes that it names, by SHA-256.

    ``commit`` is None outside git; ``changed_files`` are those that differ from it.
    """

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
    contents: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    digests: tuple[str, ...] = field(default=(), repr=False)  # of every file that is no link

    @property
    def changed(self) -> int:
        return len(self.changed_files)

    def holds(self, path: str) -> bool:
        """Whether ``path``, relative to the root, travels."""
        return os.path.normpath(path) in self.files

    def sentence(self, sent: Mapping[str, Collection[str]] | None = None) -> str:
        """One line for whoever submits. ``sent``: by machine, the contents that had to be sent there."""
        words = [f"code: {_count(self.num_files, 'file')}, {told(self.num_bytes)}"]
        if self.in_git:
            plus = f" + {_count(self.changed, 'changed file')}" if self.changed else ""
            words.append(f"{f'commit {self.commit[:7]}' if self.commit else 'no commit yet'}{plus}")
        else:
            words.append(f"no git, all of {self.root}")
        words += [self._moved(sent)] if sent is not None else []
        private = private_names(sorted(self.files))
        if private:
            some = ", ".join(shown(name) for name in private[:3]) + (", …" if len(private) > 3 else "")
            words.append(f"with {some} (keys? a line in .zerunignore keeps them here)")
        return ", ".join(words)

    def _moved(self, sent: Mapping[str, Collection[str]]) -> str:
        """``1 of 214 files sent (3 kB of 12 MB)``; of several machines, what the one got that lacked most."""
        got = [
            (sum(digest in new for digest in self.digests), sum(len(self.contents[digest]) for digest in new))
            for new in sent.values()
        ]
        least, most = min(got, default=(0, 0)), max(got, default=(0, 0))
        if not most[0]:
            return "already there"
        if least[0] == len(self.digests):
            return "all sent"
        to = f" to each of {len(got)} nodes" if least == most else " to the node that lacked most"
        number, size = most
        words = f"{number} of {_count(self.num_files, 'file')} sent{to if len(got) > 1 else ''}"
        return f"{words} ({told(size)} of {told(self.num_bytes)})"

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
    taken = {name: found for name in tree.files if (found := _read(base, name)) is not None}
    tree.files = list(taken)
    total = sum(len(found.data) for found in taken.values())
    for name, secret in holders(((n, f.data) for n, f in taken.items() if f.target is None), secrets or {}):
        tree.notes.append(f"the value of the secret {secret} stands in {shown(name)}, which travels with the code")
    listing, contents = _listing(taken)
    bundle = named(listing.encode(), SUFFIX)
    state, diff, cut = _changes(tree, secrets or {})
    return CodeBundle(
        bundle.name, bundle.data, str(base), len(tree.files), total, tree.in_git, state.commit, state.branch,
        state.changed, tree.submodules, tuple(tree.notes), frozenset(tree.files), diff, cut,
        contents, tuple(file.digest for file in listing.files),
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
    sizes = []
    for name in files:
        with contextlib.suppress(FileNotFoundError):
            sizes.append(((base / name).lstat().st_size, name))
    sizes.sort()
    total = sum(size for size, _ in sizes)
    if total > limit:
        largest = ", ".join(f"{shown(name)} ({size} bytes)" for size, name in reversed(sizes[-5:]))
        raise UsageError(
            f"the code in {base} is {told(total)}, above the limit of {told(limit)}; largest: {largest}",
            hint="ignore them in .gitignore or .zerunignore, list them under code.exclude, or raise code.limit",
        )


class _Taken(NamedTuple):
    """A file, or with a ``target`` a link, as it was at the moment that it was read."""

    data: bytes = b""
    executable: bool = False
    target: str | None = None


def _read(base: Path, name: str) -> _Taken | None:
    """None when it is gone: it was there a moment ago, and anything may have taken its place."""
    path = base / name
    try:
        if path.is_symlink():
            target = os.readlink(path)
            if leaves(base.resolve(), path, target):
                raise _changed(name, "a link that leaves the tree")
            return _Taken(target=target)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if not stat.S_ISREG(mode):
                raise _changed(name, "no file (a pipe or a folder)")
            return _Taken(file.read(), bool(mode & 0o100))
    except FileNotFoundError:
        return None
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise _changed(name, "no file") from problem
        raise UsageError(
            f"the code's {shown(name)} cannot be read: {problem.strerror}",
            hint="make it readable, or keep it here by a line in .zerunignore or code.exclude",
        ) from problem


def _changed(name: str, what: str) -> UsageError:
    said = f"the code's {shown(name)} became {what} while the code was read"
    return UsageError(said, hint="submit again when nothing writes there, or keep it here by a line in .zerunignore")


def _listing(taken: Mapping[str, _Taken]) -> tuple[Listing, dict[str, bytes]]:
    """Names, modes and targets of links, and every content once. Owner, times and hard links of this machine stay."""
    found, links, contents = [], [], {}
    for name, (data, executable, target) in taken.items():
        if target is not None:
            links.append(Link(name, target))
            continue
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        found.append(File(name, digest, len(data), executable))
    return Listing(tuple(found), tuple(links)), contents
