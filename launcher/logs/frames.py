"""The stream of frames that the agent's ``tail`` sends (agent/tail.py says what they are)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..contract.errors import Unreachable
from ..contract.plain import loads

HEAD_BYTES = 2**20
FRAME_BYTES = 2**24


class Frames:
    """Cuts chunks, however they come, into (head, payload); events have an empty payload."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rest = b""
        self._head: dict[str, Any] | None = None
        self._begun = False
        self.noise = b""  # what came before the first frame: a login shell that greets, or a complaint

    def feed(self, chunk: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Raises Unreachable when what comes is not ours: nothing after it could be trusted."""
        data = self._rest + chunk if self._rest else chunk
        at = 0
        try:
            while True:
                if self._head is None:
                    end = data.find(b"\n", at)
                    if end < 0:
                        if len(data) - at > HEAD_BYTES:
                            raise self._foreign(data[at : at + 80])
                        return
                    line, at = data[at:end], end + 1
                    self._head = self._parse(line)
                    if self._head is None:
                        continue
                num_bytes = self._head.get("bytes", 0) if "rank" in self._head and "event" not in self._head else 0
                if not isinstance(num_bytes, int) or not 0 <= num_bytes <= FRAME_BYTES:
                    raise self._foreign(str(self._head).encode())
                if len(data) - at < num_bytes:
                    return
                head, payload = self._head, data[at : at + num_bytes]
                self._head, at = None, at + num_bytes
                yield head, payload
        finally:
            self._rest = data[at:]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            value = loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            self._begun = True
            return value
        if self._begun or len(self.noise) > HEAD_BYTES:
            raise self._foreign(line)
        self.noise += line + b"\n"
        return None

    def _foreign(self, found: bytes) -> Unreachable:
        return Unreachable(f"{self._source}: its log stream cannot be understood: {found[:80]!r}")
