"""The verb ``exec``: a command beside a rank that runs, in that rank's own environment and folder.

The environment is read from the rank's process, so that it is the very one, modules and all; values of
``secrets`` are taken out of it, because what a person types at a prompt is printed (``env``). stdout of the verb
is one JSON line an event: ``{"out": 1 or 2, "data": base64}``, ``{"status": n}``, or ``{"error", "hint"}``; an
empty line now and then, so that a reader who left is noticed, and the command is ended.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path, PurePosixPath
from typing import IO, Any, Dict, List, Mapping, NamedTuple, Optional

from ..contract.errors import UsageError, ZerunError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec
from ..contract.plain import from_plain, loads
from ..contract.records import NodeRecord, RankRecord
from . import environment, slurm
from .attempt import load

_BEAT_S = 2.0
_GRACE_S = 5.0
_PIECE = 576  # bytes of output a line: srun hands on lines whole when they stay below 1 KiB
_NOT_FOR_OTHERS = ("ZERUN_LISTEN_FD",)


class _Beside(NamedTuple):
    """Where the command runs, and in what."""

    environment: Dict[str, str]
    folder: str


def execute(request: Mapping[str, Any], out: IO[bytes]) -> int:
    """``{run_dir, attempt, node, rank?, argv}``. Without ``rank``: the node's first that lives."""
    try:
        spec = load(str(request["run_dir"]), int(request["attempt"]))
        wanted = request.get("rank")
        beside = _find(spec, str(request["node"]), None if wanted is None else int(wanted))
        status = _run([str(a) for a in request["argv"]], beside, out)
        _say(out, {"status": status})
    except ZerunError as problem:
        _say(out, {"error": problem.message, "hint": problem.hint})
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    return 0


def step(request: Mapping[str, Any], out: IO[bytes]) -> int:
    """The verb on Slurm's login side: ``{argv, request}``: runs ``argv`` (srun) with ``request`` on its stdin, hands on
    what it prints, and ends it when nobody reads on; srun itself would not notice. Its exit status."""
    srun = subprocess.Popen(
        [str(a) for a in request["argv"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=slurm.clean_environment(),
        start_new_session=True,
    )
    assert srun.stdin is not None and srun.stdout is not None
    with contextlib.suppress(BrokenPipeError), srun.stdin:
        srun.stdin.write(json.dumps(request["request"]).encode())
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _end(srun))
    handle = srun.stdout.fileno()
    try:
        while True:
            if not select.select([handle], [], [], _BEAT_S)[0]:
                _say(out, None)
                continue
            chunk = os.read(handle, 65536)
            if not chunk:
                return srun.wait()
            out.write(chunk)
            out.flush()
    except BrokenPipeError:
        _end(srun)
        return 128 + signal.SIGPIPE


def _say(out: IO[bytes], event: Optional[Mapping[str, Any]]) -> None:
    out.write((json.dumps(event) if event is not None else "").encode("ascii") + b"\n")
    out.flush()


def _find(spec: LaunchSpec, node: str, wanted: Optional[int]) -> _Beside:
    folder = RunFolder(PurePosixPath(spec.run_dir)).attempt(spec.attempt)
    try:
        record = from_plain(NodeRecord, loads(Path(folder.node_record(node)).read_bytes()))
    except (OSError, ValueError) as problem:
        raise UsageError(f"node {node} has no part in attempt {spec.attempt}: {problem}") from problem
    for rank in record.ranks:
        if not rank.ended and wanted in (None, rank.rank):
            found = _beside(spec, rank)
            if found is not None:
                return found
    who = "rank of this attempt" if wanted is None else f"rank {wanted}"
    raise UsageError(f"no {who} runs on {node} any more", hint="zerun status says what became of it")


def _beside(spec: LaunchSpec, rank: RankRecord) -> Optional[_Beside]:
    """None when the process is gone, or is another one by now."""
    try:
        raw = Path(f"/proc/{rank.pid}/environ").read_bytes()
        folder = os.readlink(f"/proc/{rank.pid}/cwd")
    except OSError:
        return None
    found = {}
    for entry in raw.split(b"\0"):
        name, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if equals:
            found[name] = value
    if found.get("ZERUN_TOKEN") != spec.token or found.get("RANK") != str(rank.rank):
        return None
    for name in (*spec.secrets, *_NOT_FOR_OTHERS):
        found.pop(name, None)
    return _Beside(found, folder)


def _run(argv: List[str], beside: _Beside, out: IO[bytes]) -> int:
    try:
        program = environment.resolve(argv[0], beside.environment, beside.folder)
    except UsageError:
        _say(out, {"out": 2, "data": base64.b64encode(f"{argv[0]}: command not found\n".encode()).decode("ascii")})
        return 127
    process = subprocess.Popen(
        argv,
        executable=program,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=beside.folder,
        env=environment.encoded(beside.environment),
        start_new_session=True,
    )
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _end(process))
    try:
        _hand_on(process, out)
        while process.poll() is None:  # it closed its streams and goes on
            time.sleep(0.1)
            _say(out, None)
    except BrokenPipeError:
        _end(process)
        raise
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _hand_on(process: subprocess.Popen[bytes], out: IO[bytes]) -> None:
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    while streams:
        ready, _, _ = select.select(list(streams), [], [], _BEAT_S)
        if not ready:
            _say(out, None)
        for handle in ready:
            chunk = os.read(handle, _PIECE)
            if chunk:
                _say(out, {"out": streams[handle], "data": base64.b64encode(chunk).decode("ascii")})
            else:
                del streams[handle]


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
