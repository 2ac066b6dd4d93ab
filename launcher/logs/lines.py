"""Bytes of one rank to lines that are safe to show. The stored bytes are never changed.

The rules, the same however the bytes were cut into chunks:

- a line ends at ``\\n``; what is unfinished is kept back until it is finished or flushed;
- of what ``\\r`` wrote over, the last state that was not empty is the line (progress bars);
- at most 64 KiB of a line are kept in memory and shown, the rest is counted: ``… +N bytes``;
- bytes that are no UTF-8 are shown as ``\\xff``; terminal control sequences (CSI, OSC, …) and control
  characters but the tab are removed.
"""

from __future__ import annotations

import re

LINE_BYTES = 65536

_DIRTY = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_C1 = re.compile("[\x80-\x9f]")
_CONTROL = re.compile(
    r"""
      \x1b\[ [0-?]* [ -/]* [@-~]?                       # CSI
    | \x1b\] [^\x07\x1b\x9c]* (?: \x07 | \x1b\\ | \x9c )?  # OSC: titles, links, clipboard
    | \x1b[PX^_] [^\x1b\x9c]* (?: \x1b\\ | \x9c )?      # DCS, SOS, PM, APC
    | \x9b [0-?]* [ -/]* [@-~]?                         # the same as single characters
    | [\x90\x98\x9d-\x9f] [^\x07\x1b\x9c]* (?: \x07 | \x1b\\ | \x9c )?
    | \x1b [ -/]* [0-~]?                                # any other escape
    | [\x00-\x08\x0a-\x1f\x7f-\x9f]                     # C0 but the tab, DEL, C1
    """,
    re.VERBOSE,
)
_CUT_CHARACTER = re.compile(rb"[\xc2-\xf4][\x80-\xbf]{0,2}\Z")


def clean(data: bytes) -> str:
    """One line's bytes as text without anything that a terminal would obey."""
    return _CONTROL.sub("", data.decode("utf-8", "backslashreplace"))


class Lines:
    """The line splitter of one rank. Memory: at most two unfinished states of 64 KiB."""

    def __init__(self) -> None:
        self._state = bytearray()  # the unfinished line since its last \r, at most LINE_BYTES of it
        self._over = 0  # how many bytes of it were not kept
        self._before: tuple[bytes, int] | None = None  # the last state that was not empty before it
        self._touched = False  # something of the unfinished line has come
        self._flushed = False  # a part of this very line was already given out

    @property
    def pending(self) -> bool:
        """Whether an unfinished line is kept back."""
        return bool(self._state) or self._before is not None

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` finishes."""
        end = data.rfind(b"\n")
        if end < 0:
            self._unfinished(data)
            return []
        texts: list[str] = []
        start = 0
        if self._touched or self._flushed:
            start = data.index(b"\n") + 1
            self._unfinished(data[: start - 1])
            if self.pending or not self._flushed:
                texts.append(self._take())
            self._reset()
        if start <= end:
            texts += _whole(data[start:end])
        self._unfinished(data[end + 1 :])
        return texts

    def flush(self) -> list[str]:
        """Gives the unfinished line out; what comes later of it will be a line of its own."""
        if not self.pending:
            return []
        text = self._take()
        self._reset()
        self._flushed = True
        return [text]

    def _reset(self) -> None:
        self._state.clear()
        self._over, self._before, self._touched, self._flushed = 0, None, False, False

    def _unfinished(self, data: bytes) -> None:
        if not data:
            return
        self._touched = True
        states = data.split(b"\r")
        self._extend(states[0])
        for state in states[1:]:
            if self._state:
                self._before = bytes(self._state), self._over
            self._state.clear()
            self._over = 0
            self._extend(state)

    def _extend(self, data: bytes) -> None:
        room = LINE_BYTES - len(self._state)
        self._state += data[:room]
        self._over += max(0, len(data) - room)

    def _take(self) -> str:
        if self._state or self._before is None:
            return _shown(bytes(self._state), self._over)
        return _shown(*self._before)


def _shown(kept: bytes, over: int) -> str:
    if not over:
        return clean(kept)
    whole = _CUT_CHARACTER.sub(b"", kept)
    return f"{clean(whole)}… +{over + len(kept) - len(whole)} bytes"


def _whole(data: bytes) -> list[str]:
    """The lines of ``data``, which ends where a line does (without its ``\\n``)."""
    if len(data) <= LINE_BYTES and not _DIRTY.search(data):
        # What nearly all logs are: no control characters. One decode for all lines of the chunk.
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            pass
        else:
            if text.isascii() or not _C1.search(text):
                return text.split("\n")
    return [_line(line) for line in data.split(b"\n")]


def _line(data: bytes) -> str:
    if b"\r" in data:
        data = next((state for state in reversed(data.split(b"\r")) if state), b"")
    return _shown(data[:LINE_BYTES], max(0, len(data) - LINE_BYTES))
