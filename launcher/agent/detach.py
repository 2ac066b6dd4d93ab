"""``start``: puts an agent on this node that outlives the connection, or adopts the one that is there."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any, Dict, List, Optional

from ..contract.errors import Busy, JobFailed, Refused, UsageError, ZerunError
from ..contract.folder import AttemptFolder, RunFolder
from ..contract.launch import LaunchSpec
from ..contract.plain import PlainError, from_plain, loads, to_plain
from ..contract.records import Announcement, NodeRecord, ProcessId
from . import environment, outlive, processes, rendezvous
from .attempt import find_place, load
from .notes import own_files

_READY_S = 2.0  # for ranks to be about to start; a long setup is not waited for
_FIRST_WORD_S = 20.0
_ADOPTION_S = 10.0

Answer = Dict[str, Any]


def start(request: Dict[str, Any]) -> Answer:
    """``{run_dir, attempt, node, rendezvous?}`` → ``{pid, announcement}``.

    Raises :class:`JobFailed` with the reason when the agent failed within its first seconds, and
    :class:`Refused` when this attempt already ran here and is over, :class:`Busy` when others have the slots.
    """
    run_dir, attempt, node = str(request["run_dir"]), int(request["attempt"]), str(request["node"])
    spec = load(run_dir, attempt)
    node_rank, _ = find_place(spec, node, {})
    folder = RunFolder(PurePosixPath(spec.run_dir)).attempt(attempt)
    meeting = request.get("rendezvous")
    found = from_plain(Announcement, meeting) if meeting is not None else None
    if node_rank and found is None and not spec.shared:
        raise UsageError(f"{node} is not the first node and shares no disk with it: `rendezvous` is needed")
    before = _place_of(folder, node)
    if before is not None:
        return _adopt(folder, node, node_rank, before)
    own_files(folder)
    return _start_anew(spec, folder, node, node_rank, found)


def _start_anew(
    spec: LaunchSpec, folder: AttemptFolder, node: str, node_rank: int, meeting: Optional[Announcement]
) -> Answer:
    read_end, write_end = os.pipe()
    agent = _begin(spec, folder, node, meeting, write_end)
    os.close(write_end)
    pid = processes.process_id(agent.pid)
    try:
        said = _listen(read_end, "placed" if node_rank else "announced")
    finally:
        os.close(read_end)
    if "taken" in said:
        agent.wait()
        other = _place_of(folder, node)
        if other is not None:
            return _adopt(folder, node, node_rank, other)
    problem = _why_not(said, agent, folder, node)
    if problem is not None:
        raise problem
    if node_rank == 0 and "announced" not in said:
        raise ZerunError(
            f"the agent on {node} (pid {agent.pid}) did not announce a rendezvous in {_FIRST_WORD_S:.0f} s"
        )
    # This process ends now and the agent becomes init's: nobody here waits for it.
    agent.returncode = 0
    announced = said.get("announced")
    return {
        "pid": to_plain(pid),
        "announcement": to_plain(Announcement(*announced)) if announced else None,
    }


def _begin(
    spec: LaunchSpec, folder: AttemptFolder, node: str, meeting: Optional[Announcement], ready_fd: int
) -> subprocess.Popen[bytes]:
    """An agent in a session of its own, which says on ``ready_fd`` how far it came."""
    way = outlive.way()
    argv = [*way.argv, sys.executable, spec.runtime, "agent", "--kept-by", way.by]
    argv += ["--run-dir", spec.run_dir, "--attempt", str(spec.attempt), "--node", node, "--ready-fd", str(ready_fd)]
    if meeting is not None:
        argv += ["--rendezvous", f"{meeting.address}:{meeting.port}"]
        argv += ["--control", f"{meeting.address}:{meeting.control_port}"]
    marks = {"ZERUN_TOKEN": spec.token, "ZERUN_NODE": node}
    if os.environ.get("ZERUN_LEASES"):  # another place for them: of use on one's own machine alone
        marks["ZERUN_LEASES"] = os.environ["ZERUN_LEASES"]
    with open(folder.agent_log(node), "ab") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment.encoded({**environment.site({}), **marks, **way.environment}),
            pass_fds=(ready_fd,),
            start_new_session=True,
        )


def _why_not(
    said: Dict[str, Any], agent: subprocess.Popen[bytes], folder: AttemptFolder, node: str
) -> Optional[ZerunError]:
    """Why the agent runs no ranks, as it said it or as its end shows it; None while nothing speaks against it."""
    if "refused" in said:
        agent.wait()
        kind = Busy if said.get("busy") else Refused
        return kind(str(said["refused"]), hint=said.get("hint"))
    if "failed" in said:
        return JobFailed(f"the agent on {node} could not start the job: {said['failed']}")
    if "ready" not in said and agent.poll() is not None:
        return JobFailed(f"the agent on {node} ended at once (status {agent.returncode}): {_last_lines(folder, node)}")
    return None


def _listen(handle: int, wanted: str) -> Dict[str, Any]:
    """What the agent says until its ranks are about to start, it failed, or the time is up. ``wanted`` is
    the word without which there is no answer."""
    said: Dict[str, Any] = {}
    data = b""
    end = time.monotonic() + _FIRST_WORD_S
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([handle], [], [], left)[0]:
            return said
        chunk = os.read(handle, 65536)
        if not chunk:
            return said
        *lines, data = (data + chunk).split(b"\n")
        for line in lines:
            said.update(loads(line))
        if wanted in said:
            end = min(end, time.monotonic() + _READY_S)


def _place_of(folder: AttemptFolder, node: str) -> Optional[ProcessId]:
    """Whose place this node is in this attempt; None while nobody took it."""
    path = Path(folder.nodes) / f".{node}.agent"
    end = time.monotonic() + 1.0
    while path.exists():
        try:
            return from_plain(ProcessId, loads(path.read_bytes()))
        except (PlainError, ValueError):  # it is being written
            if time.monotonic() > end:
                return ProcessId(0, 0, "")
            time.sleep(0.02)
    return None


def _adopt(folder: AttemptFolder, node: str, node_rank: int, agent: ProcessId) -> Answer:
    """The answer that the first ``start`` gave, or why there can be none."""
    end = time.monotonic() + _ADOPTION_S
    while processes.is_alive(agent):
        announced = rendezvous.read_announcement(Path(folder.rendezvous)) if node_rank == 0 else None
        if announced is not None or node_rank:
            return {"pid": to_plain(agent), "announcement": to_plain(announced)}
        if time.monotonic() > end:
            raise ZerunError(f"the agent on {node} (pid {agent.pid}) lives, but has not announced a rendezvous")
        time.sleep(0.05)
    raise Refused(
        f"this attempt already ran on {node}: {_how_it_ended(folder, node)}", hint="resume starts the next attempt"
    )


def _how_it_ended(folder: AttemptFolder, node: str) -> str:
    try:
        record = from_plain(NodeRecord, loads(Path(folder.node_record(node)).read_bytes()))
    except (OSError, ValueError):
        return "its agent is gone and left no record"
    if record.failure is not None:
        return record.failure.message
    return "it ended well" if record.state == "ended" else "its agent is gone"


def _last_lines(folder: AttemptFolder, node: str) -> str:
    try:
        lines: List[str] = Path(folder.agent_log(node)).read_text("utf-8", "replace").splitlines()
    except OSError:
        return "it left no log"
    return " | ".join(lines[-5:]) or "it said nothing"
