"""A checkpoint's parameters as consolidated safetensors, as the model's own library reads them.

Padding, tensor cuts and the partition are undone; names are the module's, tied ones written once, with the
buffers that its state dict holds; the optimizer's tensors stay behind. Written as a stream: of each output file
a shard after the other is read in rising order, one block of it in memory, and every block is held against
its digest. Needs no torch; a change of dtype needs numpy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..contract.errors import NoSpace, UsageError, VerificationFailed
from ..contract.manifest import BLOCK_BYTES, Manifest
from ..contract.partition import stored_dtype
from ..contract.slices import Whole
from ..contract.weights import INDEX, TAG_BYTES, TAGS, File, Tensor, lay_out
from .blocks import ShardReader
from .moving import SPARE_BYTES, size
from .parts import beside
from .verify import read_manifest

PARAMETERS = "parameters"
FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True)
class Exported:
    """What an export wrote."""

    step: int
    folder: str
    form: str
    files: tuple[str, ...]
    bytes: int
    tensors: int


@dataclass(frozen=True)
class Wish:
    """How it is to be written. ``dtype`` None: as the checkpoint holds it (fp32 for training in 16 bits)."""

    dtype: str | None = None
    most_bytes: int = 5_000_000_000


class _Piece(NamedTuple):
    """Bytes [start, stop) of a shard, ``tag`` there, go to byte ``to`` of a file as ``wanted``."""

    start: int
    stop: int
    tag: str
    to: int
    wanted: str


def export(
    checkpoint: Path,
    target: Path,
    wish: Wish,
    notice: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Writes the parameters of the checkpoint in the folder ``checkpoint`` into the new folder ``target``.

    Raises VerificationFailed naming rank, file and block (nothing is left then), NoSpace before anything is
    written, Refused when ``target`` holds something already.
    """
    with beside(target, notice) as folder:
        files, found = write(checkpoint, folder, wish, notice, progress)
    return Exported(found.step, str(target), "safetensors", tuple(f.name for f in files), found.bytes, found.tensors)


class Written(NamedTuple):
    step: int
    bytes: int
    tensors: int


def write(
    checkpoint: Path,
    folder: Path,
    wish: Wish,
    notice: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
    *,
    room: int = 1,
) -> tuple[list[File], Written]:
    """The files, into a folder that is there; ``room``: how many times their bytes must be free."""
    manifest = read_manifest(checkpoint / "manifest.json")
    if wish.dtype is not None:
        _numpy()
    tensors = _tensors(checkpoint, manifest, wish)
    tied = {other: p.name for p in manifest.layout.by_name.values() for other in p.tied}
    files, index = lay_out(tensors, wish.most_bytes, tied)
    total = sum(f.size for f in files)
    free = shutil.disk_usage(folder).free
    notice(
        f"step {manifest.step}: {len(tensors)} tensors, {size(total)} in {len(files)} file"
        f"{'' if len(files) == 1 else 's'}; {size(free)} are free there"
    )
    if room * total + SPARE_BYTES > free:
        raise NoSpace(f"{folder.parent}: {size(room * total)} are to be written, {size(free)} are free")
    work = _Work(checkpoint, manifest, total, progress)
    for file in files:
        work.write(file, folder / file.name)
    if index is not None:
        (folder / INDEX).write_bytes(index)
    return files, Written(manifest.step, total, len(tensors))


def _tensors(checkpoint: Path, manifest: Manifest, wish: Wish) -> list[Tensor]:
    found = []
    for parameter in manifest.layout.by_name.values():
        tag = TAGS[stored_dtype(parameter.dtype)]
        found.append(Tensor(parameter.name, _wanted(tag, wish), parameter.shape))
    if manifest.buffers:
        with ShardReader(checkpoint, next(s for s in manifest.shards if s.rank == 0)) as reader:
            for name in manifest.buffers:
                _, tag, shape = reader.about(f"buffer/{name}")
                found.append(Tensor(name, tag, shape))
    return found


def _wanted(tag: str, wish: Wish) -> str:
    return TAGS[_DTYPES[wish.dtype]] if wish.dtype is not None and tag in FLOATS else tag


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class _Work:
    def __init__(
        self, checkpoint: Path, manifest: Manifest, total: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self.checkpoint, self.manifest = checkpoint, manifest
        self.whole = Whole(manifest.layout)
        self.shards = {s.rank: s for s in manifest.shards}
        self.sizes = {f"{u.name}/{PARAMETERS}": u.shard_numel for u in manifest.layout.units}
        self.done, self.total, self.progress = 0, total, progress

    def write(self, file: File, path: Path) -> None:
        with open(path, "xb", buffering=0) as out:
            out.write(file.header)
            out.truncate(file.size)
            self._advance(len(file.header))
            for rank, rows in sorted(self._sources(file).items()):
                with ShardReader(self.checkpoint, self.shards[rank]) as reader:
                    self._copy(reader, rows, out.fileno())
            os.fsync(out.fileno())

    def _sources(self, file: File) -> dict[int, list[tuple[str, int, int, int, str]]]:
        """By shard: (tensor there, first element, elements, byte in ``file``, tag in ``file``)."""
        found: dict[int, list[tuple[str, int, int, int, str]]] = {}
        units = self.manifest.layout.units
        for tensor, start in zip(file.tensors, file.starts, strict=True):
            width = TAG_BYTES[tensor.tag]
            if tensor.name not in self.manifest.layout.by_name:
                row = (f"buffer/{tensor.name}", 0, tensor.bytes // width, start, tensor.tag)
                found.setdefault(0, []).append(row)
                continue
            for source in self.whole.sources(tensor.name):
                name = f"{units[source.unit].name}/{PARAMETERS}"
                at = start + source.whole * width
                found.setdefault(source.shard, []).append((name, source.offset, source.numel, at, tensor.tag))
        return found

    def _copy(self, reader: ShardReader, rows: list[tuple[str, int, int, int, str]], out: int) -> None:
        pieces = []
        for name, first, numel, to, wanted in rows:
            base, tag, shape = reader.about(name)
            if name in self.sizes and shape != (self.sizes[name],):
                raise VerificationFailed(
                    f"{reader.path}: {name} has {list(shape)} elements, {self.sizes[name]} by the manifest beside it",
                    hint="the manifest is damaged: zerun collect brings it once more; or take another --step",
                )
            width = TAG_BYTES[tag]
            pieces.append(_Piece(base + first * width, base + (first + numel) * width, tag, to, wanted))
        for piece in sorted(pieces):
            step = BLOCK_BYTES // TAG_BYTES[piece.tag] * TAG_BYTES[piece.tag]
            at, to = piece.start, piece.to
            while at < piece.stop:
                stop = min(piece.stop, at + step)
                data = memoryview(converted(reader.read(at, stop), piece.tag, piece.wanted))
                at = stop
                while data:  # a full disk writes a part, and says so with the next call
                    count = os.pwrite(out, data, to)
                    data, to = data[count:], to + count
                    self._advance(count)

    def _advance(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


# --- dtypes -----------------------------------------------------------------------------------------------


def _numpy() -> Any:
    try:
        import numpy
    except ModuleNotFoundError as problem:
        raise UsageError(
            "--dtype needs numpy, which this Python has not",
            hint="pip install numpy; or leave --dtype out: the dtype stays as the checkpoint has it",
        ) from problem
    return numpy


def converted(data: bytes, tag: str, wanted: str) -> bytes:
    """The elements of ``data`` in another dtype, rounded to the nearest, ties to even, as torch does it."""
    if tag == wanted:
        return data
    np = _numpy()
    if tag == "BF16":
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tag])
    if wanted == "F32":
        return bytes(values.astype("<f4").tobytes())
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(values.astype("<f4")).view("<u4")
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0  # NaN stays NaN
    return bytes(rounded.tobytes())


def refuse_dtype(dtype: str | None) -> None:
    """Raises UsageError for a dtype that no export has."""
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype!r}: accepted are {', '.join(_DTYPES)}")


__all__ = ["Exported", "Wish", "converted", "export", "refuse_dtype", "write"]
