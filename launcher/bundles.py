"""What travels to the cluster: the runtime (agent and engine) and the job's own tree.

Both are content-addressed: equal bytes have an equal name and are sent once. The runtime is a zip that
Python runs as it is; inside it the package is called ``_zerun``, so that no folder of a user's, whatever
its name, can stand in front of it. The job's tree is what the working tree holds at the moment of submit;
a file edited afterwards changes nothing.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import importlib.util
import io
import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .contract.errors import UsageError

_MAIN = """\
import sys

from _zerun.agent.main import main

raise SystemExit(main(sys.argv[1:]))
"""
_TRAVELS = ("contract", "agent", "engine")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the zip format's first moment: equal sources give equal bytes
_NEVER = (".git", "__pycache__", ".venv", "node_modules", "runs")  # outside git only; git has its own ignore rules


@dataclass(frozen=True)
class Bundle:
    """Bytes under their SHA-256. ``name`` is ``<sha256>.zip`` or ``<sha256>.tar.gz``."""

    name: str
    data: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        return self.name.split(".", 1)[0]


@dataclass(frozen=True)
class CodeBundle(Bundle):
    """The job's tree. ``commit`` is None outside git; ``changed`` counts files that differ from it."""

    root: str = ""
    num_files: int = 0
    num_bytes: int = 0
    commit: str | None = None
    changed: int = 0
    notes: tuple[str, ...] = ()
    files: frozenset[str] = field(default=frozenset(), repr=False)  # names below ``root``

    def holds(self, path: str) -> bool:
        """Whether ``path``, relative to the root, travels."""
        return os.path.normpath(path) in self.files

    def sentence(self) -> str:
        """One line for whoever submits."""
        where = f"commit {self.commit[:10]}" if self.commit else "no git"
        plus = f" + {self.changed} uncommitted" if self.changed else ""
        return f"code: {self.num_files} files, {self.num_bytes / 1e6:.1f} MB from {self.root} ({where}{plus})"


def runtime_bundle() -> Bundle:
    """The zip that nodes run: the agent, the engine and the contract, and the module ``zerun``."""
    package = Path(__file__).parent
    sources = {"__main__.py": _MAIN.encode(), "zerun.py": _public_module().read_bytes()}
    sources["_zerun/__init__.py"] = (package / "__init__.py").read_bytes()
    for room in _TRAVELS:
        for path in sorted((package / room).rglob("*.py")):
            sources[f"_zerun/{path.relative_to(package).as_posix()}"] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(sources):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, sources[name], compresslevel=6)
    return _named(buffer.getvalue(), ".zip")


def _public_module() -> Path:
    spec = importlib.util.find_spec("zerun")
    if spec is None or spec.origin is None:
        raise UsageError("the module 'zerun' is not installed beside the package", hint="pip install zerun")
    return Path(spec.origin)


def _named(data: bytes, suffix: str) -> Bundle:
    return Bundle(hashlib.sha256(data).hexdigest() + suffix, data)


def code_bundle(
    folder: Path, *, root: str | None = None, exclude: Sequence[str] = (), limit: int, without: Path | None = None
) -> CodeBundle:
    """The tree that a job in ``folder`` ships, at most ``limit`` bytes before compression.

    ``root`` (relative to ``folder``) names it; otherwise it is the git root of ``folder``, or ``folder``
    itself outside git. Under git it holds tracked and untracked-but-not-ignored files as they are now, but
    nothing under ``without``: the runs kept at home lie in the tree, and each holds the bundles before it.

    Raises UsageError when it is larger than ``limit``, naming the five largest files.
    """
    base = code_root(folder, root)
    in_git = _git_root(base) is not None
    notes: list[str] = []
    files = [f for f in (_git_files(base) if in_git else _walk(base)) if not _excluded(f, exclude)]
    if without is not None and without.is_relative_to(base):
        inside = f"{without.relative_to(base).as_posix()}/"
        files = [f for f in files if not f.startswith(inside)]
    kept = list(_readable(base, files, notes))
    sizes = sorted(((base / f).lstat().st_size, f) for f in kept)
    total = sum(size for size, _ in sizes)
    if total > limit:
        largest = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for size, name in reversed(sizes[-5:]))
        raise UsageError(
            f"the code in {base} is {total / 1e6:.1f} MB, above the limit of {limit / 1e6:.1f} MB; largest: {largest}",
            hint="ignore them in .gitignore, list them under code.exclude, or raise code.limit",
        )
    bundle = _named(_tar(base, kept), ".tar.gz")
    commit, changed = _git_state(base) if in_git else (None, 0)
    return CodeBundle(
        bundle.name, bundle.data, str(base), len(kept), total, commit, changed, tuple(notes), frozenset(kept)
    )


def code_root(folder: Path, root: str | None = None) -> Path:
    """The folder that :func:`code_bundle` ships."""
    start = (folder / root).resolve() if root else folder.resolve()
    if not start.is_dir():
        raise UsageError(f"code.root {root!r}: {start} is no folder")
    return start if root else _git_root(start) or start


def _git(folder: Path, *args: str) -> bytes | None:
    """What git says, or None when this is no repository (or git is not installed)."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _git_root(folder: Path) -> Path | None:
    told = _git(folder, "rev-parse", "--show-toplevel")
    return Path(os.fsdecode(told.rstrip(b"\n"))) if told else None


def _git_files(base: Path) -> list[str]:
    listed = _git(base, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or b""
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})


def _git_state(base: Path) -> tuple[str | None, int]:
    head = _git(base, "rev-parse", "HEAD")
    status = _git(base, "status", "--porcelain", "-z") or b""
    return (head.decode().strip() if head else None), len([s for s in status.split(b"\0") if s])


def _walk(base: Path) -> list[str]:
    found: list[str] = []
    for folder, folders, names in os.walk(base):
        folders[:] = sorted(d for d in folders if d not in _NEVER)
        found += [os.path.relpath(os.path.join(folder, n), base) for n in names]
    return sorted(found)


def _excluded(name: str, patterns: Sequence[str]) -> bool:
    """``wandb/`` excludes a folder at any depth, ``*.ckpt`` a file name, ``data/*.bin`` a path."""
    parts = name.split("/")
    for pattern in patterns:
        if pattern.endswith("/"):
            stem = pattern.rstrip("/")
            if "/" in stem:
                if name.startswith(stem + "/"):
                    return True
            elif any(fnmatch.fnmatchcase(p, stem) for p in parts[:-1]):
                return True
        elif fnmatch.fnmatchcase(name, pattern) or ("/" not in pattern and fnmatch.fnmatchcase(parts[-1], pattern)):
            return True
    return False


def _readable(base: Path, files: Sequence[str], notes: list[str]) -> Iterator[str]:
    """Files that are there and can travel; what cannot is left out by name."""
    resolved = base.resolve()
    for name in files:
        path = base / name
        if path.is_symlink():
            target = (path.parent / os.readlink(path)).resolve()
            if os.path.isabs(os.readlink(path)) or resolved not in target.parents:
                notes.append(f"left out: {name} is a link that leaves the tree")
                continue
            yield name
        elif path.is_file():
            yield name
        elif path.is_dir():
            notes.append(f"left out: {name} is a submodule or another repository")


def _tar(base: Path, files: Sequence[str]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in files:
            path = base / name
            info = tarfile.TarInfo(name)  # by hand: owner, times and hard links of this machine stay here
            if path.is_symlink():
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(info)
                continue
            data = path.read_bytes()
            info.size = len(data)
            info.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
