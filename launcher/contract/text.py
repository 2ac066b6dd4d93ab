"""Text as token files: one byte a token, split into training and held-out parts by file.

A file is held out by a hash of its relative name, about one in twenty, so that the split depends
neither on the order nor on what other files there are. Files are joined by a zero byte.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path, PurePosixPath
from typing import Dict, Iterable, List, Sequence, Tuple, Union

from .errors import UsageError

CORPORA = ("python-stdlib",)
ENOUGH_BYTES = 5_000_000
HELD_OUT_OF = 20
SEPARATOR = b"\0"


def prepare(files: Sequence[Union[str, Path]], out_dir: Union[str, Path]) -> Dict[str, int]:
    """Writes ``train.bin`` and ``heldout.bin`` (uint8 tokens) of text files below ``out_dir``.

    Returns ``{"train_tokens", "heldout_tokens", "train_files", "heldout_files"}``. Names are taken
    relative to the folder that all files share, so moving a corpus does not change its split.

    Raises :class:`UsageError` when a file cannot be read or there is too little to hold anything out.
    """
    if not files:
        raise UsageError("no files were given", hint="zerun data prepare FILES… --out DIR")
    paths = [Path(os.path.abspath(f)) for f in files]
    missing = [str(p) for p in paths if not p.is_file()]
    if missing:
        folder = os.path.isdir(missing[0])
        raise UsageError(
            f"{missing[0]} is {'a folder' if folder else 'no file that can be read'}",
            hint="give the files in it: FOLDER/*.txt" if folder else f"so it is with {len(missing)} of {len(paths)}",
        )
    base = Path(os.path.commonpath([str(p.parent) for p in paths]))
    return write_split(sorted({(p.relative_to(base).as_posix(), p) for p in paths}), out_dir)


def write_split(named: Iterable[Tuple[str, Path]], out_dir: Union[str, Path]) -> Dict[str, int]:
    """:func:`prepare` for files with their relative names, in order; each file appears by rename."""
    train: List[Path] = []
    held: List[Path] = []
    for name, path in named:
        (held if is_held_out(name) else train).append(path)
    if not held and len(train) > 1:
        held.append(train.pop())  # a small set whose names hold nothing out
    if not held or not train:
        raise UsageError(
            f"{len(train) + len(held)} file cannot be split into training and held-out text",
            hint="give at least two files",
        )
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    return {
        "train_tokens": _join(train, out / "train.bin"),
        "heldout_tokens": _join(held, out / "heldout.bin"),
        "train_files": len(train),
        "heldout_files": len(held),
    }


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode("utf-8")).digest()[0] * HELD_OUT_OF < 256


def corpus(name: str) -> List[Tuple[str, Path]]:
    """The files of a corpus that every machine has, with their relative names, in order.

    ``python-stdlib``: the sources of the running interpreter's standard library; test folders are
    taken only when the rest is less than 5 MB.
    """
    if name not in CORPORA:
        raise UsageError(f"no corpus is named {name!r}", hint=f"known: {', '.join(CORPORA)}")
    root = Path(sysconfig.get_paths()["stdlib"])
    everything = sorted(_sources(root))
    plain = [(n, p) for n, p in everything if not _is_test(n)]
    chosen = plain if sum(p.stat().st_size for _, p in plain) >= ENOUGH_BYTES else everything
    if sum(p.stat().st_size for _, p in chosen) < 1_000_000:
        raise UsageError(
            f"the standard library's sources are not under {root}", hint="give data.tokens a token file instead"
        )
    return chosen


def _sources(root: Path) -> Iterable[Tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "dist-packages", "__pycache__"))
        for file in files:
            path = Path(folder, file)
            if file.endswith(".py") and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _is_test(name: str) -> bool:
    return any(part in ("test", "tests", "idle_test") for part in PurePosixPath(name).parts[:-1])


def _join(paths: Sequence[Path], target: Path) -> int:
    """Writes the files one after the other, by a file of another name; returns the bytes."""
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    total = 0
    try:
        with open(beside, "wb") as out:
            for path in paths:
                try:
                    data = path.read_bytes() + SEPARATOR
                except OSError as error:
                    raise UsageError(f"{path} cannot be read: {error.strerror}") from error
                out.write(data)
                total += len(data)
        os.replace(beside, target)
    finally:
        if beside.exists():
            beside.unlink()
    return total
