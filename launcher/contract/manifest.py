"""The manifest of a checkpoint: written last, by rename, when every rank's shard is durable.

It names every shard with its size and digests, so that whole, short and damaged are told apart
without loading anything, and carries the partition, so that any number of ranks can read it.
Digests are xxh3-128 in hex: of the whole file, and of each block of 16 MiB, so that whoever reads a
part verifies what it touches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from .partition import Layout
from .plain import dumps, from_plain, loads

BLOCK_BYTES = 16 * 2**20
Bytes = bytes  # inside the classes below ``bytes`` is a size
FORMAT = 1


@dataclass(frozen=True)
class ShardFile:
    """One rank's file. ``blocks[i]`` is the digest of bytes [i·BLOCK_BYTES, (i+1)·BLOCK_BYTES)."""

    rank: int
    node: str
    file: str
    bytes: int
    digest: str
    blocks: Tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """``layout`` is the partition that the shards were written in; ``scalars`` is all that is no tensor
    (optimizer step, loss scale, counters), ``buffers`` names the module buffers kept in rank 0's shard."""

    format: int
    run: str
    attempt: int
    step: int
    samples: int  # global samples consumed so far
    global_batch: int
    seed: int
    layout: Layout
    shards: Tuple[ShardFile, ...]
    scalars: Dict[str, Any] = field(default_factory=dict)
    buffers: Tuple[str, ...] = ()
    model: Optional[Dict[str, Any]] = None
    data_state: Optional[Dict[str, Any]] = None
    extra: Optional[Dict[str, Any]] = None
    written_at: float = 0.0

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.shards)

    def to_bytes(self) -> Bytes:
        return dumps(self)

    @classmethod
    def from_bytes(cls, data: Bytes) -> Manifest:
        """Raises ``plain.PlainError`` or ``ValueError`` when the bytes are no manifest that we can read."""
        value = loads(data)
        if isinstance(value, dict) and value.get("format") != FORMAT:
            raise ValueError(f"manifest format {value.get('format')!r}: this zerun reads format {FORMAT}")
        return from_plain(cls, value)
