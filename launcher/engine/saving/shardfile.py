"""One rank's file of flat ranges: safetensors written and read without the library, digests on the way.

Written as a stream (no second copy of the state), synced, then renamed into place. Read by byte range:
only the blocks of 16 MiB that a range touches are read, each checked against its digest first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from ...contract.errors import JobFailed, NoSpace, VerificationFailed
from ...contract.manifest import BLOCK_BYTES, ShardFile
from ...contract.plain import open_file, sync_folder, to_plain, write_atomically
from ...contract.ranges import NoRanges, Ranges, file_of

_TAGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {tag: dtype for dtype, tag in _TAGS.items()}


def dtype_of(tag: str) -> torch.dtype:
    """The dtype that safetensors calls ``tag``."""
    return _DTYPES[tag]


def tag_of(dtype: torch.dtype) -> str | None:
    """Safetensors' word for ``dtype``; None where there is none that we know."""
    return _TAGS.get(dtype)


@dataclass(frozen=True)
class Entry:
    """A named tensor of the file; its elements come as consecutive ``runs``, stored ``as_dtype`` if that is given."""

    name: str
    runs: tuple[Tensor, ...]
    shape: tuple[int, ...]
    as_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """As it stands in the file."""
        return self.as_dtype or self.runs[0].dtype

    @property
    def bytes(self) -> int:
        return sum(r.numel() for r in self.runs) * self.dtype.itemsize


def write(path: Path, entries: Sequence[Entry], *, rank: int, node: str) -> ShardFile:
    """Writes the file durably and returns its size and digests. Raises ``NoSpace`` when the disk is full."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with told_of(rank, path):
            with open(beside, "wb") as file:
                digests = _Digests()
                for data in _stream(entries):
                    digests.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
            sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)
    whole, blocks = digests.done()
    return ShardFile(rank=rank, node=node, file=path.name, bytes=digests.bytes, digest=whole, blocks=blocks)


@contextlib.contextmanager
def told_of(rank: int, path: Path) -> Iterator[None]:
    """What the system says inside, as an error that names who could not write, and where."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"rank {rank}: no space for {path}", hint="free some, or keep fewer checkpoints") from error
        raise JobFailed(f"rank {rank}: {path} could not be written: {error.strerror}") from error


def _stream(entries: Sequence[Entry]) -> Iterator[Any]:
    header: dict[str, Any] = {}
    at = 0
    for entry in entries:
        stop = at + entry.bytes
        header[entry.name] = {"dtype": _TAGS[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    widest = max((_width(run, e) for e in entries for run in e.runs if not _as_it_is(run, e)), default=0)
    through = torch.empty(min(BLOCK_BYTES, widest), dtype=torch.uint8)  # one for all: never two at a time
    for entry in entries:
        for run in entry.runs:
            flat = run.detach().reshape(-1)
            step = max(1, BLOCK_BYTES // entry.dtype.itemsize)
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step]
                if not _as_it_is(run, entry):
                    piece = through[: _width(piece, entry)].view(entry.dtype).copy_(piece)
                yield as_bytes(piece)  # used before the next one is asked for


def _as_it_is(run: Tensor, entry: Entry) -> bool:
    """Whether memory is what the file holds; else (another dtype, a GPU) it goes through host memory by the block."""
    return run.dtype == entry.dtype and run.device.type == "cpu"


def _width(run: Tensor, entry: Entry) -> int:
    return run.numel() * entry.dtype.itemsize


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; the view keeps the tensor alive."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    window: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    window.tensor = tensor  # a temporary would be gone before its bytes are written
    return memoryview(window).cast("B")


class _Digests:
    """xxh3-128 of everything and of each block, in one pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._blocks: list[str] = []

    def update(self, data: Any) -> None:
        view = memoryview(data)
        self._whole.update(view)
        while len(view):
            room = BLOCK_BYTES - self.bytes % BLOCK_BYTES
            part, view = view[:room], view[room:]
            self._block.update(part)
            self.bytes += len(part)
            if self.bytes % BLOCK_BYTES == 0:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block = xxhash.xxh3_128()

    def done(self) -> tuple[str, tuple[str, ...]]:
        if self.bytes % BLOCK_BYTES:
            self._end_block()
        return self._whole.hexdigest(), tuple(self._blocks)


class DamagedBlock(VerificationFailed):
    """Bytes of the right size that are not those which were written; ``found`` says so of the shard."""

    def __init__(self, message: str, found: str) -> None:
        super().__init__(message, hint="resume from an older checkpoint, or bring this one from where it is whole")
        self.found = found


class Reader:
    """Reads ranges of a shard file, or of a file of ranges of it where the shard is not here; every block, or piece, is
    verified before any byte of it is used."""

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        self.path = folder / shard.file
        self.shard = shard
        self._begin = 0  # in the shard, of the block or piece that is held
        self._data = b""
        self._ranges: Ranges | None = None
        try:
            self._file: BinaryIO = open_file(self.path)
            size = os.fstat(self._file.fileno()).st_size
            if size != shard.bytes:
                self._file.close()
                raise VerificationFailed(f"shard {self.path} of rank {shard.rank} has {size} bytes, not {shard.bytes}")
        except FileNotFoundError as error:
            self._ranges = self._opened_ranges(folder, error)
        except OSError as error:
            said = f"shard {self.path} of rank {shard.rank} cannot be read: {error.strerror}"
            raise VerificationFailed(said, hint="resume from an older checkpoint, or bring this one again") from error
        try:
            length = int.from_bytes(self.read(0, 8), "little")
            self._header: dict[str, Any] = json.loads(self.read(8, 8 + length))
        except VerificationFailed:
            self.close()
            raise
        self._base = 8 + length

    def _opened_ranges(self, folder: Path, missing: FileNotFoundError) -> Ranges:
        """What a resume brought of the shard to this node, if it did (``contract.ranges``)."""
        shard = self.shard
        try:
            found = Ranges(str(folder / file_of(shard.rank)))
        except FileNotFoundError:
            raise VerificationFailed(
                f"shard {self.path} of rank {shard.rank} is missing here; node {shard.node} wrote it",
                hint="collect the checkpoint, or resume with the nodes that hold it",
            ) from missing
        except (NoRanges, OSError) as error:
            raise self._unfit(error) from error
        if not found.is_of(to_plain(shard)):
            found.close()
            raise self._unfit(NoRanges("they are of another shard"))
        return found

    def _unfit(self, error: Exception) -> VerificationFailed:
        """Ranges are copies: what is wrong with them goes, so that the next resume brings them again."""
        path = self.path.with_name(file_of(self.shard.rank))
        with contextlib.suppress(OSError):
            path.unlink()
        return VerificationFailed(
            f"shard {self.path} of rank {self.shard.rank} is not here, and ranges of it are no use: {error}",
            hint="zerun resume again: they were removed, and are brought once more",
        )

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        (self._ranges or self._file).close()

    def offset(self, name: str) -> int:
        """Where the bytes of tensor ``name`` begin in the file."""
        if name not in self._header:
            raise VerificationFailed(f"shard {self.path} of rank {self.shard.rank} has no tensor {name}")
        return self._base + int(self._header[name]["data_offsets"][0])

    def has(self, name: str) -> bool:
        return name in self._header

    def kind(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of tensor ``name``."""
        self.offset(name)  # raises where there is none
        return tuple(self._header[name]["shape"]), _DTYPES[self._header[name]["dtype"]]

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Ranges in rising order read each block once."""
        pieces = []
        while start < stop:
            if not self._begin <= start < self._begin + len(self._data):
                self._begin, self._data = self._block(start) if self._ranges is None else self._piece(start)
            first = start - self._begin
            piece = self._data[first : first + stop - start]
            if not piece:
                raise VerificationFailed(f"shard {self.path} ends before byte {stop}")
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def into(self, name: str, first: int, target: Tensor) -> None:
        """Fills ``target`` with the elements of tensor ``name`` from number ``first`` on, a block's worth at a time."""
        shape, dtype = self.kind(name)
        if first + target.numel() > math.prod(shape):
            raise VerificationFailed(
                f"shard {self.path} of rank {self.shard.rank}: {name} ends at element {math.prod(shape)}, "
                f"{first + target.numel()} are asked for"
            )
        start = self.offset(name) + first * dtype.itemsize
        flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
        for part in torch.split(flat, max(1, BLOCK_BYTES // dtype.itemsize)):
            stop = start + part.numel() * dtype.itemsize
            if part.numel():
                part.copy_(torch.frombuffer(bytearray(self.read(start, stop)), dtype=torch.uint8).view(dtype))
            start = stop
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))

    def _block(self, at: int) -> tuple[int, bytes]:
        number = at // BLOCK_BYTES
        begin = number * BLOCK_BYTES
        self._file.seek(begin)
        data = self._file.read(BLOCK_BYTES)
        if number >= len(self.shard.blocks) or xxhash.xxh3_128_hexdigest(data) != self.shard.blocks[number]:
            blocks = len(self.shard.blocks)
            raise DamagedBlock(
                f"shard {self.path} of rank {self.shard.rank}: block {number} "
                f"(bytes {begin} to {begin + len(data)}) is damaged",
                f"is damaged: block {number} of {blocks}, found when it was read to go on from",
            )
        return begin, data

    def _piece(self, at: int) -> tuple[int, bytes]:
        assert self._ranges is not None
        piece = self._ranges.holding(at)
        if piece is None:  # an emptied file tells the next resume to bring the whole shard
            with contextlib.suppress(OSError):
                write_atomically(self._ranges.path, b"")
            raise VerificationFailed(
                f"{self._ranges.path} has not byte {at} of rank {self.shard.rank}'s shard, which this rank reads",
                hint="zerun resume again: it brings the whole shard",
            )
        try:
            return piece.start, self._ranges.bytes_of(piece)
        except (NoRanges, OSError) as error:
            raise self._unfit(error) from error
