"""A project: its runs, its clusters, its descriptions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attempts import Attempts
from ..contract.errors import DescriptionError, Problem, Unreachable, UsageError
from ..contract.folder import RunFolder
from ..observe import ask
from ..runs import Run, RunStore

if TYPE_CHECKING:
    from ..backends.protocol import Backend
    from ..bundles import CodeBundle
    from ..planning.plan import Plan
    from ..specs.models import Cluster, Job

Notice = Callable[[str], None]


class Project:
    """zerun in one project. ``root`` is the project's folder (default: found from the working folder)."""

    def __init__(self, root: Path | None = None, *, runs: Path | None = None, templates: Path | None = None) -> None:
        self.root = root or find_root(Path.cwd())
        named = os.environ.get("ZERUN_RUNS")
        self.store = RunStore((runs or (Path(named) if named else self.root / "runs")).resolve())
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "zerun"
        self.config = config
        self.attempts = Attempts(self.store, templates, config / "templates")

    def cluster(self, name: str | None = None, sets: Sequence[str] = ()) -> Cluster:
        """The cluster that ``name`` (a path, or a name in clusters/) describes."""
        from .. import specs

        return specs.load_cluster(self.cluster_file(name), sets)

    def cluster_file(self, name: str | None = None) -> Path:
        from .. import specs

        chosen = name or os.environ.get("ZERUN_CLUSTER") or self._default_cluster()
        if chosen is None:
            raise UsageError(
                "which cluster?",
                hint="name one (--cluster NAME; cluster check NAME), set ZERUN_CLUSTER, or write `cluster:` in the job",
            )
        return specs.find_cluster(chosen, self.cluster_folders())

    def cluster_folders(self) -> list[Path]:
        return [self.root / "clusters", self.config / "clusters", Path(__file__).parents[2] / "clusters"]

    def _default_cluster(self) -> str | None:
        try:
            text = (self.config / "cluster").read_text().strip()
        except FileNotFoundError:
            return None
        return text or None

    def resolve(self, run: str) -> str:
        return self.store.resolve(run)

    def _about(self, backend: Backend, run: Run) -> list[Mapping[str, Any]]:
        answers, silent = ask(backend, [run])
        if silent and not answers:
            place, why = next(iter(silent.items()))
            raise Unreachable(f"{place}: {why}")
        return [a["runs"].get(str(RunFolder.at(p.runs, run.name).root), {}) for p, a in answers]

    def describe(self, job: Path, cluster: str | None, sets: Sequence[str] = ()) -> tuple[Job, Cluster]:
        """Both descriptions, every mistake of either at once."""
        from .. import specs

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

    def code(self, job: Path, loaded: Job, sets: Sequence[str], hidden: Mapping[str, str]) -> CodeBundle:
        """The tree that the job ships. Raises DescriptionError where one of its patterns is for nothing."""
        from .. import specs
        from ..bundles import NothingMatches
        from ..specs.load import written

        try:
            return self.attempts.code(job.resolve().parent, loaded, hidden)
        except NothingMatches as nothing:
            document = written("job", job, specs.split_sets(sets)[0])
            for number, said in nothing.said.items():
                document.wrong(("code", "include", number), said)
            raise DescriptionError(document.problems, hint=nothing.hint) from nothing

    def planned(
        self, job: Path, cluster: str | None, sets: Sequence[str] = (), *, built: bool = False
    ) -> tuple[Job, Cluster, Plan]:
        """Both descriptions, and what they come to. What cannot be is told where the one or the other says it.
        ``built``: what is planned only, and the engine cannot train, is refused too."""
        from ..planning import check_engine, make_plan

        loaded_job, loaded_cluster = self.describe(job, cluster, sets)
        with self.telling_where(job, cluster or loaded_job.cluster, sets):
            plan = make_plan(loaded_job, loaded_cluster)
            if built:
                check_engine(plan)
        return loaded_job, loaded_cluster, plan

    @contextlib.contextmanager
    def telling_where(self, job: Path, cluster: str | None, sets: Sequence[str] = ()) -> Iterator[None]:
        """A CannotPlan as a DescriptionError, at the key of the one file or the other that is at fault."""
        from .. import specs
        from ..planning import CannotPlan

        try:
            yield
        except CannotPlan as refused:
            where = specs.Written(job, self.cluster_file(cluster), *specs.split_sets(sets))
            reasons = [(reason.keys, reason.message) for reason in refused.reasons]
            problems = where.problems(reasons, refused.job, refused.cluster)
            raise DescriptionError(problems, hint=refused.hint) from refused


def find_root(start: Path) -> Path:
    """The project's folder: the nearest that holds ``clusters/`` or a git repository, else ``start``."""
    for folder in (start, *start.parents):
        if (folder / "clusters").is_dir() or (folder / ".git").exists():
            return folder
    return start
