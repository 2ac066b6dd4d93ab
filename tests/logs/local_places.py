"""Places on this machine: real agent verbs in real processes on real folders, and connections that can be cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.backends.protocol import Place
from launcher.contract.errors import Unreachable, UsageError
from launcher.contract.folder import AttemptFolder, RunFolder
from launcher.contract.plain import dumps, write_atomically
from launcher.contract.records import NodeRecord, ProcessId, RankRecord
from launcher.transports.protocol import Progress, Result

ROOT = Path(__file__).resolve().parents[2]
_OLD = Path.home() / ".pyenv/versions/3.9.18/bin/python"
AGENT_PYTHON = str(_OLD) if _OLD.exists() else sys.executable
_TAIL = """
import json, sys
from launcher.agent.tail import stream
sys.exit(stream(json.load(sys.stdin), sys.stdout.buffer))
"""
_SERVE = _TAIL.replace("tail import stream", "pull import serve").replace("stream(", "serve(")
_VERB = """
import importlib, json, sys
from launcher.agent.main import _JSON_VERBS
verb = sys.argv[1]
json.dump(getattr(importlib.import_module(_JSON_VERBS[verb], "launcher.agent"), verb)(json.load(sys.stdin)), sys.stdout)
"""


class LocalStream:
    """A process whose stdout is read as it comes; ``cut`` is what a pulled cable does."""

    def __init__(self, argv: Sequence[str], stdin: bytes) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(stdin)
        self.process.stdin.close()
        self.broken = False

    def __iter__(self) -> Iterator[bytes]:
        assert self.process.stdout is not None
        while True:
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if self.broken:
                raise Unreachable("connection lost")
            if not chunk:
                return
            yield chunk

    def cut(self) -> None:
        self.broken = True
        self.process.kill()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()

    def __enter__(self) -> LocalStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


class LocalTransport:
    """This machine as a peer of the SSH transports. ``cut_after`` bytes of copying the connection breaks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fetched: list[str] = []
        self.pushed: list[str] = []
        self.cut_after: int | None = None

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout_s, cwd=ROOT)
        return Result(done.returncode, done.stdout, done.stderr)

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> LocalStream:
        return LocalStream(argv, stdin)

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, mode=mode)

    def fetch(self, files: Sequence[str], source: str, target: Path, *, progress: Progress | None = None) -> None:
        self._copy(files, Path(source), target, self.fetched, progress)

    def push(self, files: Sequence[str], source: Path, target: str, *, progress: Progress | None = None) -> None:
        self._copy(files, source, Path(target), self.pushed, progress)

    def _copy(
        self, files: Sequence[str], source: Path, target: Path, copied: list[str], progress: Progress | None
    ) -> None:
        for name in files:
            size = (source / name).stat().st_size
            if self.cut_after is not None:
                self.cut_after -= size
                if self.cut_after < 0:
                    self.cut_after = None
                    raise Unreachable(f"{self.name}: connection lost")
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            part = (target / name).with_name(f".{Path(name).name}.{self.name}.part")
            shutil.copyfile(source / name, part)
            part.replace(target / name)
            copied.append(name)
            if progress is not None:
                progress(size)

    def close(self) -> None: ...


class LocalBackend:
    """What these tests need of a backend: places, and the agent's verbs there."""

    name = "direct"

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self.streams: dict[str, LocalStream] = {}
        self.asked: list[dict[str, Any]] = []
        self.down: set[str] = set()
        self.apart = False  # nodes do not reach each other

    def places(self) -> Sequence[Place]:
        return self._places

    def call(
        self, place: Place, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> Mapping[str, Any]:
        if place.transport.name in self.down:
            raise Unreachable(f"{place.transport.name}: no route to host")
        result = place.transport.run([AGENT_PYTHON, "-c", _VERB, verb], stdin=json.dumps(request).encode())
        if result.returncode:
            raise UsageError(result.stderr.decode())
        answer: Mapping[str, Any] = json.loads(result.stdout)
        return answer

    def tail(self, place: Place, request: Mapping[str, Any]) -> LocalStream:
        if place.transport.name in self.down:
            raise Unreachable(f"{place.transport.name}: no route to host")
        self.asked.append(dict(request))
        stream = LocalStream([AGENT_PYTHON, "-c", _TAIL], json.dumps(request).encode())
        self.streams[place.transport.name] = stream
        return stream

    def serve(self, place: Place, request: Mapping[str, Any]) -> LocalStream:
        if place.transport.name in self.down or (self.apart and "ranges" not in request):
            raise Unreachable(f"{place.transport.name}: no route to host")
        return LocalStream([AGENT_PYTHON, "-c", _SERVE], json.dumps(request).encode())

    def close(self) -> None: ...


def local_backend(folder: Path, nodes: Sequence[str | None]) -> LocalBackend:
    """A place a node below ``folder``; None is a place that all nodes share."""
    named = [(node, node or "shared") for node in nodes]
    return LocalBackend([Place(LocalTransport(name), str(folder / name / "runs"), node) for node, name in named])


def attempt_at(place: Place, run: str, attempt: int = 1) -> AttemptFolder:
    folder = RunFolder.at(place.runs, run).attempt(attempt)
    for part in (folder.logs, folder.nodes):
        Path(part).mkdir(parents=True, exist_ok=True)
    return folder


def write_record(folder: AttemptFolder, node: str, ranks: Sequence[int | RankRecord], state: str = "ended") -> None:
    """A node's record by an agent that is this very process."""
    own = own_process()
    records = [r if isinstance(r, RankRecord) else RankRecord(r, i, own.pid, 1.0) for i, r in enumerate(ranks)]
    record = NodeRecord(node, 0, own, state, 1.0, 1.0, host=os.uname().nodename, ranks=tuple(records))
    write_atomically(str(folder.node_record(node)), dumps(record))


def own_process() -> ProcessId:
    stat = Path("/proc/self/stat").read_bytes()
    ticks = int(stat[stat.rfind(b")") + 2 :].split()[19])
    return ProcessId(os.getpid(), ticks, Path("/proc/sys/kernel/random/boot_id").read_text().strip())


class Log:
    """A rank's log as the agent writes it: bytes, and beside them when they came."""

    def __init__(self, folder: AttemptFolder, rank: int) -> None:
        self.path = Path(folder.log(rank))
        self.times = Path(folder.arrivals(rank))

    def write(self, data: bytes, time: float | None = None) -> None:
        offset = self.path.stat().st_size if self.path.exists() else 0
        if time is not None:
            with self.times.open("ab") as file:
                file.write(f"{offset} {time}\n".encode())
        with self.path.open("ab") as file:
            file.write(data)
