"""Log lines to a stream: ``rank@node`` in front, bytes out, no rich."""

from __future__ import annotations

import json
import zlib
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from ..logs.merge import LogLine

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class LineWriter:
    """Writes lines that are already clean (logs.lines). ``at_once``: each is seen as it comes.

    A rank's colour follows from its name alone, so that it is the same in every run.
    """

    def __init__(self, stream: IO[bytes], *, coloured: bool, at_once: bool, as_json: bool = False) -> None:
        self._stream = stream
        self._coloured = coloured and not as_json
        self._at_once = at_once
        self._as_json = as_json
        self._prefixes: dict[tuple[int, str], str] = {}

    def write(self, line: LogLine) -> None:
        if self._as_json:
            text = json.dumps(line._asdict(), ensure_ascii=False)
        else:
            text = self._prefix(line.rank, line.node) + line.text
        self._stream.write(text.encode("utf-8", "backslashreplace") + b"\n")
        if self._at_once:
            self._stream.flush()

    def _prefix(self, rank: int, node: str) -> str:
        known = self._prefixes.get((rank, node))
        if known is None:
            known = f"{rank}@{node}"
            if self._coloured:
                colour = _COLOURS[zlib.crc32(known.encode()) % len(_COLOURS)]
                known = f"\x1b[{colour}m{known}\x1b[0m"
            known = self._prefixes.setdefault((rank, node), known + "  ")
        return known
