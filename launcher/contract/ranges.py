"""Ranges of a shard, in a file of their own: what a node holds that reads some of a shard and not the rest.

``checkpoints/step-N/rank-00003.ranges`` lies where the shard would lie, under a name that nothing takes for the shard.
It is pieces of the shard one after the other, then what they are::

    piece · piece · … · JSON {"rank", "file", "bytes", "digest", "pieces": [[start, stop, blake2b], …]} · length · magic

``bytes`` and ``digest`` are the whole shard's, as the manifest has them. A piece is at most 1 MiB. Whoever cuts proves
each block that it cuts from against the manifest, and digests the piece in the same bytes of memory; whoever reads
holds each piece against its own digest. (A manifest's blocks are 16 MiB, and what a rank reads at another number of
ranks lies in stripes of a bucket's part: whole blocks of such stripes would be the whole shard.) The description stands
last: a file that was cut short is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from bisect import bisect_right
from typing import (
    Any,
    BinaryIO,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from .errors import VerificationFailed
from .manifest import BLOCK_BYTES
from .plain import loads, open_file

PIECE_BYTES = 2**20
GAP_BYTES = 4096  # ranges that are nearer than this are one
_MAGIC = b"zeranges"
_END_BYTES = 8 + len(_MAGIC)
_MOST_DESCRIBED_BYTES = 2**28
_NAME = re.compile(r"rank-([0-9]{5,})\.ranges")

Range = Tuple[int, int]
Digest = Callable[[bytes], str]


class NoRanges(ValueError):
    """A file that is none of ranges, that is damaged, or that lacks what is wanted of it."""


class Piece(NamedTuple):
    start: int
    stop: int
    digest: str
    at: int  # in the file of ranges


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.ranges"


def is_ranges(name: str) -> bool:
    return bool(_NAME.fullmatch(name))


# --- arithmetic -----------------------------------------------------------------------------------


def joined(ranges: Iterable[Range], gap: int = 0) -> Tuple[Range, ...]:
    """The same bytes (and gaps of up to ``gap`` between them) as few ranges, in rising order."""
    found: List[Range] = []
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def without(wanted: Iterable[Range], have: Iterable[Range]) -> Tuple[Range, ...]:
    """What of ``wanted`` is not in ``have``."""
    left: List[Range] = []
    held = joined(have)
    stops = [stop for _, stop in held]
    for start, end in joined(wanted):
        index = bisect_right(stops, start)
        while start < end:
            begin, stop = held[index] if index < len(held) else (end, end)
            if start < min(begin, end):
                left.append((start, min(begin, end)))
            start, index = max(start, stop), index + 1
    return tuple(left)


def count(ranges: Iterable[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def most_bytes(ranges: Iterable[Range]) -> int:
    """A file of ``ranges`` is no larger: the pieces, a description of each, and of the shard."""
    return sum(stop - start + 128 * ((stop - start) // PIECE_BYTES + 2) for start, stop in ranges) + 65536


def of_tensors(header: Mapping[str, Any], base: int, runs: Mapping[str, Sequence[Range]]) -> Tuple[Range, ...]:
    """The bytes of a shard that hold ``runs``: unit → elements, of each of the unit's tensors (parameters, moments).

    ``header`` is the shard's safetensors header, which ends at byte ``base`` and is among the ranges; so is every
    ``buffer/…`` when ``runs`` names ``buffer``. Raises NoRanges when the header has no such elements.
    """
    found: List[Range] = [(0, base)]
    seen = set()
    for name, row in header.items():
        unit = name.rpartition("/")[0] if not name.startswith("buffer/") else "buffer"
        if unit not in runs:
            continue
        seen.add(unit)
        try:
            begin, end = (base + int(n) for n in row["data_offsets"])
            numel = 1
            for size in row["shape"]:
                numel *= int(size)
            wanted = runs[unit] if unit != "buffer" else [(0, numel)]
            item, odd = divmod(end - begin, numel) if numel else (0, 0)
            if odd or begin < base or any(not 0 <= start <= stop <= numel for start, stop in wanted):
                raise NoRanges(f"{name} has {numel} elements in {end - begin} bytes")
        except (LookupError, TypeError, ValueError) as problem:
            raise NoRanges(f"a header that cannot be read: {name}: {problem}") from problem
        found += [(begin + start * item, begin + stop * item) for start, stop in wanted]
    lacks = sorted(set(runs) - seen - {"buffer"})
    if lacks:
        raise NoRanges(f"a shard without {lacks[0]}")
    return joined(found, GAP_BYTES)


def read_header(path: str) -> Tuple[Dict[str, Any], int]:
    """The safetensors header of a shard and where it ends. Not proven: that is for whoever takes bytes of it."""
    with open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _MOST_DESCRIBED_BYTES:
            raise NoRanges(f"{path} has no header of safetensors")
        header = loads(file.read(length))
    if not isinstance(header, dict):
        raise NoRanges(f"{path} has no header of safetensors")
    return header, 8 + length


# --- the file -------------------------------------------------------------------------------------


def cut(file: BinaryIO, shard: Mapping[str, Any], ranges: Sequence[Range], digest: Digest) -> Iterator[bytes]:
    """The bytes of a file of ``ranges`` of the shard that ``file`` is, by its row of the manifest.

    Each block is read once and held against the manifest by ``digest`` (xxh3-128). Where one is damaged the file ends
    with that word in place of its description, and is none.
    """
    pieces: List[List[Any]] = []
    held, block = -1, b""
    for start, stop in ranges:
        while start < stop:
            number = start // BLOCK_BYTES
            if number != held:
                file.seek(number * BLOCK_BYTES)
                held, block = number, file.read(BLOCK_BYTES)
                if number >= len(shard["blocks"]) or digest(block) != shard["blocks"][number]:
                    said = f"rank {shard['rank']}'s shard of {shard['node']}: block {number} is damaged"
                    yield _end({"error": said})
                    return
            end = min(stop, (start // PIECE_BYTES + 1) * PIECE_BYTES)
            data = block[start - number * BLOCK_BYTES : end - number * BLOCK_BYTES]
            if len(data) != end - start:
                yield _end({"error": f"rank {shard['rank']}'s shard of {shard['node']} ends before byte {end}"})
                return
            pieces.append([start, end, _digest(data)])
            yield data
            start = end
    yield _end({**{key: shard[key] for key in ("rank", "file", "bytes", "digest")}, "pieces": pieces})


def both(old: Ranges, new: Ranges) -> Iterator[bytes]:
    """A file of the ranges of both, which are of one shard. Pieces are taken as they are."""
    pieces = []
    for ranges in (old, new):
        for piece in ranges.pieces:
            yield ranges.bytes_of(piece)
            pieces.append([piece.start, piece.stop, piece.digest])
    yield _end({**new.shard, "pieces": pieces})


def _end(described: Mapping[str, Any]) -> bytes:
    text = json.dumps(described, separators=(",", ":")).encode("ascii")
    return text + len(text).to_bytes(8, "little") + _MAGIC


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Ranges:
    """A file of ranges that is read. Raises NoRanges and OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open_file(path)
        try:
            self._read(os.fstat(self._file.fileno()).st_size)
        except (ArithmeticError, LookupError, TypeError, ValueError) as problem:
            self._file.close()
            raise problem if isinstance(problem, NoRanges) else NoRanges(f"{path} is damaged: {problem!r}") from problem
        self._starts = [piece.start for piece in self.pieces]

    def _read(self, size: int) -> None:
        self._file.seek(max(0, size - _END_BYTES))
        end = self._file.read()
        length = int.from_bytes(end[:8], "little")
        if end[8:] != _MAGIC or length > min(size - _END_BYTES, _MOST_DESCRIBED_BYTES):
            raise NoRanges(f"{self.path} was cut short")
        self._file.seek(size - _END_BYTES - length)
        described = loads(self._file.read(length))
        if "error" in described:
            raise NoRanges(str(described["error"]))
        whole = int(described["bytes"])
        self.shard: Dict[str, Any] = {
            "rank": int(described["rank"]),
            "file": str(described["file"]),
            "bytes": whole,
            "digest": str(described["digest"]),
        }
        pieces, at = [], 0
        for start, stop, digest in described["pieces"]:
            if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop <= whole):
                raise NoRanges(f"{self.path} describes bytes {start} to {stop} of {whole}")
            if stop - start > PIECE_BYTES:
                raise NoRanges(f"{self.path} describes a piece of {stop - start} bytes")
            pieces.append(Piece(start, stop, str(digest), at))
            at += stop - start
        if at != size - _END_BYTES - length:
            raise NoRanges(f"{self.path} describes {at} bytes and has {size - _END_BYTES - length}")
        self.pieces: List[Piece] = sorted(pieces)
        self.ranges = joined((piece.start, piece.stop) for piece in pieces)

    def __enter__(self) -> Ranges:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def is_of(self, shard: Mapping[str, Any]) -> bool:
        """Whether they are of the very shard that a row of the manifest means."""
        return all(self.shard[key] == shard[key] for key in self.shard)

    def bytes_of(self, piece: Piece) -> bytes:
        """Proven; NoRanges when they are not what was cut."""
        self._file.seek(piece.at)
        data = self._file.read(piece.stop - piece.start)
        if _digest(data) != piece.digest:
            raise NoRanges(f"{self.path} is damaged: bytes {piece.start} to {piece.stop} of {self.shard['file']}")
        return data

    def holding(self, at: int) -> Optional[Piece]:
        """The piece that has byte ``at`` of the shard; None when none has."""
        for index in range(bisect_right(self._starts, at) - 1, -1, -1):
            piece = self.pieces[index]
            if piece.stop > at:
                return piece
            if at - piece.start >= PIECE_BYTES:
                break
        return None

    def prove(self) -> None:
        """Reads every piece; raises NoRanges at the first that is wrong."""
        for piece in self.pieces:
            self.bytes_of(piece)


def prove(path: str, shard: Mapping[str, Any], ranges: Sequence[Range]) -> None:
    """Raises VerificationFailed unless the file at ``path`` has ``ranges`` of that shard, and every piece is right."""
    try:
        with Ranges(path) as found:
            if not found.is_of(shard):
                raise NoRanges("they are of another shard")
            lacks = without(ranges, found.ranges)
            if lacks:
                raise NoRanges(f"bytes {lacks[0][0]} to {lacks[0][1]} are not among them")
            found.prove()
    except NoRanges as problem:
        raise VerificationFailed(f"ranges of rank {shard['rank']}'s shard of {shard['node']}: {problem}") from problem
