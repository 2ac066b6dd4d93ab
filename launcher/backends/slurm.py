"""Slurm: one ``sbatch`` on the login side, states from squeue and sacct in one batch, ``scancel``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..contract.errors import Busy, Unreachable
from ..contract.folder import RunFolder
from ..contract.launch import Node
from ..contract.plain import loads
from ..specs import nodelist
from ..transports.local import site_environment
from ..transports.open import Connector
from ..transports.protocol import Result, Stream, Transport
from . import inside
from .calls import Caller, attempt_files
from .expected import would_start
from .outside import SEP, ask, queue, words
from .protocol import Finding, Handle, Place, Poll, Submission
from .states import state_of, why_queued

if TYPE_CHECKING:
    from ..bundles import Shipment
    from ..specs.models import Cluster

_GONE_S = 60.0  # scancel ends steps at once; what ignores SIGTERM is killed after Slurm's KillWait


class SlurmBackend:
    """Speaks with the login node (or with this machine, when zerun runs there)."""

    name: Literal["slurm", "direct"] = "slurm"

    def __init__(self, cluster: Cluster, runtime: tuple[str, bytes]) -> None:
        self._cluster = cluster
        self._connector = Connector(cluster)
        self._caller = Caller(cluster.paths.runs, cluster.agent_python, runtime)

    # --- places -----------------------------------------------------------------------------------

    def expect(self, code: Shipment) -> None:
        self._caller.expected = code

    def sent(self) -> Mapping[str, frozenset[str]]:
        return dict(self._caller.sent)

    def places(self) -> Sequence[Place]:
        login = self._login
        return (Place(login, self._caller.ready(login)),)

    def call(
        self, place: Place, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0
    ) -> Mapping[str, Any]:
        return self._caller.call(place.transport, verb, request, timeout_s=timeout_s)

    def tail(self, place: Place, request: Mapping[str, Any]) -> Stream:
        return self._caller.tail(place.transport, request)

    def serve(self, place: Place, request: Mapping[str, Any]) -> Stream:
        return self._caller.tail(place.transport, request, "serve")

    @property
    def _login(self) -> Transport:
        return self._connector.transport()

    def _slurm(self, *argv: str, timeout_s: float = 60.0) -> Result:
        """One of Slurm's commands on the login side, deaf to SLURM_* and the like of an outer job."""
        return ask(self._login, *argv, timeout_s=timeout_s)

    # --- start ------------------------------------------------------------------------------------

    def busy(self, nodes: Sequence[Node], device_kind: str) -> Busy | None:
        return None  # Slurm queues

    def would_start(self, script: bytes) -> str | None:
        return would_start(self._cluster, self._login, script)

    def submit(self, submission: Submission) -> Handle:
        login = self._login
        self._caller.put_blobs(login, submission.blobs)
        if submission.code is not None:
            self._caller.put_code(login, submission.code)
        runs = self._caller.ready(login)
        request = attempt_files(submission, runs)
        if submission.launch.here is not None:
            return self._start_inside(submission, request)
        script = RunFolder.at(runs, submission.run).attempt(submission.attempt).script
        request.update(name=submission.name, sbatch=["sbatch", "--parsable", str(script)])
        answer = self._caller.call(login, "submit", request, timeout_s=150.0)
        data = {"job": answer["job"], "name": submission.name}
        if submission.secrets and submission.launch.secrets_file:
            data["secrets_file"] = submission.launch.secrets_file
        return Handle("slurm", data)

    def _start_inside(self, submission: Submission, request: Mapping[str, Any]) -> Handle:
        found = inside.allocation(os.environ, site_environment())
        answer = self._caller.call(self._login, "here", inside.request_of(found, request, submission.name))
        return Handle("slurm", {"job": found.job, "name": submission.name, "inside": answer["pid"]})

    def _lives(self, handle: Handle) -> bool:
        """Whether the script's shell lives on the machine that we speak with; on another nobody can tell."""
        pid = handle.data["inside"]
        stat = self._login.run(["cat", f"/proc/{int(pid['pid'])}/stat"]).stdout
        fields = stat[stat.rfind(b")") + 2 :].split()  # field 2 is a name in brackets that may hold anything
        return len(fields) > 19 and fields[0] not in (b"Z", b"X") and int(fields[19]) == pid["started_ticks"]

    def find(self, name: str, run: str, attempt: int) -> Handle | None:
        """Looks in the attempt's ``job`` file, in the queue, and in accounting where it is on."""
        folder = RunFolder.at(self._caller.ready(self._login), run).attempt(attempt)
        within = self._login.run(["cat", str(folder.root / "here")])
        if within.returncode == 0:
            told = loads(within.stdout)
            return Handle("slurm", {"job": str(told["job"]), "name": name, "inside": told["pid"]})
        kept = self._login.run(["cat", str(folder.root / "job")])
        if kept.returncode == 0 and kept.stdout.strip().isdigit():
            return Handle("slurm", {"job": kept.stdout.decode().strip(), "name": name})
        queued = queue(self._login, "-t", "all", "--name", name, fields=("%A",))
        ids = [int(job) for (job,) in queued if job.isdigit()]
        if not ids:
            past = self._slurm("sacct", "-X", "-n", "-P", "-o", "JobIDRaw", "--name", name, "-S", "now-90days")
            ids = [int(w) for w in past.stdout.split() if w.isdigit()] if past.returncode == 0 else []
        return Handle("slurm", {"job": str(max(ids)), "name": name}) if ids else None

    # --- watch ------------------------------------------------------------------------------------

    def poll(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        queued = [handle for handle in handles if not inside.is_inside(handle)]
        others = iter(self._poll_queued(queued))
        return [self._poll_inside(handle) if inside.is_inside(handle) else next(others) for handle in handles]

    def _poll_inside(self, handle: Handle) -> Poll:
        try:
            return inside.poll(handle, self._login, self._lives(handle))
        except Unreachable as problem:
            return Poll("unknown", why=problem.message)

    def _poll_queued(self, handles: Sequence[Handle]) -> Sequence[Poll]:
        jobs = [str(handle.data["job"]) for handle in handles]
        if not jobs:
            return []
        try:
            known = self._ask_squeue(jobs)
            ask = [job for job in jobs if job not in known or known[job].state == "ended"]
            past = self._ask_sacct(ask) if ask else {}
        except Unreachable as problem:
            return [Poll("unknown", why=problem.message) for _ in jobs]
        # Slurm answered: a job that neither has is one that Slurm has forgotten.
        return [_newer(known.get(job), past.get(job)) or Poll("absent") for job in jobs]

    def _ask_squeue(self, jobs: Sequence[str]) -> dict[str, Poll]:
        chosen = ("-t", "all", "-j", ",".join(sorted(set(jobs))))
        rows = queue(self._login, *chosen, fields=("%A", "%T", "%S", "%N", "%r"))
        return {job: _from_squeue(*told) for job, *told in rows}

    def _ask_sacct(self, jobs: Sequence[str]) -> dict[str, Poll]:
        form = "JobIDRaw,State,ExitCode,NodeList"
        ids = ",".join(sorted(set(jobs)))
        done = self._slurm("sacct", "-X", "-n", "-P", f"--delimiter={SEP}", "-o", form, "-j", ids)
        known = {}
        # Where accounting is off it says so and fails: then the queue is all there is.
        for line in done.stdout.decode("utf-8", "replace").splitlines() if done.returncode == 0 else ():
            fields = line.split(SEP)
            if len(fields) == 4:
                known[fields[0]] = _from_sacct(*fields[1:])
        return known

    # --- end --------------------------------------------------------------------------------------

    def cancel(self, handle: Handle, run: str, attempt: int) -> None:
        job = str(handle.data["job"])
        if inside.is_inside(handle):
            inside.cancel(handle, self._login, lambda: not self._lives(handle))
            self._forget_secrets(handle, run)
            return
        done = self._slurm("scancel", job)
        if done.returncode and b"Invalid job id" not in done.stderr and b"already complet" not in done.stderr.lower():
            raise Unreachable(f"{self._login.name}: scancel {job}: {words(done.stderr)}")
        self._forget_secrets(handle, run)
        end, pause = time.monotonic() + _GONE_S, 0.2
        while True:
            poll = self.poll([handle])[0]
            if poll.state in ("ended", "absent"):
                return
            if time.monotonic() > end:
                raise Unreachable(
                    f"job {job} was cancelled, but is still {poll.word or poll.state} after {_GONE_S:.0f} s",
                    hint=f"zerun status {run} says when it is gone; a node may hang",
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 2.0)

    def _forget_secrets(self, handle: Handle, run: str) -> None:
        """A job that never started has no agent to delete them. An adopted one does not say where they are."""
        secrets = handle.data.get("secrets_file") or f"{self._caller.ready(self._login)}/.secrets/{run}.json"
        self._login.run(["rm", "-f", "--", str(secrets)])

    def execute(self, handle: Handle, node: str, request: Mapping[str, Any]) -> Stream:
        """A step that shares everything with the job's own."""
        step = ["srun", f"--jobid={handle.data['job']}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
        step += ["--mpi=none", "--cpu-bind=none", "--quiet", *self._caller.argv(self._login, "exec")]
        given = json.dumps({"argv": step, "request": dict(request)}).encode()
        return self._login.stream(self._caller.argv(self._login, "step"), stdin=given)

    # --- check ------------------------------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        from .check import check_slurm

        return check_slurm(self._cluster, self._login, self._caller, self._slurm)

    def close(self) -> None:
        self._connector.close()


def _from_squeue(word: str, starts: str, nodes: str, reason: str) -> Poll:
    state = state_of(word)
    if state == "queued":
        expected = starts if starts and starts not in ("N/A", "Unknown") else None
        return Poll("queued", word=word, why=why_queued(word, reason), starts_at=expected)
    if state == "unknown":
        return Poll("unknown", word=word, why=f"Slurm says {word}, which means nothing here")
    why = "" if reason in ("", "None") or state == "running" else reason
    return Poll(state, word=word, why=why, nodes=_nodes(nodes))


def _from_sacct(word: str, exit_code: str, nodes: str) -> Poll:
    state = state_of(word)
    if state != "ended":
        # squeue no longer has it, so this is the past: accounting has not heard of the end yet.
        return Poll("unknown", word=word, why=f"Slurm's accounting still says {word}; the end is not written yet")
    code, _, number = exit_code.partition(":")
    signal = int(number) if number.isdigit() and int(number) else None
    exit_status = int(code) if code.isdigit() and signal is None else None
    first = word.split()[0]
    why = f"by user {word.split()[2]}" if word.startswith("CANCELLED by ") else ""
    return Poll("ended", word=first, why=why, exit_code=exit_status, signal=signal, nodes=_nodes(nodes))


def _newer(queue: Poll | None, past: Poll | None) -> Poll | None:
    """squeue is right about whether a job goes on; accounting knows more of one that ended."""
    if queue is None or (queue.state == "ended" and past is not None and past.state == "ended"):
        return past if past is not None else queue
    return queue


def _nodes(text: str) -> tuple[str, ...]:
    if not text or text in ("None assigned", "(null)"):
        return ()
    try:
        return nodelist.expand(text)
    except ValueError:
        return (text,)
