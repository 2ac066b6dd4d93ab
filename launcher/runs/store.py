"""The run store at home: one folder a run, and an append-only journal in it.

Nothing is kept only in memory and nothing is overwritten: intent is written before its effect.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..backends.protocol import Handle
from ..contract.errors import UsageError
from ..contract.folder import RunFolder, is_safe_name
from ..contract.plain import PlainError, dumps, from_plain, loads, read_file, to_plain, write_atomically
from .locks import hold, is_held
from .state import EXITS


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``. ``at`` is this machine's clock, seconds since the epoch."""

    at: float
    event: str
    attempt: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run at home: its folder, what it was made from, and its journal."""

    folder: Path
    about: Mapping[str, Any]  # run.json
    events: tuple[Event, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def paths(self) -> RunFolder:
        return RunFolder.at(str(self.folder.parent), self.name)

    @property
    def tags(self) -> tuple[str, ...]:
        found = self.about.get("tags", ())
        return tuple(str(tag) for tag in found) if isinstance(found, (list, tuple)) else ()

    @property
    def is_being_made(self) -> bool:
        """Whether some command is submitting an attempt of it right now (see :meth:`making`)."""
        return is_held(self.folder / ".making")

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Held while an attempt is made, and let go by the kernel however the command ends.

        Raises UsageError when another command makes one. What the journal says decides; on a filesystem
        without locks (some NFS) only this courtesy is missing.
        """
        with hold(self.folder / ".making") as ours:
            if not ours:
                raise UsageError(
                    f"an attempt of {self.name} is being made by another command", hint=f"zerun status {self.name}"
                )
            yield

    @property
    def attempt(self) -> int:
        """The newest attempt that the launcher knows of."""
        return max((e.attempt for e in self.events), default=1)

    def last(self, *names: str, attempt: int | None = None) -> Event | None:
        """The newest event of one of these names."""
        for event in reversed(self.events):
            if event.event in names and (attempt is None or event.attempt == attempt):
                return event
        return None

    @property
    def handle(self) -> Handle | None:
        """Where the newest attempt runs; None when that is not known, which lets it be found by its name."""
        submitted = self.last("submitted", attempt=self.attempt)
        try:
            return from_plain(_PlainHandle, submitted.data.get("handle")).real() if submitted else None
        except ValueError:
            return None


@dataclass(frozen=True)
class _PlainEvent:
    at: float
    event: str
    attempt: int
    data: dict[str, Any]


@dataclass(frozen=True)
class _PlainHandle:
    backend: str
    data: dict[str, Any]

    def real(self) -> Handle:
        backend: Literal["slurm", "direct"] = "slurm" if self.backend == "slurm" else "direct"
        agents = self.data.get("agents", {})
        if not isinstance(agents, dict) or not all(isinstance(agent, dict) for agent in agents.values()):
            raise PlainError("the handle's agents are no processes by node")
        return Handle(backend, self.data)


class _Kept(dict[str, Any]):
    """What was kept in a file: a key that ought to be there and is not tells of the file."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._source = source

    def __missing__(self, key: str) -> NoReturn:
        raise UsageError(f"{self._source} is damaged: {key!r} is missing", hint=_DAMAGED)


_DAMAGED = "it was changed from outside; the job itself goes on, and its own files are on its cluster"
_MAPPINGS = ("job", "cluster", "plan", "code")


def _wrong_in(about: Any) -> str | None:
    """What is wrong with the content of a ``run.json``, as far as this floor knows it."""
    if not isinstance(about, dict):
        return "it holds no JSON object"
    wrong = next((key for key in _MAPPINGS if not isinstance(about.get(key, {}), dict)), None)
    if wrong is not None:
        return f"{wrong!r} is no JSON object"
    limit = about.get("time_s")
    return None if limit is None or isinstance(limit, (int, float)) else "'time_s' is no number"


class RunStore:
    """All runs below one folder. Only the launcher writes here what is the launcher's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def new_name(self, job: str, now: datetime.datetime) -> str:
        """``JOB-20260131-142501-3f9a``: sorts by time within a job and cannot meet another's."""
        return f"{job}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def create(self, name: str, about: Mapping[str, Any]) -> Run:
        return self._written(self._unseen(name, about))

    @contextlib.contextmanager
    def begin(self, name: str, about: Mapping[str, Any]) -> Iterator[Run]:
        """As :meth:`create`, and :meth:`Run.making` from before anybody can see the run: who saw it in between would
        take it for one whose submit was cut."""
        run = self._unseen(name, about)
        with run.making():
            yield self._written(run)

    def _unseen(self, name: str, about: Mapping[str, Any]) -> Run:
        folder = self.root / name
        self.root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        return Run(folder, about, ())

    @staticmethod
    def _written(run: Run) -> Run:
        write_atomically(run.folder / "run.json", dumps(run.about), durable=True)
        return run

    def load(self, name: str) -> Run:
        """Raises UsageError when there is no such run, or when what lies there is none."""
        folder = self.root / name
        path = folder / "run.json"
        try:
            about = loads(read_file(path))
        except FileNotFoundError:
            raise UsageError(f"no run {name!r} in {self.root}", hint="zerun ls names the runs") from None
        except (OSError, ValueError) as problem:
            raise UsageError(f"{path} cannot be read: {problem}", hint=_DAMAGED) from None
        wrong = _wrong_in(about)
        if wrong is not None:
            raise UsageError(f"{path} is damaged: {wrong}", hint=_DAMAGED)
        return Run(folder, _Kept(str(path), about), tuple(self._events(folder)))

    @staticmethod
    def _events(folder: Path) -> Iterator[Event]:
        path = folder / "events.jsonl"
        try:
            lines = read_file(path).split(b"\n")
        except FileNotFoundError:
            return
        except OSError as problem:
            raise UsageError(f"{path} cannot be read: {problem}", hint=_DAMAGED) from None
        for line in lines[:-1]:  # a last line without its end was cut by a crash: it never happened
            try:
                kept = from_plain(_PlainEvent, loads(line))
            except ValueError:
                continue  # such a cut line, with later ones after it; or damage
            if kept.event != "ended" or kept.data.get("state") in EXITS:
                yield Event(kept.at, kept.event, kept.attempt, _Kept(f"{path}, {kept.event!r}", kept.data))

    def append(self, run: Run, event: str, attempt: int, at: float, **data: Any) -> Run:
        """Adds an event, durably, before this returns. One write a line, so that two shells do not mix theirs."""
        record = Event(at, event, attempt, data)
        line = json.dumps(to_plain(record), ensure_ascii=False, separators=(",", ":")) + "\n"
        path = run.folder / "events.jsonl"
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = "\n" + line  # the cut line of a crashed launcher stays by itself
            content = line.encode()
            if os.write(handle, content) != len(content):  # a disk that is nearly full takes a part, and says no more
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(handle)
        finally:
            os.close(handle)
        return replace(run, events=(*run.events, record))

    def names(self) -> list[str]:
        """Every run here, oldest first."""
        if not self.root.is_dir():
            return []
        found = []
        for folder in self.root.iterdir():
            if is_safe_name(folder.name):
                with contextlib.suppress(OSError):  # no run, or one that somebody removes just now
                    found.append(_by_time(folder))
        return [name for _, _, name in sorted(found)]

    def resolve(self, given: str) -> str:
        """The run that ``given`` means: its name, a unique beginning of it, or ``last``."""
        names = self.names()
        if given == "last":
            if not names:
                raise UsageError(f"there is no run in {self.root} yet", hint="zerun submit JOB.yaml --cluster CLUSTER")
            return names[-1]
        if given in names:
            return given
        matches = [n for n in names if n.startswith(given)] if given else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            told = f"{given!r} means {len(matches)} runs: {', '.join(matches[-5:])}"
            raise UsageError(told, hint="give more of it; `last` is the newest run of all")
        raise UsageError(f"no run {given!r} in {self.root}", hint="zerun ls names the runs")


_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


def _by_time(folder: Path) -> tuple[str, float, str]:
    match = _STAMP.search(folder.name)
    return (match.group(1) if match else "", (folder / "run.json").stat().st_mtime, folder.name)
