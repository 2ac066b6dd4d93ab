"""The use cases of zerun: what the command line does, as a Python API that returns data.

Only the command line prints. Everything here raises :class:`launcher.contract.errors.ZerunError`, whose
``exit_code`` is the command's.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .attempts import Attempts, Source, keep_code, made_of, not_known, one_folder, remembered, take_attempt
from .beforehand import Again, ask_first, room
from .bundles import Bundle, runtime_bundle
from .choice import tag_names
from .contract.errors import (
    DescriptionError,
    DoesNotFit,
    Exit,
    PartialAnswer,
    Problem,
    Unreachable,
    UsageError,
    ZerunError,
)
from .contract.folder import RunFolder
from .contract.plain import to_plain
from .observe import ask
from .runs import Run, RunState, RunStore

if TYPE_CHECKING:
    from .backends.protocol import Backend, Finding, Handle
    from .checkpoints import Candidate, Collected, Report
    from .clearing import Clearing
    from .datasets import Pushed
    from .elsewhere import OnCluster
    from .execute import Sink
    from .logs.merge import LogLine
    from .logs.select import Selection
    from .measured import Beside
    from .planning.plan import Plan
    from .specs.models import Cluster, Job
    from .starting import Waiting
    from .transports.master import Master

Notice = Callable[[str], None]
_BY_ITSELF = "the program begins again, or goes on from what it kept itself ($ZERUN_ATTEMPT is above 1)"


@dataclass(frozen=True)
class Submitted:
    """``notes`` is what a person should read before walking away, a line each."""

    run: str
    attempt: int
    handle: Handle
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Prepared:
    """Everything about an attempt that is known before anything is sent."""

    plan: Plan
    script: bytes
    notes: tuple[str, ...]


class App:
    """zerun in one project. ``root`` is the project's folder (default: found from the working folder)."""

    def __init__(self, root: Path | None = None, *, runs: Path | None = None, templates: Path | None = None) -> None:
        self.root = root or find_root(Path.cwd())
        named = os.environ.get("ZERUN_RUNS")
        self.store = RunStore((runs or (Path(named) if named else self.root / "runs")).resolve())
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "zerun"
        self.config = config
        self.attempts = Attempts(self.store, templates, config / "templates")

    # --- descriptions -----------------------------------------------------------------------------

    def cluster(self, name: str | None = None, sets: Sequence[str] = ()) -> Cluster:
        """The cluster that ``name`` (a path, or a name in clusters/) describes."""
        from . import specs

        chosen = name or os.environ.get("ZERUN_CLUSTER") or self._default_cluster()
        if chosen is None:
            raise UsageError(
                "which cluster?",
                hint="name one (--cluster NAME; cluster check NAME), set ZERUN_CLUSTER, or write `cluster:` in the job",
            )
        return specs.load_cluster(specs.find_cluster(chosen, self.cluster_folders()), sets)

    def cluster_folders(self) -> list[Path]:
        return [self.root / "clusters", self.config / "clusters", Path(__file__).parent.parent / "clusters"]

    def _default_cluster(self) -> str | None:
        try:
            text = (self.config / "cluster").read_text().strip()
        except FileNotFoundError:
            return None
        return text or None

    def describe(self, job: Path, cluster: str | None, sets: Sequence[str] = ()) -> tuple[Job, Cluster]:
        """Both descriptions, every mistake of either at once."""
        from . import specs

        for_job, for_cluster = specs.split_sets(sets)
        problems: list[Problem] = []
        loaded_job = loaded_cluster = None
        try:
            loaded_job = specs.load_job(job, for_job)
        except DescriptionError as error:
            problems += error.problems
        if loaded_job is not None or cluster is not None:
            try:
                loaded_cluster = self.cluster(cluster or (loaded_job.cluster if loaded_job else None), for_cluster)
            except DescriptionError as error:
                problems += error.problems
        if problems or loaded_job is None or loaded_cluster is None:
            raise DescriptionError(problems)
        return loaded_job, specs.job_on(loaded_job, loaded_cluster, job, for_job)

    def plan(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> Plan:
        from .planning import make_plan

        return make_plan(*self.describe(job, cluster, sets))

    def room(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> tuple[str, ...]:
        """What the job's checkpoints take beside what is left on the cluster, which is asked. Raises NoSpace."""
        from .planning import make_plan

        loaded_job, loaded_cluster = self.describe(job, cluster, sets)
        plan = make_plan(loaded_job, loaded_cluster)
        backend = self.attempts.open(loaded_cluster, runtime_bundle())
        try:
            return room(backend, Source(loaded_job, loaded_cluster, plan, Bundle("", b"")))
        finally:
            backend.close()

    def simulate(self, job: Path, cluster: str | None = None, sets: Sequence[str] = (), *, rank: int = 0) -> Plan:
        """The plan with a step of ``rank`` run by the real engine on nothing, in a process that needs torch."""
        from .bundles import code_root
        from .planning import make_plan, with_simulation
        from .simulation import request_of, run_simulation, with_its_line

        loaded_job, loaded_cluster = self.describe(job, cluster, sets)
        plan = make_plan(loaded_job, loaded_cluster)
        code = code_root(job.resolve().parent, loaded_job.code.root)
        request = request_of(plan, rank, code, loaded_cluster.device_of(plan.nodes[0].name).kind)
        try:
            return with_simulation(plan, run_simulation(request, loaded_job.env))
        except UsageError as problem:
            raise with_its_line(problem, job) from problem

    def prepare(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> Prepared:
        """What ``submit`` would send, and the plan: needs no cluster, no Slurm and no torch.

        Paths that the cluster expands (``~``, ``$NAME``) stand in the script as they were written.
        """
        from .planning import make_plan

        loaded_job, loaded_cluster = self.describe(job, cluster, sets)
        plan = make_plan(loaded_job, loaded_cluster)
        known = {name: os.environ[name] for name in loaded_job.secrets if name in os.environ}
        code = self.attempts.code(job.resolve().parent, loaded_job, known)
        run = self.store.new_name(plan.job_name, datetime.datetime(2000, 1, 1)).rsplit("-", 3)[0] + "-RUN"
        runs = loaded_cluster.paths.runs or str(self.store.root)
        source = Source(loaded_job, loaded_cluster, plan, code)
        launch = self.attempts.launch(source, run, 1, runs, token="TOKEN", resume_step=None)
        return Prepared(plan, self.attempts.render(source, launch), (code.sentence(), *code.notes))

    def render(self, job: Path, cluster: str | None = None, sets: Sequence[str] = ()) -> bytes:
        """The script that would be submitted, byte for byte but for the run's name and token."""
        return self.prepare(job, cluster, sets).script

    # --- submit -----------------------------------------------------------------------------------

    def submit(
        self,
        job: Path,
        cluster: str | None = None,
        sets: Sequence[str] = (),
        *,
        force: bool = False,
        waiting: Waiting | None = None,
        tags: Sequence[str] = (),
        here: bool = False,
    ) -> Submitted:
        """Ships, submits, and returns once the cluster has the job.

        Raises DoesNotFit before anything is sent, unless ``force``; without a scheduler Busy when others hold the
        slots, unless ``waiting`` says how long to wait for them. ``here``: inside this shell's Slurm allocation.
        """
        from . import datasets, specs
        from .backends.inside import job_here
        from .begin_with import check_weights
        from .planning import check_engine, make_plan
        from .starting import Waiting, start_first

        loaded_job, loaded_cluster = self.describe(job, cluster, sets)
        plan = make_plan(loaded_job, loaded_cluster)
        check_engine(plan)
        refuse_what_cannot_fit(plan, force=force)
        secret_values = read_secrets(loaded_job.secrets)
        code = self.attempts.code(job.resolve().parent, loaded_job, secret_values)
        backend = self.attempts.open(loaded_cluster, runtime_bundle())
        try:
            run_name = self.store.new_name(plan.job_name, datetime.datetime.now())
            about = {
                "run": run_name,
                "job_name": plan.job_name,
                "cluster_name": plan.cluster_name,
                "backend": plan.backend,
                "time_s": plan.time_s,
                "job_file": str(job.resolve()),
                "tags": sorted({*loaded_job.tags, *tag_names(tags)}),
                "job": specs.describe(loaded_job),
                "cluster": specs.describe(loaded_cluster),
                "plan": to_plain(plan),
                "code": {"name": code.name, "root": code.root, "commit": code.commit, "changed": code.changed},
            }
            backend.places()  # connects: nothing is written for a cluster that does not answer, or is taken
            data = datasets.check(backend, loaded_job, loaded_cluster, plan, Path(code.root))
            about["data"] = to_plain(data)
            begins = check_weights(backend, plan, code)
            device_kind = loaded_cluster.device_of(plan.nodes[0].name).kind
            waiting = (waiting or Waiting()).for_slots(backend, plan.nodes, device_kind)
            within = job_here(loaded_cluster, len(plan.nodes), os.environ) if here else None
            source = Source(loaded_job, loaded_cluster, plan, code, data=data, here=within)
            told = ask_first(self.attempts, backend, source, run_name, force=force)
            run = self.store.create(run_name, about)
            keep_code(run, code)
            with run.making():
                run, handle, attempt = start_first(self.attempts, backend, run, source, secret_values, waiting)
                moved = "" if loaded_cluster.local else "sent" if backend.sent(code.name) else "already there"
        finally:
            backend.close()
        return Submitted(run.name, attempt, handle, (code.sentence(moved), *code.notes, *begins, *plan.remarks, *told))

    # --- watch ------------------------------------------------------------------------------------

    def resolve(self, run: str) -> str:
        return self.store.resolve(run)

    def status(self, run: str) -> RunState:
        """What the run is now. An unreachable cluster gives the state ``unknown`` with the reason, no error."""
        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            return self.attempts.look(backend, [loaded])[0]
        finally:
            backend.close()

    def beside_plan(self, run: str, attempt: int) -> list[Beside]:
        """What the plan of the run said, beside what its ranks measured (as far as that lies at home)."""
        from . import specs
        from .measured import beside
        from .planning import make_plan

        loaded = self.store.load(self.resolve(run))
        made = made_of(loaded, attempt)
        job = specs.job_from_plain(loaded.about["job"], made.sets)
        cluster = specs.moved(specs.cluster_from_plain(loaded.about["cluster"]), job.pool)
        plan = make_plan(job, cluster, nodes=made.num_nodes, global_batch=made.global_batch)
        return beside(loaded, attempt, plan)

    def list_runs(self, may_be: Callable[[Run], bool] = lambda _: True) -> list[RunState]:
        """Every run at home that may be meant, oldest first; those not known to have ended are asked after."""
        names = self.store.names()
        states: dict[str, RunState] = {}
        asked: dict[str, list[Run]] = {}
        for name in names:
            try:
                run = self.store.load(name)
                if not may_be(run):
                    continue
                states[name] = remembered(run) or not_known(name, "nobody was asked", run)
            except ZerunError as problem:  # one damaged folder must not hide the other runs
                states[name] = not_known(name, problem.message)
                continue
            if not states[name].ended:
                asked.setdefault(states[name].cluster, []).append(run)
        for runs in asked.values():
            try:
                states.update({state.run: state for state in self._look_once(runs)})
            except ZerunError as problem:
                states.update({run.name: not_known(run.name, problem.message, run) for run in runs})
        return [states[name] for name in names if name in states]

    def runs_on(self, name: str | None = None, *, all_users: bool = False) -> OnCluster:
        """The runs that lie on a cluster, oldest first. One's own that another laptop submitted are taken up here."""
        from .elsewhere import find_runs, on_cluster

        cluster = self.cluster(name)
        backend = self.attempts.open(cluster, runtime_bundle())
        try:
            return on_cluster(backend, self.attempts, find_runs(backend, cluster, self.store, all_users=all_users))
        finally:
            backend.close()

    def _look_once(self, runs: Sequence[Run]) -> list[RunState]:
        backend = self.attempts.open_for(runs[-1])
        try:
            return self.attempts.look(backend, runs)
        finally:
            backend.close()

    def wait(self, run: str, timeout_s: float | None = None, notice: Notice | None = None) -> RunState:
        """Returns when the run has ended, or with a living state when ``timeout_s`` has passed."""
        loaded = self.store.load(self.resolve(run))
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause, told = 0.5, ""
        backend = self.attempts.open_for(loaded)
        try:
            while True:
                state = self.attempts.look(backend, [self.store.load(loaded.name)])[0]
                line = f"{state.state}{': ' + state.why if state.why else ''}"
                if notice is not None and line != told:
                    notice(line)
                    told = line
                left = None if end is None else end - time.monotonic()
                if state.ended or (left is not None and left <= 0):
                    return state
                time.sleep(pause if left is None else min(pause, left))
                pause = min(pause * 1.5, 10.0)
        finally:
            backend.close()

    def logs(
        self, run: str, selection: Selection, *, follow: bool = False, notice: Notice | None = None
    ) -> Iterator[LogLine]:
        """All ranks' lines merged by time; with ``follow`` until the attempt ends."""
        from .logs.follow import follow as stream

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            yield from stream(
                backend, loaded.name, loaded.attempt, selection, follow=follow, notice=notice or (lambda _: None)
            )
        finally:
            backend.close()

    def execute(self, run: str, argv: Sequence[str], *, node: str | None, rank: int | None, sink: Sink) -> int:
        """Runs a command beside the ranks of a run that runs; its output goes to ``sink``, its status is returned."""
        from .execute import execute

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            state = self.attempts.look(backend, [loaded])[0]
            return execute(backend, self.store.load(loaded.name), state, argv, (node, rank), sink)
        finally:
            backend.close()

    # --- end --------------------------------------------------------------------------------------

    def cancel(self, run: str) -> RunState:
        """Ends every process of the run on every node. Cancelling what has ended changes nothing."""
        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            before = self.attempts.look(backend, [loaded])[0]
            loaded = self.store.load(loaded.name)
            if before.ended:
                # An agent that was killed could not end what its ranks had left in sessions of their own.
                if before.state == "failed" and loaded.handle is not None:
                    backend.cancel(loaded.handle, loaded.name, before.attempt)
                return before
            if before.state == "submitting":
                raise UsageError(f"{loaded.name}: {before.why}", hint=f"zerun cancel {loaded.name} again, in a moment")
            loaded = self.store.append(loaded, "cancelling", before.attempt, time.time())
            if loaded.handle is not None:
                backend.cancel(loaded.handle, loaded.name, before.attempt)
            elif before.state == "unknown":
                raise Unreachable(f"{loaded.name}: {before.why}", hint=f"zerun cancel {loaded.name} again, later")
            loaded = self.store.append(loaded, "cancelled", before.attempt, time.time())
            return self.attempts.look(backend, [loaded])[0]
        finally:
            backend.close()

    # --- checkpoints and bringing home ------------------------------------------------------------

    def checkpoints(self, run: str) -> list[Candidate]:
        """Every checkpoint of the run on its cluster, oldest first, with what is wrong with it."""
        from .checkpoints import candidates

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            return candidates(self._about(backend, loaded), loaded.folder)
        finally:
            backend.close()

    def _about(self, backend: Backend, run: Run) -> list[Mapping[str, Any]]:
        answers, silent = ask(backend, [run])
        if silent and not answers:
            place, why = next(iter(silent.items()))
            raise Unreachable(f"{place}: {why}")
        return [a["runs"].get(str(RunFolder.at(p.runs, run.name).root), {}) for p, a in answers]

    def collect(
        self, run: str, checkpoint: str = "newest", progress: Callable[[int, int], None] | None = None
    ) -> Collected:
        """Brings logs, metrics and a checkpoint (``newest``, ``none`` or a step) home, verified."""
        from .checkpoints import collect

        loaded = self.store.load(self.resolve(run))
        backend = self.attempts.open_for(loaded)
        try:
            got = collect(backend, loaded.name, loaded.folder, checkpoint, progress)
        finally:
            backend.close()
        self.store.append(loaded, "collected", loaded.attempt, time.time(), checkpoint=got.step)
        return got

    def verify(self, run: str, step: int | None = None) -> Report:
        """Reads a checkpoint that is at home whole, and holds every block against its digest."""
        from .keeping import verify_at_home

        return verify_at_home(self.store.load(self.resolve(run)), step)

    # --- resume -----------------------------------------------------------------------------------

    def resume(
        self,
        run: str,
        *,
        nodes: int | None = None,
        step: int | None = None,
        sets: Sequence[str] = (),
        notice: Notice | None = None,
        waiting: Waiting | None = None,
    ) -> Submitted:
        """The next attempt of the run, from the newest whole checkpoint, on the same or another number of nodes.

        ``sets`` are assignments over the job as its last attempt had it (``steps=600`` goes further);
        a checkpoint that does not fit what they make of the model is refused by the engine.
        """
        from . import datasets, specs
        from .checkpoints import candidates, choose, explain, stage
        from .planning import check_engine, make_plan
        from .starting import Waiting

        loaded = self.store.load(self.resolve(run))
        before = made_of(loaded, loaded.attempt)
        assigned = (*before.sets, *sets)
        job = specs.job_from_plain(loaded.about["job"], assigned)
        cluster = specs.moved(specs.cluster_from_plain(loaded.about["cluster"]), job.pool)
        secret_values = read_secrets(job.secrets)
        backend = self.attempts.open(cluster, runtime_bundle())
        try:
            state = self.attempts.look(backend, [loaded])[0]
            loaded = self.store.load(loaded.name)
            refuse_to_resume(state, again=step is not None or bool(sets))
            found = candidates(self._about(backend, loaded), loaded.folder)
            # A program that keeps its checkpoints elsewhere, or in files of its own, finds them itself.
            chosen = choose(found, step) if found or step is not None or job.program is None else None
            notes = (
                list(explain(found, chosen))
                if chosen
                else ["the run has no checkpoint that zerun knows; " + _BY_ITSELF]
            )
            kept = None if any(s.startswith("batch.") for s in sets) else before.global_batch
            plan = make_plan(job, cluster, nodes=nodes, global_batch=kept)
            check_engine(plan)
            refuse_what_cannot_fit(plan)
            device_kind = cluster.device_of(plan.nodes[0].name).kind
            (waiting or Waiting()).for_slots(backend, plan.nodes, device_kind)
            attempt = max(state.attempt, loaded.attempt) + 1
            code_name = str(loaded.about["code"]["name"])
            data = datasets.check_again(backend, job, cluster, plan, loaded.about.get("data", ()))
            source = Source(job, cluster, plan, Bundle(code_name, self.attempts.blob(code_name)), assigned, data)
            again = Again(attempt, sum(candidate.whole for candidate in found))
            notes += [*plan.remarks, *ask_first(self.attempts, backend, source, loaded.name, again=again)]
            with loaded.making():
                loaded = self.store.load(loaded.name)
                take_attempt(loaded, attempt)
                launch = self.attempts.launch(
                    source,
                    loaded.name,
                    attempt,
                    one_folder(backend.places()),
                    resume_step=chosen.step if chosen is not None and not chosen.name else None,
                )
                if chosen is not None and chosen.name:
                    launch = replace(launch, resume_from=chosen.name)
                    notes += [] if launch.shared else [f"{chosen.name} stays on the nodes that wrote it, a piece each"]
                if chosen is not None and not launch.shared:
                    moved = stage(backend, loaded.name, loaded.folder, chosen, launch, notice or (lambda _: None))
                    notes += [moved] if moved else []
                loaded, handle = self.attempts.send(backend, loaded, source, launch, secret_values)
        finally:
            backend.close()
        return Submitted(loaded.name, attempt, handle, tuple(notes))

    def remove(self, run: str, *, remote: bool, sure: Callable[[Clearing], bool]) -> Clearing | None:
        """Removes a run that has ended: at home, and with ``remote`` on its cluster. ``sure`` is asked once it is known
        what would go; None when it says no."""
        from . import specs
        from .clearing import clear, look

        loaded = self.store.load(self.resolve(run))
        local = specs.cluster_from_plain(loaded.about["cluster"]).local
        state = remembered(loaded)
        backend = self.attempts.open_for(loaded) if remote or local or state is None else None
        try:
            if state is None and backend is not None:
                state = self.attempts.look(backend, [loaded])[0]
            assert state is not None
            clearing = look(backend, loaded, state, remote=remote, local=local)
            if not sure(clearing):
                return None
            clear(backend, clearing)
            return clearing
        finally:
            if backend is not None:
                backend.close()

    def login(self, name: str | None, keep_s: int) -> Iterator[tuple[Master, bool]]:
        """Logs in by hand to every machine of a cluster that needs it: ssh asks at this process's terminal.

        Each with whether it was opened anew. Raises, once all were tried, for those that could not be reached.
        """
        from .transports.open import Connector

        failed: list[Unreachable] = []
        num_open = 0
        for master in Connector(self.cluster(name)).masters():
            try:
                yield master, master.open_by_hand(keep_s)
                num_open += 1
            except Unreachable as problem:
                failed.append(problem)
        if failed and num_open:
            raise PartialAnswer("; ".join(problem.message for problem in failed))
        if failed:
            raise failed[0]

    def logout(self, name: str | None) -> list[str]:
        """Ends the logins to a cluster that stand open; their names."""
        from .transports.open import Connector

        masters = Connector(self.cluster(name)).masters()
        return [master.name for master in reversed(masters) if master.close()]

    def check_cluster(self, name: str | None = None) -> list[Finding]:
        """Reaches every node in parallel; a finding each."""
        backend = self.attempts.open(self.cluster(name), runtime_bundle())
        try:
            return list(backend.check())
        finally:
            backend.close()

    def check_network(
        self, name: str | None, nodes: int | None, notice: Notice, *, pool: str | None = None
    ) -> list[Finding]:
        """A job of its own: all pairs of nodes on a real port, then a small all-reduce whose sum is known."""
        from . import specs
        from .network_check import Templates, check_network

        templates = Templates(self.attempts.templates, self.attempts.user_templates)
        return check_network(specs.in_pool(self.cluster(name), pool), nodes, templates, notice)

    def push_data(
        self,
        name: str,
        cluster: str | None = None,
        source: Path | None = None,
        *,
        notice: Notice,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pushed:
        """Copies the cluster's dataset ``name`` from the folder ``source`` (default: data/NAME of the project) to every
        node that lacks it, and proves it there."""
        from .datasets import push

        described = self.cluster(cluster)
        backend = self.attempts.open(described, runtime_bundle())
        try:
            return push(backend, described, name, source or self.root / "data" / name, notice, progress)
        finally:
            backend.close()

    def discover_cluster(self, target: str, *, ssh_config: Path | None = None, out: Path | None = None) -> str:
        """A description, with pools, of a cluster in clusters/ or of a host that Slurm or nothing but SSH is on.

        ``out`` is the file that the text is for: it names the cluster when ``target`` is a host.
        """
        from . import discover, specs

        runtime = runtime_bundle()
        try:
            cluster = specs.load_cluster(specs.find_cluster(target, self.cluster_folders()))
        except UsageError as problem:
            if isinstance(problem, DescriptionError) or "/" in target or target.endswith((".yaml", ".yml")):
                raise
            cluster = discover.of_host(target, ssh_config)
        if out is not None:
            cluster = cluster.model_copy(update={"name": out.stem})
        return discover.discover(cluster, (runtime.digest, runtime.data), target, out)

    def prepare_data(self, files: Sequence[Path], out: Path) -> dict[str, Any]:
        """Turns text files into ``train.bin`` and ``heldout.bin`` in ``out``: bytes as tokens, split by file."""
        from .contract.text import prepare

        return prepare(files, out)


# --- small rules ----------------------------------------------------------------------------------


def find_root(start: Path) -> Path:
    """The project's folder: the nearest that holds ``clusters/`` or a git repository, else ``start``."""
    for folder in (start, *start.parents):
        if (folder / "clusters").is_dir() or (folder / ".git").exists():
            return folder
    return start


def read_secrets(names: Sequence[str]) -> dict[str, str]:
    """The values of ``secrets`` from this environment. Raises UsageError naming those that are not set."""
    missing = [n for n in names if n not in os.environ]
    if missing:
        raise UsageError(f"the job wants secrets that are not set here: {', '.join(missing)}", hint="export them first")
    return {n: os.environ[n] for n in names}


def refuse_what_cannot_fit(plan: Plan, *, force: bool = False) -> None:
    """Raises DoesNotFit, before anything is sent, for a state or a whole step above the device."""
    if force:
        return
    if plan.state.verdict == "does not fit":
        raise DoesNotFit(plan.state.because, hint="zerun plan shows every stage's state memory")
    if plan.judgement.verdict == "does not fit":
        best = " ".join(f"--set {assignment}" for assignment in plan.judgement.best)
        raise DoesNotFit(
            plan.judgement.because, hint=f"{best} would fit" if best else "zerun plan shows every line; --force submits"
        )


def refuse_to_resume(state: RunState, *, again: bool) -> None:
    """A run that goes on, or of which it is not known, must not be doubled; one that is done only ``again``."""
    if state.state == "unknown":
        raise Unreachable(f"{state.run}: whether it still runs is not known ({state.why})")
    if not state.ended:
        raise UsageError(f"{state.run} is {state.state}", hint=f"zerun cancel {state.run} first, or wait for its end")
    if state.state == "done" and not again:
        raise UsageError(
            f"{state.run} is done: nothing is left to resume",
            hint="--step S goes again from a checkpoint, --set steps=N goes further",
        )


def exit_code_of(state: RunState) -> int:
    """What ``wait`` and ``submit --follow`` return: the job's, or 10 while it goes on, 4 when it is not known."""
    if state.exit_code is not None:
        return state.exit_code
    return int(Exit.UNREACHABLE if state.state == "unknown" else Exit.STILL_RUNNING)
