"""How a backend speaks with the agent's verbs at a place: the runtime is put there first, once.

A submit is as few commands as can be: where runs lie, what of the runtime and of the job's code is there already is one
question, and what lacks of the code is one send.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ..agent import expand
from ..bundles import Shipment
from ..contract import errors
from ..contract.errors import Exit, Unreachable, UsageError, ZerunError
from ..contract.folder import RunFolder, blob
from ..transports.protocol import Result, Stream, Transport
from .protocol import Submission

T = TypeVar("T")
R = TypeVar("R")

_BARE = ("-E", "-S")  # verbs need the standard library alone, and site-packages can be slow to look through

_FRESH_S = 60.0  # so long what was seen there is still believed to be there
_SENDS = 3

_CLASSES: Mapping[int, type[ZerunError]] = {
    Exit.USAGE: errors.UsageError,
    Exit.DOES_NOT_FIT: errors.DoesNotFit,
    Exit.UNREACHABLE: errors.Unreachable,
    Exit.REFUSED: errors.Refused,
    Exit.NO_SPACE: errors.NoSpace,
    Exit.VERIFICATION: errors.VerificationFailed,
    Exit.PARTIAL: errors.PartialAnswer,
    Exit.JOB_FAILED: errors.JobFailed,
}


@dataclass(frozen=True)
class Look:
    """What the first question to a machine told. ``offset_s``: its clock less ours, known to ± ``error_s``.

    ``code``: of which job's code it was asked, and ``lacking``: which of its contents are not there. ``at``: when, by
    our monotonic clock.
    """

    runs: str
    have: frozenset[str]
    offset_s: float
    error_s: float
    code: str | None = None
    lacking: frozenset[str] = frozenset()
    at: float = 0.0

    def tells_of(self, code: Shipment) -> bool:
        return self.code == code.name and time.monotonic() - self.at < _FRESH_S

    def has(self, code: Shipment) -> bool:
        return code.name in self.have and not self.lacking


@dataclass
class Caller:
    """Speaks with the machines of one cluster. ``runs`` is as the description has it, not yet expanded; ``literal``
    when no description has it: it is a folder at home, whose name may hold a dollar sign like any other letter."""

    runs: str
    agent_python: str
    runtime: tuple[str, bytes]  # SHA-256 and bytes of the runtime zip
    literal: bool = False
    _looks: dict[str, Look] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    expected: Shipment | None = None  # the code that will be put: asked about with the first question
    sent: dict[str, frozenset[str]] = field(default_factory=dict)  # by machine: contents of the code that it lacked

    @property
    def runtime_name(self) -> str:
        return f"{self.runtime[0]}.zip"

    def look(self, transport: Transport, blobs: Sequence[str] = (), code: Shipment | None = None) -> Look:
        """Where runs lie on that machine, and which of ``blobs``, the runtime and ``code`` are there already.

        Raises Unreachable, Refused, and UsageError for a path or an agent_python that does not work there.
        """
        argv = [self.agent_python, *_BARE, "-c", _source()]
        names = [self.runtime_name, *blobs, *([code.name] if code is not None else [])]
        request: dict[str, Any] = {"runs": self.runs, "literal": self.literal, "blobs": names}
        if code is not None:
            request["contents"] = list(code.sizes)
        before = time.time()
        done = transport.run(argv, stdin=json.dumps(request).encode())
        after = time.time()
        if done.returncode in (126, 127):
            raise UsageError(
                f"{transport.name}: agent_python {self.agent_python!r} is not there",
                hint="name a Python of 3.9 or newer as agent_python in the cluster's description",
            )
        answer = _read(transport.name, "the first look", done.returncode, done.stdout, done.stderr)
        if "error" in answer:
            raise UsageError(f"{transport.name}: {answer['error']}", hint=answer.get("hint"))
        half, lacking = (after - before) / 2, frozenset(answer["lacking"])
        there = (answer["runs"], frozenset(answer["have"]), answer["now"] - (before + after) / 2, half)
        return Look(*there, code.name if code is not None else None, lacking, time.monotonic())

    def ready(self, transport: Transport) -> str:
        """The expanded ``runs`` of that machine, where the runtime now is. Asked once a machine."""
        with self._lock(transport):
            if transport.name not in self._looks:
                self._look_and_put(transport, self.expected)
            return self._looks[transport.name].runs

    def _lock(self, transport: Transport) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(transport.name, threading.Lock())

    def _look_and_put(self, transport: Transport, code: Shipment | None) -> Look:
        look = self.look(transport, code=code)
        self._put(transport, look, {self.runtime_name: self.runtime[1]})
        self._looks[transport.name] = look
        return look

    def ahead_s(self, transport: Transport) -> float:
        """How far that machine's clock is ahead of ours, by the first look at it; 0 within what a look can tell."""
        look = self._looks.get(transport.name)
        return look.offset_s if look is not None and abs(look.offset_s) > look.error_s else 0.0

    def put_blobs(self, transport: Transport, blobs: Mapping[str, bytes]) -> None:
        """Sends what that machine lacks."""
        if set(blobs) <= {self.runtime_name}:
            self.ready(transport)
            return
        look = self.look(transport, list(blobs))
        self._put(transport, look, {self.runtime_name: self.runtime[1], **blobs})
        with self._guard:
            self._looks[transport.name] = look

    def _put(self, transport: Transport, look: Look, blobs: Mapping[str, bytes]) -> None:
        for name, data in blobs.items():
            if name not in look.have:
                digest, dot, suffix = name.partition(".")
                transport.put(data, str(blob(look.runs, digest, dot + suffix)))

    def put_code(self, transport: Transport, code: Shipment) -> None:
        """Sends what that machine lacks of it, in one piece; what of a cut send arrived is not sent again.

        Raises NoSpace, Unreachable, VerificationFailed, and UsageError when what is kept at home is damaged.
        """
        with self._lock(transport):
            look = self._looks.get(transport.name)
            if look is None or not look.tells_of(code):
                look = self._look_and_put(transport, code)
            lacking = look.lacking
            for _ in range(0 if look.has(code) else _SENDS):
                lacking = self._send(transport, look.runs, code, lacking)
                if not lacking:
                    break
            if lacking:
                raise ZerunError(
                    f"{transport.name}: {len(lacking)} files of the job's code went again as soon as they were there",
                    hint=f"something deletes files below {look.runs}/.blobs",
                )
            there = replace(look, have=look.have | {code.name}, lacking=frozenset())
            self._looks[transport.name] = there
            self.sent.setdefault(transport.name, frozenset())

    def _send(self, transport: Transport, runs: str, code: Shipment, lacking: frozenset[str]) -> frozenset[str]:
        """What still lacks then: somebody may have deleted what was there a moment ago."""
        data = code.packed(runs, lacking)
        argv = [self.agent_python, *_BARE, str(blob(runs, self.runtime[0], ".zip")), "receive"]
        done = transport.run(argv, stdin=data, timeout_s=60 + len(data) / 100_000)
        answer = self._judged(transport, "receive", done)
        self.sent[transport.name] = self.sent.get(transport.name, frozenset()) | lacking
        return frozenset(answer["lacking"])

    def argv(self, transport: Transport, verb: str) -> list[str]:
        runs = self.ready(transport)
        return [self.agent_python, *_BARE, str(blob(runs, self.runtime[0], ".zip")), verb]

    def call(
        self, transport: Transport, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """The answer of a verb on that machine. Its error replies come as the classes of contract.errors."""
        done = transport.run(self.argv(transport, verb), stdin=json.dumps(request).encode(), timeout_s=timeout_s)
        return self._judged(transport, verb, done)

    @staticmethod
    def _judged(transport: Transport, verb: str, done: Result) -> dict[str, Any]:
        answer = _read(transport.name, verb, done.returncode, done.stdout, done.stderr)
        if done.returncode or "error" in answer:
            kind = errors.Busy if answer.get("busy") else _CLASSES.get(done.returncode, ZerunError)
            raise kind(f"{transport.name}: {answer.get('error')}", hint=answer.get("hint"))
        return answer

    def tail(self, transport: Transport, request: Mapping[str, Any], verb: str = "tail") -> Stream:
        return transport.stream(self.argv(transport, verb), stdin=json.dumps(request).encode())


def _source() -> str:
    return Path(expand.__file__).read_text("utf-8")


def _read(name: str, what: str, returncode: int, stdout: bytes, stderr: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(stdout)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    said = (stderr or stdout).decode("utf-8", "replace").strip().splitlines()
    raise ZerunError(f"{name}: {what} failed with status {returncode}: {said[-1] if said else 'it said nothing'}")


def attempt_files(submission: Submission, runs: str) -> dict[str, Any]:
    """The part of a ``submit`` or ``install`` request that writes an attempt's files."""
    request: dict[str, Any] = {
        "run_dir": str(RunFolder.at(runs, submission.run).root),
        "attempt": submission.attempt,
        "files": {name: base64.b64encode(data).decode("ascii") for name, data in submission.files.items()},
        "modes": {name: 0o755 for name in submission.files if name.endswith("/script")},
    }
    if submission.secrets:
        if submission.launch.secrets_file is None:
            raise ZerunError("a submission with secrets has no file for them")
        request["secrets"] = {"path": submission.launch.secrets_file, "values": dict(submission.secrets)}
    return request


def side_by_side(call: Callable[[T], R], items: Sequence[T], limit: int) -> list[tuple[T, R | None, ZerunError | None]]:
    """``call`` of every item, at most ``limit`` at a time; the project's errors are handed back, in order."""

    def one(item: T) -> tuple[T, R | None, ZerunError | None]:
        try:
            return item, call(item), None
        except ZerunError as problem:
            return item, None, problem

    if len(items) <= 1:
        return [one(item) for item in items]
    with ThreadPoolExecutor(max(1, min(limit, len(items)))) as pool:
        return list(pool.map(one, items))


def first_error(results: Sequence[tuple[Any, Any, ZerunError | None]]) -> ZerunError | None:
    """The error to raise when several failed: a refusal counts more than a machine that is silent."""
    problems = [problem for _, _, problem in results if problem is not None]
    grave = [p for p in problems if not isinstance(p, Unreachable)]
    return next(iter(grave or problems), None)
