"""The log files that ``tail`` reads, and when their bytes arrived. Standard library only.

Beside ``rank-00003.log`` lies ``rank-00003.times``: lines ``offset time``; the bytes from that offset on
arrived at that time or after, until the next line. Both files only grow; neither is ever held open.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any, BinaryIO, Deque, Dict, NamedTuple, Optional, Tuple

from ..contract.holdings import read_json

CHUNK_BYTES = 65536


class Span(NamedTuple):
    """Bytes [start, stop) of one rank's log, which arrived at ``time`` (seconds since the epoch)."""

    time: float
    start: int
    stop: int


def parse_arrival(line: bytes) -> Optional[Tuple[int, float]]:
    """``offset time`` as numbers; None for a line that is damaged. Nanoseconds are understood too."""
    fields = line.split()
    if len(fields) != 2 or not line.endswith(b"\n"):
        return None
    try:
        offset, time = int(fields[0]), float(fields[1])
    except ValueError:
        return None
    if offset < 0 or not 0 <= time < 1e20:
        return None
    return offset, time / 1e9 if time > 1e14 else time


def _search(file: BinaryIO, size: int, column: int, value: float) -> int:
    """The byte position of a line at or before the last one whose ``column`` is below ``value``."""
    low, high = 0, size
    while high - low > 2048:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()
        at = file.tell()
        entry = parse_arrival(file.readline()) if at < high else None
        if entry is not None and entry[column] < value:
            low = at
        else:
            high = middle
    return low


class Arrivals:
    """A cursor in a ``.times`` file, read on as both files grow."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.time: Optional[float] = None
        self._at = 0
        self._entries: Deque[Tuple[int, float]] = deque()

    def restart(self) -> None:
        self._at = 0
        self._entries.clear()
        self.time = None

    def seek(self, offset: int) -> None:
        """Makes the next span that is asked for be the one at ``offset``, without reading all before it."""
        self.restart()
        try:
            with open(self.path, "rb") as file:
                self._at = _search(file, os.fstat(file.fileno()).st_size, 0, float(offset))
        except OSError:
            self._at = 0

    def offset_since(self, time: float) -> Optional[int]:
        """The first offset whose bytes arrived at ``time`` or later; -1 when none did, None without a file."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(_search(file, size, 1, time))
                if not size:
                    return None
                for line in file:
                    entry = parse_arrival(line)
                    if entry is not None and entry[1] >= time:
                        return entry[0]
        except OSError:
            return None
        return -1

    def _peek(self) -> Optional[Tuple[int, float]]:
        if not self._entries:
            self._fill()
        return self._entries[0] if self._entries else None

    def _fill(self) -> None:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                block = file.read(CHUNK_BYTES)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        self._at += end
        for line in block[:end].splitlines(keepends=True):
            entry = parse_arrival(line)
            if entry is not None:
                self._entries.append(entry)

    def span(self, start: int, end: int, otherwise: float) -> Span:
        """The bytes from ``start`` on that arrived together, at most up to ``end`` and one chunk."""
        entry = self._peek()
        while entry is not None and entry[0] <= start:
            # A clock that was set back must not put a rank's own lines out of order.
            self.time = entry[1] if self.time is None else max(self.time, entry[1])
            self._entries.popleft()
            entry = self._peek()
        stop = min(end, start + CHUNK_BYTES, entry[0] if entry is not None else end)
        return Span(otherwise if self.time is None else self.time, start, stop)


class Source:
    """One rank's log: what was sent of it, and what lies ready."""

    def __init__(self, rank: int, path: str, at: int = 0) -> None:
        self.rank = rank
        self.path = path
        self.at = at
        self.size = 0
        self.mtime = 0.0
        self.inode = 0
        self.arrivals = Arrivals(path[: -len(".log")] + ".times")
        self._window = b""
        self._window_at = 0

    def look(self) -> bool:
        """Takes size and times of the file anew; True when it is not the file that was read before."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        other = found.st_size < self.at or (self.inode != 0 and found.st_ino != self.inode)
        self.inode, self.size, self.mtime = found.st_ino, found.st_size, found.st_mtime
        if other:
            self.at = 0
            self._window = b""
            self.arrivals.restart()
        return other

    def start(self, since: Optional[float], last: Optional[int]) -> None:
        """Where reading begins: the later of what ``since`` (a time) and ``last`` (lines) ask for."""
        if since is not None:
            offset = self.arrivals.offset_since(since)
            if offset is None:
                offset = 0 if self.mtime >= since else -1
            self.at = max(self.at, self._line_start(offset) if 0 <= offset < self.size else self.size)
        if last is not None:
            self.at = max(self.at, self._last_lines(last))
        self.arrivals.seek(self.at)

    def _line_start(self, offset: int) -> int:
        """The beginning of the line that ``offset`` lies in, when it is not too far away."""
        low = max(0, offset - CHUNK_BYTES)
        with open(self.path, "rb") as file:
            file.seek(low)
            before = file.read(offset - low)
        newline = before.rfind(b"\n")
        return low + newline + 1 if newline >= 0 or low == 0 else offset

    def _last_lines(self, count: int) -> int:
        """Where the last ``count`` lines begin; an unfinished line at the end counts as one."""
        if count <= 0:
            return self.size
        at, found = self.size, 0
        limit = max(0, self.size - max(count, 16) * CHUNK_BYTES)
        with open(self.path, "rb") as file:
            while at > limit:
                low = max(limit, at - CHUNK_BYTES)
                file.seek(low)
                block = file.read(at - low)
                end = len(block) - 1 if at == self.size and block.endswith(b"\n") else len(block)
                while True:
                    newline = block.rfind(b"\n", 0, end)
                    if newline < 0:
                        break
                    found += 1
                    if found == count:
                        return low + newline + 1
                    end = newline
                at = low
        return limit

    def next(self, end: int) -> Optional[Span]:
        """The next bytes to send that lie before ``end``; None when all were sent."""
        return self.arrivals.span(self.at, end, self.mtime) if self.at < end else None

    def read(self, span: Span) -> bytes:
        """The bytes of ``span``; fewer when the file shrank meanwhile. Moves on to its end."""
        low = span.start - self._window_at
        if low < 0 or span.stop - self._window_at > len(self._window):
            with open(self.path, "rb") as file:
                file.seek(span.start)
                self._window = file.read(CHUNK_BYTES)
            self._window_at, low = span.start, 0
        data = self._window[low : low + span.stop - span.start]
        self.at = span.start + len(data)
        if self.at >= self._window_at + len(self._window):
            self._window = b""
        return data


def is_alive(process: Any, host: str) -> Optional[bool]:
    """Whether a ``ProcessId`` of a record still runs; None when it belongs to another machine.

    ``host`` is the machine that the record names: one kernel may carry several process trees.
    """
    if not isinstance(process, dict) or (host and host != os.uname().nodename):
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        return None
    if process.get("boot") != boot:
        # The same machine after a restart, or (no host named) one that cannot be told apart.
        return False if host else None
    try:
        with open(f"/proc/{int(process.get('pid', 0))}/stat", "rb") as file:
            stat = file.read()
    except (OSError, ValueError, TypeError):
        return False
    # Field 2 is the name in parentheses and may hold anything: what follows starts after the last one.
    fields = stat[stat.rfind(b")") + 2 :].split()
    return fields[0] not in (b"Z", b"X") and int(fields[19]) == process.get("started_ticks")


class NodeRecords:
    """``attempts/K/nodes/*.json``, read again when they change: who stands where, and who is done."""

    QUIET_S = 30.0
    """A node whose record does not change for so long, beside others that ended, is not waited for."""

    def __init__(self, attempt_dir: str) -> None:
        self.folder = os.path.join(attempt_dir, "nodes")
        self.node_of: Dict[int, str] = {}
        self._seen: Dict[str, Tuple[int, int, int]] = {}
        self._records: Dict[str, Dict[str, Any]] = {}
        self._changed_at: Dict[str, float] = {}
        self._launch = os.path.join(attempt_dir, "launch.json")
        self._expected: Optional[int] = None

    def refresh(self, now: float) -> None:
        """``now`` is a monotonic time in seconds."""
        if self._expected is None:
            self._read_launch()
        try:
            names = [name for name in os.listdir(self.folder) if name.endswith(".json") and not name.startswith(".")]
        except OSError:
            return
        for name in names:
            path = os.path.join(self.folder, name)
            try:
                found = os.stat(path)
            except OSError:
                continue
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if self._seen.get(name) == mark:
                continue
            record = read_json(path)
            if isinstance(record, dict):
                self._seen[name], self._records[name], self._changed_at[name] = mark, record, now
                for rank in record.get("ranks") or ():
                    self.node_of[rank["rank"]] = str(record.get("node", name[:-5]))

    def _read_launch(self) -> None:
        launch = read_json(self._launch)
        if not isinstance(launch, dict):
            return
        nodes = launch.get("nodes") or []
        self._expected = len(nodes) if launch.get("shared") else 1
        rank = 0
        for node in nodes:
            for _ in range(int(node.get("slots", 0))):
                if node.get("name"):
                    self.node_of.setdefault(rank, node["name"])
                rank += 1

    @property
    def ended(self) -> bool:
        """Every expected node has said that it is done."""
        done = sum(1 for record in self._records.values() if record.get("state") == "ended")
        return bool(done) and done >= max(self._expected or 1, len(self._records))

    def settled(self, now: float, quiet_s: float) -> bool:
        """:attr:`ended`, or no node that is left can be expected to write any more."""
        if self.ended:
            return True
        if not self._records:
            return False
        for name, record in self._records.items():
            if record.get("state") == "ended":
                continue
            if is_alive(record.get("agent"), str(record.get("host", ""))) is False:
                continue
            if now - self._changed_at[name] < quiet_s:
                return False
        missing = len(self._records) < (self._expected or 1)
        return not missing or now - max(self._changed_at.values()) >= quiet_s
