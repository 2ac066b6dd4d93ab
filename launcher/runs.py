"""The run store at home: one folder a run, an append-only journal in it, states folded from it.

Nothing is kept only in memory and nothing is overwritten: intent is written before its effect, and what a
run *is* follows from three sources read together: the journal (what we did), the backend's poll (where it
queues) and what the agents wrote (how it went). When they do not answer, the state is unknown, and said so.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional

from .backends.protocol import Handle, Poll
from .contract.errors import Exit, UsageError
from .contract.folder import RunFolder, is_safe_name
from .contract.plain import PlainError, dumps, from_plain, loads, to_plain, write_atomically
from .contract.records import NodeRecord, Outcome
from .cramped import cramped
from .diagnosis import Cause, first_cause
from .locks import hold, is_held

State = Literal["submitting", "queued", "running", "done", "failed", "cancelled", "stopped", "time_limit", "unknown"]
EXITS: Mapping[State, Exit | None] = {
    "submitting": None,
    "queued": None,
    "running": None,
    "unknown": None,
    "done": Exit.DONE,
    "failed": Exit.JOB_FAILED,
    "cancelled": Exit.CANCELLED,
    "stopped": Exit.STOPPED,
    "time_limit": Exit.TIME_LIMIT,
}


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``. ``at`` is this machine's clock, seconds since the epoch."""

    at: float
    event: str
    attempt: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """The last line of rank 0's metrics. ``steps`` is what the attempt is to reach."""

    step: int
    steps: Optional[int] = None  # Optional: from_plain reads no other spelling
    loss: Optional[float] = None
    step_time_s: Optional[float] = None
    tokens_per_s: Optional[float] = None


@dataclass(frozen=True)
class Observation:
    """What one look at an attempt found. ``replies`` are the agents' records from every place that answered;
    ``silent`` names the places that did not, with the reason."""

    poll: Poll
    attempt: int
    records: tuple[NodeRecord, ...] = ()
    alive: frozenset[str] = frozenset()  # nodes whose agent lives
    outcome: Outcome | None = None
    last_lines: Mapping[int, Sequence[str]] = field(default_factory=dict)
    checkpoints: tuple[int, ...] = ()  # whole ones on the line that the run is on, oldest first
    attempt_checkpoints: tuple[int, ...] = ()  # those that this attempt wrote
    silent: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    progress: Progress | None = None
    being_made: bool = False  # some command was submitting it when the look began


@dataclass(frozen=True)
class RunState:
    """A run as it can be told. ``exit_code`` is what ``wait`` returns, None while it goes on."""

    run: str
    job: str
    cluster: str
    state: State
    attempt: int
    since: float | None = None
    exit_code: int | None = None
    why: str = ""
    nodes: tuple[str, ...] = ()
    ranks: int = 0
    cause: Cause | None = None
    outcome: Outcome | None = None
    checkpoints: tuple[int, ...] = ()
    handle: Handle | None = None
    notes: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    progress: Progress | None = None

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain


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
        folder = self.root / name
        self.root.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        write_atomically(folder / "run.json", dumps(about), durable=True)
        return Run(folder, about, ())

    def load(self, name: str) -> Run:
        """Raises UsageError when there is no such run, or when what lies there is none."""
        folder = self.root / name
        path = folder / "run.json"
        try:
            about = loads(path.read_bytes())
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
            lines = path.read_bytes().split(b"\n")
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
        handle = os.open(run.folder / "events.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":
                line = "\n" + line  # the cut line of a crashed launcher stays by itself
            os.write(handle, line.encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        return replace(run, events=(*run.events, record))

    def names(self) -> list[str]:
        """Every run here, oldest first."""
        if not self.root.is_dir():
            return []
        found = [f for f in self.root.iterdir() if is_safe_name(f.name) and (f / "run.json").is_file()]
        return [f.name for f in sorted(found, key=_by_time)]

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
            raise UsageError(f"{given!r} means {len(matches)} runs: {', '.join(matches[-5:])}", hint="give more of it")
        raise UsageError(f"no run {given!r} in {self.root}", hint="zerun ls names the runs")


_STAMP = re.compile(r"-(\d{8}-\d{6})-[0-9a-f]{4}$")


def _by_time(folder: Path) -> tuple[str, float, str]:
    match = _STAMP.search(folder.name)
    return (match.group(1) if match else "", (folder / "run.json").stat().st_mtime, folder.name)


# --- folding --------------------------------------------------------------------------------------


def fold(run: Run, seen: Observation) -> RunState:
    """The state of the run's newest attempt, from the journal and one look at it."""
    state, why = _judge(run, seen)
    before = run.last("ended", "submitted", attempt=seen.attempt)
    if before is not None and before.event == "ended" and state in ("failed", "unknown") and _has_gaps(seen):
        # It was seen to end when all could be read. A scratch disk that was wiped since, or a node that is off, does
        # not make a run that is done a failed one.
        state, why = before.data["state"], str(before.data.get("why", ""))
    cause = None
    if state in ("failed", "time_limit", "cancelled"):
        cause = first_cause(seen.records, seen.outcome, seen.last_lines)
        if state == "failed" and cause is not None:
            why = cause.sentence()
    refused = run.last("submit_failed", attempt=seen.attempt)
    if refused is not None and state in ("failed", "cancelled"):
        # What began was ended by the submit itself; the reason is why it could not go on.
        state, why, cause = "failed", f"it was not submitted: {refused.data.get('error', '')}", None
    exit_code = EXITS[state]
    if state == "time_limit" and seen.attempt_checkpoints:
        exit_code = Exit.STOPPED  # resumable: this attempt left a whole checkpoint
    return RunState(
        run=run.name,
        job=str(run.about.get("job_name", "")),
        cluster=str(run.about.get("cluster_name", "")),
        state=state,
        attempt=seen.attempt,
        since=_since(run, seen, state),
        exit_code=None if exit_code is None else int(exit_code),
        why=why,
        nodes=tuple(r.node for r in seen.records) or seen.poll.nodes,
        ranks=sum(len(r.ranks) for r in seen.records),
        cause=cause,
        outcome=seen.outcome,
        checkpoints=seen.checkpoints,
        handle=run.handle,
        notes=(*(f"{place} did not answer: {reason}" for place, reason in seen.silent.items()), *cramped(seen.records)),
        tags=run.tags,
        progress=seen.progress,
    )


def _has_gaps(seen: Observation) -> bool:
    return len(seen.records) < seen.num_nodes and not seen.alive


def _judge(run: Run, seen: Observation) -> tuple[State, str]:
    records = seen.records
    if run.handle is None and not records and seen.poll.state in ("absent", "unknown"):
        return _without_handle(run, seen)
    if len(records) >= seen.num_nodes and all(r.state == "ended" for r in records):
        return _begins_again(run, seen) or _ended(run, seen)
    over = seen.poll.state in ("ended", "absent")
    living = [r for r in records if r.node in seen.alive]
    if records and not living and over and not seen.silent:
        return _ended(run, seen)  # the agents went without a last word: power cut, or killed
    if living:
        return "running", ""
    if records and seen.silent and all(r.state == "ended" and r.failure is not None for r in records):
        # Who answers says how it ended. A node that is gone for good must not keep the run open for ever: what may
        # still run there ends by itself, since an agent that hears from no other ends its ranks.
        return _ended(run, seen)
    if seen.poll.state == "queued":
        return "queued", seen.poll.why or seen.poll.word
    if seen.poll.state == "running":
        return "running", "" if records else "starting"
    if seen.poll.state == "unknown" or seen.silent:
        reasons = [seen.poll.why, *seen.silent.values()]
        return "unknown", next((r for r in reasons if r), "no answer")
    return _ended(run, seen)


def _without_handle(run: Run, seen: Observation) -> tuple[State, str]:
    if run.last("submit_failed", attempt=run.attempt) is not None:
        return "failed", ""
    if run.last("cancelled", attempt=run.attempt) is not None:
        return "cancelled", ""
    if seen.being_made:
        return "submitting", "a command is submitting it right now"
    if seen.poll.state == "unknown":
        return "unknown", f"its submit lost the answer, and {seen.poll.why or 'the cluster does not answer'}"
    return "failed", "its submit was cut before anything reached the cluster"


def _begins_again(run: Run, seen: Observation) -> tuple[State, str] | None:
    """A job that Slurm took its nodes from (preempted, requeued) waits for the next attempt: it is over when Slurm
    says so, not when its agents have ended. None for what is over."""
    if run.handle is None or run.handle.backend != "slurm" or run.last("cancelling", attempt=run.attempt):
        return None
    if seen.poll.state == "queued":
        return "queued", f"attempt {seen.attempt} was ended by Slurm, the next one waits: {seen.poll.why}"
    if seen.poll.state == "running" and {r.failure.kind for r in seen.records if r.failure} == {"cancelled"}:
        return "running", "Slurm told it to stop: it ends, or begins again"
    return None


def _ended(run: Run, seen: Observation) -> tuple[State, str]:
    failures = [r.failure for r in seen.records if r.failure is not None]
    kinds = {f.kind for f in failures}
    statuses = [rank.status for r in seen.records for rank in r.ranks]
    complete = len(seen.records) >= seen.num_nodes and bool(statuses)
    if complete and not failures and all(s == 0 for s in statuses):
        return "done", ""
    if run.last("cancelling", attempt=run.attempt) or seen.poll.word == "CANCELLED":
        return "cancelled", ""
    if seen.outcome is not None and seen.outcome.outcome == "stopped":
        return "stopped", seen.outcome.reason
    if complete and not failures and _saved_when_asked(run, seen, statuses):
        return "stopped", f"asked to end, the program exited with {int(Exit.STOPPED)}: saved, it says"
    if "time_limit" in kinds or seen.poll.word == "TIMEOUT" or _ran_to_its_limit(run, seen, kinds):
        return "time_limit", "the time limit ended it"
    if seen.poll.word in _FROM_OUTSIDE:
        return "failed", _FROM_OUTSIDE[seen.poll.word]
    if kinds == {"cancelled"}:
        return "cancelled", "asked to end, and not from here: another laptop's cancel, or a machine going down"
    if failures:
        first = min(failures, key=lambda f: f.at or 0.0)
        return "failed", first.message
    if not seen.records:
        if seen.poll.word == "COMPLETED":
            return "failed", "the batch script ended, but no agent wrote a record"
        word = seen.poll.word or "it is gone from the queue"
        return "failed", f"{word}{': ' + seen.poll.why if seen.poll.why else ''}; no agent ever started"
    gone = [r.node for r in seen.records if r.state != "ended"]
    if gone:
        return "failed", f"the agent on {', '.join(gone)} went without a last word (power cut, or killed)"
    lost = seen.num_nodes - len(seen.records)
    return "failed", seen.poll.word or f"{lost} of {seen.num_nodes} nodes left no record that can be read"


def _saved_when_asked(run: Run, seen: Observation, statuses: Sequence[int | None]) -> bool:
    """A program has no engine's record of what it saved. Its 75 counts only as the answer to our stop signal."""
    asked = any(r.stop_sent_at is not None for r in seen.records)
    return asked and bool(run.about.get("job", {}).get("program")) and set(statuses) <= {0, int(Exit.STOPPED)}


_FROM_OUTSIDE = {
    "NODE_FAIL": "Slurm lost a node of it (NODE_FAIL)",
    "PREEMPTED": "Slurm preempted it for another job",
    "BOOT_FAIL": "a node did not boot (BOOT_FAIL)",
    "DEADLINE": "its deadline passed in Slurm",
    "OUT_OF_MEMORY": "Slurm ended it: out of memory",
}


def _ran_to_its_limit(run: Run, seen: Observation, kinds: set[str]) -> bool:
    """Without accounting Slurm's TIMEOUT is not to be had: a SIGTERM from outside after the whole time says it."""
    limit = run.about.get("time_s")
    if limit is None or "cancelled" not in kinds or run.about.get("backend") != "slurm":
        return False
    return any(r.ended_at is not None and r.ended_at - r.started_at >= limit - 2 for r in seen.records)


def _since(run: Run, seen: Observation, state: State) -> float | None:
    if EXITS[state] is not None:
        ends = [r.ended_at for r in seen.records if r.ended_at is not None]
        if ends:
            return max(ends)
        last = run.last("ended", "cancelled", "cancelling", "submit_failed", attempt=run.attempt)
        return last.at if last else None
    if state == "running" and seen.records:
        return min(r.started_at for r in seen.records)
    submitted = run.last("submitted", "submitting", attempt=run.attempt)
    return submitted.at if submitted else None
