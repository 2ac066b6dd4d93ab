"""An attempt as it is made: prepared, shipped, submitted, found again, and seen to end.

The journal is written before what it speaks of, so that whatever is cut in the middle is found again.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from ..bundles import GONE, Bundle, CodeBundle, Shipment, Wish, code_bundle, is_listing, keep, runtime_bundle
from ..contract.errors import Interrupted, Refused, Unreachable, UsageError, ZerunError
from ..contract.folder import RunFolder
from ..contract.plain import PlainError, dumps, from_plain, to_plain, write_atomically
from ..contract.shipped import touch
from ..observe import observe
from ..runs import EXITS, Event, Run, RunState, RunStore, fold

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Handle, Place, Submission
    from ..checkpoints import Candidate
    from ..contract.data_files import DataFile
    from ..contract.launch import LaunchSpec
    from ..planning.plan import Plan
    from ..specs.models import Cluster, Job


@dataclass(frozen=True)
class Source:
    """What an attempt is made from."""

    job: Job
    cluster: Cluster
    plan: Plan
    code: Bundle
    sets: tuple[str, ...] = ()  # assignments over the job as it was submitted: this attempt's, and those before it
    data: tuple[DataFile, ...] = ()  # its token files, as they were found before it was sent
    here: str | None = None  # the job id of the allocation that it runs inside
    goes_on: Candidate | None = None  # from this checkpoint

    def about(self, run: str) -> dict[str, Any]:
        """What ``run.json`` keeps of it."""
        from .. import specs

        plan = self.plan
        return {
            "run": run,
            "job_name": plan.job_name,
            "cluster_name": plan.cluster_name,
            "backend": plan.backend,
            "time_s": plan.time_s,
            "job": specs.describe(self.job),
            "cluster": specs.describe(self.cluster),
            "plan": to_plain(plan),
            "data": to_plain(self.data),
        }


class Attempts:
    """Makes attempts of the runs in ``store``. Templates are looked for in ``templates``, then ``user_templates``."""

    def __init__(self, store: RunStore, templates: Path | None, user_templates: Path) -> None:
        self.store = store
        self.templates = templates
        self.user_templates = user_templates

    def open(self, cluster: Cluster, runtime: Bundle) -> Backend:
        from .. import backends

        return backends.open(cluster, (runtime.digest, runtime.data), self.store.root)

    def open_for(self, run: Run) -> Backend:
        """The backend of a run that was submitted before, with the runtime that it was submitted with."""
        from .. import specs

        event = run.last("submitting")
        name = str(event.data["runtime"]) if event else ""
        try:
            runtime = Bundle(name, self.blob(name)) if name else runtime_bundle()
        except UsageError:
            runtime = runtime_bundle()
        return self.open(specs.cluster_from_plain(run.about["cluster"]), runtime)

    def code(self, folder: Path, job: Job, hidden: Mapping[str, str] | None = None) -> CodeBundle:
        """The job's tree. ``hidden`` are the values of its secrets, which the kept diff must not show."""
        said = job.code
        wish = Wish(said.include, said.exclude)
        code = code_bundle(folder, root=said.root, wish=wish, limit=said.limit, without=self.store.root, secrets=hidden)
        for key in ("tokens", "heldout"):
            path = getattr(job.data, key, None)
            if path is not None and not path.startswith("/") and not code.holds(path):
                raise _not_shipped(code, f"data.{key}", path)
        return code

    def launch(self, source: Source, run: str, attempt: int, runs: str, *, token: str | None = None) -> LaunchSpec:
        """The launch specification of ``attempt`` below the cluster's folder ``runs``. The job's code is kept when it
        is sent: what only shows a launch leaves no copy of it."""
        from ..contract.folder import blob
        from ..planning import Begun, launch_spec

        runtime, code, chosen = self.keep(runtime_bundle()), source.code, source.goes_on
        begun = Begun(
            run=run,
            attempt=attempt,
            run_dir=str(RunFolder.at(runs, run).root),
            runtime=str(blob(runs, runtime.digest, ".zip")),
            code=str(blob(runs, code.digest, code.name.removeprefix(code.digest))),
            token=token or secrets.token_hex(16),
            secrets_file=f"{runs}/.secrets/{run}.json" if source.job.secrets else None,
            resume_step=chosen.step if chosen is not None and not chosen.name else None,
            resume_from=chosen.name or None if chosen is not None else None,
            here=source.here,
            data=source.data,
        )
        return launch_spec(source.plan, source.job, source.cluster, begun)

    def render(self, source: Source, launch: LaunchSpec) -> bytes:
        """The script that is submitted."""
        from ..render import render

        return render(source.plan, source.cluster, launch, templates=self.templates, user_templates=self.user_templates)

    def send(
        self, backend: Backend, run: Run, source: Source, launch: LaunchSpec, secret_values: Mapping[str, str]
    ) -> tuple[Run, Handle]:
        """Writes the intent, submits, writes what came of it."""
        submission = self._submission(run, source, launch, secret_values)
        for name, data in submission.files.items():
            if name != "run.json":
                path = run.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, data)
        attempt = launch.attempt
        run = self.store.append(
            run, "submitting", attempt, time.time(), name=submission.name, num_nodes=len(source.plan.nodes),
            ranks=source.plan.topology.world_size, runtime=Path(launch.runtime).name, resume_step=launch.resume_step,
            sets=list(source.sets), global_batch=source.plan.global_batch,
        )  # fmt: skip
        try:
            handle = backend.submit(submission)
        except Unreachable as problem:
            found = self._look_again(backend, submission)
            if found is None:
                self.store.append(run, "submit_unanswered", attempt, time.time(), error=problem.message)
                raise Unreachable(
                    f"{problem.message}; whether {run.name} was queued is not known",
                    hint=f"zerun status {run.name} finds out, and adopts the job if it is there",
                ) from problem
            handle = found
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted while {run.name} was being submitted: it may be there already",
                hint=f"zerun status {run.name} says so, zerun cancel {run.name} ends it",
            ) from None
        except ZerunError as problem:
            self.store.append(run, "submit_failed", attempt, time.time(), error=problem.message)
            raise
        return self.store.append(run, "submitted", attempt, time.time(), handle=to_plain(handle)), handle

    def _submission(self, run: Run, source: Source, launch: LaunchSpec, secret_values: Mapping[str, str]) -> Submission:
        from ..backends.protocol import Submission
        from ..planning import job_name

        self.keep(source.code)
        names = [Path(p).name for p in (launch.runtime, launch.code) if p]
        blobs = {name: self.blob(name) for name in names if not is_listing(name)}
        code = next((self.shipment(name) for name in names if is_listing(name)), None)
        script = self.render(source, launch)
        folder = RunFolder.at("/", run.name)
        attempt = folder.attempt(launch.attempt)
        files = {
            str(attempt.script.relative_to(folder.root)): script,
            str(attempt.launch.relative_to(folder.root)): dumps(launch),
            "run.json": dumps(run.about),
        }
        name = job_name(run.name, launch.attempt)
        return Submission(run.name, launch.attempt, name, launch, script, files, blobs, secret_values, code)

    @staticmethod
    def _look_again(backend: Backend, submission: Submission) -> Handle | None:
        try:
            return backend.find(submission.name, submission.run, submission.attempt)
        except Unreachable:
            return None

    def look(self, backend: Backend, runs: Sequence[Run]) -> list[RunState]:
        # Before all else: what is being made now may be there and journalled when the others have answered.
        making = [run.is_being_made for run in runs]
        # And what was made since the journal was read is journalled by now.
        runs = [run if busy else self._anew(run) for run, busy in zip(runs, making, strict=True)]
        runs = [self.adopt(backend, run) for run in runs]
        states = [
            fold(run, replace(seen, being_made=busy))
            for run, seen, busy in zip(runs, observe(backend, runs), making, strict=True)
        ]
        for run, state in zip(runs, states, strict=True):
            known = run.last("ended", attempt=state.attempt)
            if state.ended and (known is None or known.data["state"] != state.state):
                if known is None and run.about.get("job", {}).get("secrets"):
                    forget_secrets(backend, run, state.attempt)
                told = {"state": state.state, "exit_code": state.exit_code, "why": state.why, "since": state.since}
                self._noted(run, "ended", state.attempt, told)
        return states

    def _anew(self, run: Run) -> Run:
        if run.handle is not None:
            return run
        with contextlib.suppress(UsageError):  # another laptop's has no journal at home
            return self.store.load(run.name)
        return run

    def adopt(self, backend: Backend, run: Run) -> Run:
        """A submit whose answer was lost finds its own job by its unique name."""
        intent = run.last("submitting", attempt=run.attempt)
        if run.handle is not None or intent is None or run.last("submit_failed", attempt=run.attempt):
            return run
        try:
            found = backend.find(str(intent.data["name"]), run.name, run.attempt)
        except (Unreachable, Refused):
            return run
        if found is None:
            return run
        return self._noted(run, "submitted", run.attempt, {"handle": to_plain(found), "adopted": True})

    def _noted(self, run: Run, event: str, attempt: int, data: Mapping[str, Any]) -> Run:
        """What was seen and can be seen again: a journal that takes no line (a full disk, a folder that may only be
        read) keeps nobody from reading."""
        at = time.time()
        try:
            return self.store.append(run, event, attempt, at, **data)
        except OSError:
            return replace(run, events=(*run.events, Event(at, event, attempt, data)))

    # Blobs stay at home too: a resume on new nodes needs the very bytes that the run began with.

    def keep(self, bundle: Bundle) -> Bundle:
        if isinstance(bundle, CodeBundle):
            keep(bundle, self.store.root)
        path = self.store.root / ".blobs" / bundle.name
        if not path.exists() or path.read_bytes() != bundle.data:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, bundle.data)
        touch(str(path))
        return bundle

    def shipment(self, name: str) -> Shipment:
        """The job's code that was kept under this name. Raises UsageError as :meth:`blob`."""
        return Shipment(name, self.blob(name), self.store.root)

    def blob(self, name: str) -> bytes:
        """Raises UsageError when the bytes are gone, or are not those that the name stands for."""
        path = self.store.root / ".blobs" / name
        try:
            data = path.read_bytes()
        except OSError as problem:
            said = f"{path}, which was shipped, cannot be read: {problem.strerror}"
            raise UsageError(said, hint=GONE) from None
        if not name.startswith(hashlib.sha256(data).hexdigest() + "."):
            raise UsageError(f"{path} is damaged: it is not what its name says", hint=GONE)
        return data


def _not_shipped(code: CodeBundle, key: str, path: str) -> UsageError:
    """A job whose data stay at home would fail on every rank, after it has queued."""
    said = f"{key}: {path} is not in the code that is shipped from {code.root}"
    if not (Path(code.root) / path).is_file():
        return UsageError(
            said, hint="there is no such file; a relative name begins there, an absolute one is on the cluster"
        )
    return UsageError(
        said,
        hint="git ignores it, or code.exclude does; a large file goes to the cluster by itself, with an absolute name",
    )


def forget_secrets(backend: Backend, run: Run, attempt: int) -> None:
    """The agents remove the secrets file at the end; a job that died before they started left it behind."""
    for place in backend.places():
        request = {"run_dir": str(RunFolder.at(place.runs, run.name).root), "attempt": attempt, "grace_s": 0}
        with contextlib.suppress(ZerunError):  # nothing of the attempt is there, or nobody answers: it has ended
            backend.call(place, "stop", request)


def keep_code(run: Run, code: CodeBundle) -> None:
    """``code.json`` and ``code.diff`` in the run's folder at home: which code this was. Its bytes are in ``.blobs``."""
    write_atomically(run.folder / "code.json", dumps(code.about()))
    if code.diff:
        write_atomically(run.folder / "code.diff", code.diff, mode=0o600)


@dataclass(frozen=True)
class Made:
    """How an attempt differs from the job as it was submitted; ``num_nodes`` None: nothing was written of it."""

    sets: tuple[str, ...] = ()
    global_batch: Optional[int] = None  # Optional: from_plain reads no other spelling
    num_nodes: Optional[int] = None


def made_of(run: Run, attempt: int) -> Made:
    """What ``attempt`` was made with: one that Slurm began again is as the one before it, and a submit that failed is
    nobody's."""
    for event in reversed(run.events):
        refused = event.attempt < attempt and run.last("submit_failed", attempt=event.attempt)
        if event.event == "submitting" and event.attempt <= attempt and not refused:
            told = {key: event.data[key] for key in ("sets", "global_batch", "num_nodes") if key in event.data}
            try:
                made = from_plain(Made, told)
            except PlainError as problem:
                raise UsageError(f"the journal of {run.name} is damaged: {problem}", hint=f"see {run.folder}") from None
            return made if "global_batch" in told else replace(made, global_batch=_first_batch(run))
    return Made(global_batch=_first_batch(run))


def _first_batch(run: Run) -> int | None:
    found = run.about["plan"].get("global_batch")
    return int(found) if found is not None else None


def take_attempt(run: Run, attempt: int) -> None:
    """Makes the attempt's folder at home. One that never came to be submitted (its command was killed, or a node
    did not answer) is nobody's: it is begun again. Call it within ``run.making()``, with the journal just read.

    Raises UsageError when the attempt was submitted already: of two shells that resume at once, one is told.
    """
    if run.last("submitting", attempt=attempt) is not None:
        raise UsageError(f"attempt {attempt} of {run.name} is there already", hint=f"zerun status {run.name}")
    (run.folder / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)


def one_folder(places: Sequence[Place]) -> str:
    """``paths.runs`` as every place expands it; it has to be the same path everywhere."""
    folders = {place.runs: place.transport.name for place in places}
    if len(folders) > 1:
        told = ", ".join(f"{folder} on {name}" for folder, name in folders.items())
        raise UsageError(f"paths.runs is not the same path on every node: {told}", hint="write an absolute path")
    return next(iter(folders))


def remembered(run: Run) -> RunState | None:
    """The state of a run that was already seen to end, without asking anyone."""
    ended = run.last("ended", "submitted", attempt=run.attempt)
    if ended is None or ended.event != "ended" or run.last("submitting", attempt=run.attempt) is None:
        return None
    state = ended.data["state"]
    if EXITS[state] is None:
        return None
    return RunState(
        run=run.name,
        job=str(run.about.get("job_name", "")),
        cluster=str(run.about.get("cluster_name", "")),
        state=state,
        attempt=run.attempt,
        since=ended.data.get("since"),
        exit_code=ended.data.get("exit_code"),
        why=str(ended.data.get("why", "")),
        ranks=int((run.last("submitting", attempt=run.attempt) or ended).data.get("ranks", 0)),
        handle=run.handle,
        tags=run.tags,
    )


def not_known(name: str, why: str, run: Run | None = None) -> RunState:
    """A run of which nothing can be said, with the reason."""
    about: Mapping[str, Any] = run.about if run is not None else {}
    job, cluster = str(about.get("job_name", "")), str(about.get("cluster_name", "?"))
    tags = run.tags if run is not None else ()
    return RunState(name, job, cluster, "unknown", run.attempt if run is not None else 1, why=why, tags=tags)
