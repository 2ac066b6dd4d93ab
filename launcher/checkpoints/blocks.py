"""Byte ranges of a shard that lies here, without torch: every block is held against its digest before use."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from ..contract.errors import VerificationFailed
from ..contract.manifest import BLOCK_BYTES, ShardFile
from ..contract.plain import loads
from ..contract.weights import TAG_BYTES


class ShardReader:
    """Ranges in rising order read each block once; one block is held at a time."""

    def __init__(self, folder: Path, shard: ShardFile) -> None:
        self.path = folder / shard.file
        self.shard = shard
        self._number, self._data = -1, b""
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as problem:
            raise self._wrong(f"cannot be read: {problem.strerror}") from problem
        about = os.fstat(self._handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size != shard.bytes:
            os.close(self._handle)
            raise self._wrong(f"has {about.st_size} bytes of {shard.bytes}")
        try:
            length = int.from_bytes(self.read(0, 8), "little")
            self._base = 8 + length
            self._header: Mapping[str, Any] = dict(loads(self.read(8, self._base)))
        except (TypeError, ValueError) as problem:
            os.close(self._handle)
            raise self._wrong(f"has no header of safetensors: {problem}") from problem
        except VerificationFailed:
            os.close(self._handle)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def about(self, name: str) -> tuple[int, str, tuple[int, ...]]:
        """Where the bytes of tensor ``name`` begin, safetensors' word for its dtype, and its shape."""
        if name not in self._header:
            raise self._wrong(f"has no tensor {name}")
        found = self._header[name]
        try:
            begin, tag, shape = self._base + int(found["data_offsets"][0]), str(found["dtype"]), tuple(found["shape"])
        except (ArithmeticError, LookupError, TypeError, ValueError) as problem:
            raise self._wrong(f"tells of {name} what cannot be read: {problem!r}") from problem
        if tag not in TAG_BYTES:
            raise self._wrong(f"has {name} in {tag}; known: {', '.join(TAG_BYTES)}")
        return begin, tag, shape

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        pieces = []
        while start < stop:
            number, inside = divmod(start, BLOCK_BYTES)
            piece = self._block(number)[inside : inside + stop - start]
            if not piece:
                raise self._wrong(f"ends before byte {stop}")
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _block(self, number: int) -> bytes:
        if number != self._number:
            begin = number * BLOCK_BYTES
            data = b""
            while piece := os.pread(self._handle, BLOCK_BYTES - len(data), begin + len(data)):
                data += piece
                if len(data) == BLOCK_BYTES:
                    break
            right = self.shard.blocks[number] if number < len(self.shard.blocks) else ""
            if xxhash.xxh3_128_hexdigest(data) != right:
                raise self._wrong(f"block {number} of {len(self.shard.blocks)} is damaged (byte {begin} on)")
            self._number, self._data = number, data
        return self._data

    def _wrong(self, what: str) -> VerificationFailed:
        shard = self.shard
        return VerificationFailed(
            f"rank {shard.rank}'s shard {self.path} (from {shard.node}): {what}",
            hint="zerun collect brings what is wrong once more; or take another --step",
        )
