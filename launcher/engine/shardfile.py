"""One rank's file of flat ranges: safetensors written and read without the library, digests on the way.

Written as a stream (no second copy of the state), synced, then renamed into place. Read by byte range:
only the blocks of 16 MiB that a range touches are read, each checked against its digest first.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from ..contract.errors import JobFailed, NoSpace, VerificationFailed
from ..contract.manifest import BLOCK_BYTES, ShardFile
from ..contract.plain import open_file, sync_folder

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
    """A named tensor of the file; its elements come as consecutive ``runs``."""

    name: str
    runs: tuple[Tensor, ...]
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.runs[0].dtype

    @property
    def bytes(self) -> int:
        return sum(r.numel() * r.element_size() for r in self.runs)


def write(path: Path, entries: Sequence[Entry], *, rank: int, node: str) -> ShardFile:
    """Writes the file durably and returns its size and digests. Raises ``NoSpace`` when the disk is full."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            digests = _Digests()
            for data in _stream(entries):
                digests.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"rank {rank}: no space for {path}", hint="free some, or keep fewer checkpoints") from error
        raise JobFailed(f"rank {rank}: {path} could not be written: {error.strerror}") from error
    finally:
        beside.unlink(missing_ok=True)
    whole, blocks = digests.done()
    return ShardFile(rank=rank, node=node, file=path.name, bytes=digests.bytes, digest=whole, blocks=blocks)


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
    for entry in entries:
        for run in entry.runs:
            step = max(1, BLOCK_BYTES // run.element_size())
            flat = run.detach().reshape(-1)
            for start in range(0, flat.numel(), step):
                piece = flat[start : start + step].cpu().contiguous()
                yield as_bytes(piece)


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
    """Reads ranges of a shard file; every block is verified before any byte of it is used."""

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        self.path = folder / shard.file
        self.shard = shard
        self._number = -1
        self._data = b""
        try:
            self._file: BinaryIO = open_file(self.path)
        except FileNotFoundError as error:
            raise VerificationFailed(
                f"shard {self.path} of rank {shard.rank} is missing here; node {shard.node} wrote it",
                hint="collect the checkpoint, or resume with the nodes that hold it",
            ) from error
        except OSError as error:
            said = f"shard {self.path} of rank {shard.rank} cannot be read: {error.strerror}"
            raise VerificationFailed(said, hint="resume from an older checkpoint, or bring this one again") from error
        size = os.fstat(self._file.fileno()).st_size
        if size != shard.bytes:
            self._file.close()
            raise VerificationFailed(f"shard {self.path} of rank {shard.rank} has {size} bytes, not {shard.bytes}")
        length = int.from_bytes(self.read(0, 8), "little")
        self._header: dict[str, Any] = json.loads(self.read(8, 8 + length))
        self._base = 8 + length

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def offset(self, name: str) -> int:
        """Where the bytes of tensor ``name`` begin in the file."""
        if name not in self._header:
            raise VerificationFailed(f"shard {self.path} of rank {self.shard.rank} has no tensor {name}")
        return self._base + int(self._header[name]["data_offsets"][0])

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop). Ranges in rising order read each block once."""
        pieces = []
        while start < stop:
            number = start // BLOCK_BYTES
            block = self._block(number)
            first = start - number * BLOCK_BYTES
            piece = block[first : first + stop - start]
            if not piece:
                raise VerificationFailed(f"shard {self.path} ends before byte {stop}")
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)

    def into(self, name: str, first: int, target: Tensor) -> None:
        """Fills ``target`` with the elements of tensor ``name`` from number ``first`` on."""
        dtype = _DTYPES[self._header[name]["dtype"]] if name in self._header else target.dtype
        start = self.offset(name) + first * dtype.itemsize
        size = target.numel() * dtype.itemsize
        data = self.read(start, start + size)
        if size:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
            target.copy_(source.view(target.shape))

    def _block(self, number: int) -> bytes:
        if number != self._number:
            self._file.seek(number * BLOCK_BYTES)
            data = self._file.read(BLOCK_BYTES)
            if number >= len(self.shard.blocks) or xxhash.xxh3_128_hexdigest(data) != self.shard.blocks[number]:
                blocks = len(self.shard.blocks)
                raise DamagedBlock(
                    f"shard {self.path} of rank {self.shard.rank}: block {number} "
                    f"(bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(data)}) is damaged",
                    f"is damaged: block {number} of {blocks}, found when it was read to go on from",
                )
            self._number, self._data = number, data
        return self._data
