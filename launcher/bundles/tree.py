"""Which files of a tree travel.

Under git: what is tracked or untracked-but-not-ignored, submodules that are checked out included; outside git
everything but a few folders that never belong. Less what ``.zerunignore`` names; more what ``code.include``
names; less, whatever else was said, what ``code.exclude`` names. All three in .gitignore's syntax.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.errors import UsageError
from ..contract.plain import read_file
from . import git

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".zerunignore"
_NEVER = (".git", "__pycache__", ".venv", "node_modules", "runs")  # outside git only; git has its own ignore rules


@dataclass(frozen=True)
class Wish:
    """What a description says about the tree: patterns in .gitignore's syntax."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class NothingMatches(UsageError):
    """Patterns of ``code.include`` that no file matches: by their number in the list, what to say of each."""

    def __init__(self, said: Mapping[int, str]) -> None:
        self.said = dict(said)
        super().__init__("\n".join(said.values()), hint="patterns are .gitignore's, and begin at the code's root")


@dataclass
class Tree:
    """``files`` travel, relative to ``base``; ``notes`` says what was left out and why; by name."""

    base: Path
    in_git: bool
    files: list[str] = field(default_factory=list)
    submodules: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find(base: Path, wish: Wish, without: Path | None = None) -> Tree:
    """The files of ``base``; nothing under ``without`` (the runs kept at home hold the bundles before it).

    Raises NothingMatches, UsageError."""
    tree = Tree(base, git.root_of(base) is not None)
    unseen: list[str] = []  # folders that cannot be looked into
    if tree.in_git:
        listed = set(_git_files(tree, base, ""))
    else:
        listed = set(_walk(base, unseen))
    ignored = _patterns(_ignore_lines(base), IGNORE_FILE)
    kept = {name for name in listed if not ignored.match_file(name)}
    inside = f"{without.relative_to(base).as_posix()}/" if without and without.is_relative_to(base) else None
    if wish.include:
        wanted = _patterns(wish.include, "code.include")
        known = listed | set(git.ignored(base) if tree.in_git else ())
        _refuse_idle(wish.include, known, inside, base)
        kept |= {name for name in known if wanted.match_file(name)}
    if wish.exclude:
        unwanted = _patterns(wish.exclude, "code.exclude")
        kept = {name for name in kept if not unwanted.match_file(name)}
    if inside is not None:
        kept = {name for name in kept if not name.startswith(inside)}
    resolved = base.resolve()
    tree.notes += [
        f"left out: the folder {shown(name)} cannot be looked into"
        for name in unseen
        if not ignored.match_file(name + "/")
    ]
    tree.files = [name for name in sorted(kept) if _can_travel(resolved, name, tree.notes)]
    return tree


def _refuse_idle(include: Sequence[str], known: Collection[str], inside: str | None, base: Path) -> None:
    """A pattern that no file matches was meant for one that is somewhere else, or is not there yet."""
    said = {}
    for number, pattern in enumerate(include):
        if pattern.startswith("!"):  # takes back what others said
            continue
        found = [name for name in known if _patterns([pattern], "code.include").match_file(name)]
        if found and inside is not None and all(name.startswith(inside) for name in found):
            said[number] = f"{pattern!r} matches the runs that are kept in {inside} alone, which never travel"
        elif not found:
            said[number] = f"{pattern!r} matches no file below {base}"
    if said:
        raise NothingMatches(said)


def _git_files(tree: Tree, base: Path, prefix: str) -> list[str]:
    """Names below ``tree.base``; a submodule that is checked out gives its own files, and so on."""
    modules = git.submodules(base)
    found = []
    for name in git.files(base):
        if name in modules:
            continue
        if name.endswith("/"):
            tree.notes.append(f"left out: {shown(prefix + name)} is another repository, not a submodule")
        else:
            found.append(prefix + name)
    for name, commit in sorted(modules.items()):
        tree.submodules[prefix + name] = commit
        if (base / name / ".git").exists():
            found += _git_files(tree, base / name, f"{prefix}{name}/")
        else:
            said = f"left out: submodule {shown(prefix + name)} is not checked out"
            tree.notes.append(f"{said} (git submodule update --init)")
    return found


def _walk(base: Path, unseen: list[str]) -> list[str]:
    found: list[str] = []

    def told(problem: OSError) -> None:
        if not isinstance(problem, FileNotFoundError):  # removed meanwhile
            unseen.append(os.path.relpath(problem.filename, base))

    for folder, folders, names in os.walk(base, onerror=told):
        linked = [d for d in folders if os.path.islink(os.path.join(folder, d))]
        folders[:] = sorted(d for d in folders if d not in _NEVER and d not in linked)
        found += [os.path.relpath(os.path.join(folder, n), base) for n in (*names, *linked)]
    return found


def _ignore_lines(base: Path) -> list[str]:
    try:
        return read_file(base / IGNORE_FILE).decode("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"{base / IGNORE_FILE} cannot be read: {problem}") from problem


def _patterns(lines: Sequence[str], where: str) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    for number, line in enumerate(lines, 1):
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError as problem:
            place = f"{where}:{number}" if where == IGNORE_FILE else where
            raise UsageError(f"{place}: {line!r} is no pattern of .gitignore's syntax: {problem}") from problem
    return GitIgnoreSpec.from_lines(lines)


def _can_travel(resolved: Path, name: str, notes: list[str]) -> bool:
    """Plain files, and links that stay inside. What git still names but is gone is no more: it was deleted."""
    path = resolved / name
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    except OSError as problem:
        raise UsageError(f"the code's {shown(name)} cannot be looked at: {problem.strerror}") from problem
    if stat.S_ISREG(mode):
        return True
    if not stat.S_ISLNK(mode):
        notes.append(f"left out: {shown(name)} is no file (a socket, a pipe or a folder)")
        return False
    if leaves(resolved, path, os.readlink(path)):
        notes.append(f"left out: {shown(name)} is a link that leaves the tree")
        return False
    return True


def leaves(resolved: Path, path: Path, link: str) -> bool:
    """Whether a link at ``path`` to ``link`` leads out of the tree, which lies at ``resolved``."""
    target = Path(os.path.realpath(path.parent / link))
    return os.path.isabs(link) or (resolved not in target.parents and target != resolved)


def shown(name: str) -> str:
    """A file's name on one line, whatever is in it."""
    return name if name.isprintable() and name == name.strip() else repr(name)
