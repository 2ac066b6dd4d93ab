"""Printing: data to stdout, everything else to stderr; nothing cut, wrapped or coloured off a terminal.

Plain ``write`` calls, no rich: a pipe takes millions of lines a second that way, and a newcomer's
``zerun --help`` does not wait for imports. rich is loaded for progress bars alone, on a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(stream: IO[Any]) -> bool:
    """Colours go to terminals that want them (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: IO[Any]) -> str:
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if coloured(stream) else text


def data(text: str = "") -> None:
    """A line of what was asked for, to stdout."""
    sys.stdout.write(text + "\n")


def data_bytes(content: bytes) -> None:
    """Bytes to stdout as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def plain(value: Any) -> Any:
    """Dataclasses as JSON values."""
    from ..contract.plain import to_plain

    return to_plain(value)


def data_json(value: Any) -> None:
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False, indent=1) + "\n")


def note(text: str = "") -> None:
    """A line about what happens, to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def error(message: str, hint: str | None = None) -> None:
    sys.stdout.flush()
    note(f"{paint('error:', 'red', sys.stderr)} {message}")
    if hint:
        note(f"{paint('hint:', 'cyan', sys.stderr)} {hint}")


def columns(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Lines of columns as wide as their widest cell; ``right`` names those whose cells stand at the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    at_right = set(right)

    def one(line: list[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(c.rjust(w) if i in at_right else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip()

    return [one(line) for line in lines]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> None:
    """Columns to stdout."""
    for number, line in enumerate(columns(head, rows, right=right)):
        data(paint(line, "bold", sys.stdout) if number == 0 else line)


def visible(text: str) -> str:
    """Foreign text on one line: control characters shown, never obeyed."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def num_bytes(count: int | float | None) -> str:
    """``1.5 GiB``; powers of two, as device memory is told."""
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB" if size < 1024 else f"{size / 1024:.1f} PiB"


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def steps(numbers: Sequence[int]) -> str:
    """All of a few, of many the first two and the last."""
    if len(numbers) <= 10:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, … {numbers[-1]} ({len(numbers)} of them)"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 5 s``, ``2 h 7 min``, ``3 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


@contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields ``advance(done_bytes, total_bytes)``: a bar on a terminal; elsewhere a line every tenth."""
    if coloured(sys.stderr):
        with _bar(title) as advance:
            yield advance
    else:
        yield _tenths(title)


def _tenths(title: str) -> Callable[[int, int], None]:
    said = 0

    def advance(done: int, total: int) -> None:
        nonlocal said
        tenth = 10 * done // total if total else 0
        if tenth > said:
            said = tenth
            note(f"{title}: {10 * tenth} %, {num_bytes(done)} of {num_bytes(total)}")

    return advance


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        number = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)
