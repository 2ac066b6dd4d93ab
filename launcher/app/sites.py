"""Clusters themselves: logins, checks, data, descriptions made from what they tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundles import runtime_bundle
from ..contract.errors import (
    DescriptionError,
    PartialAnswer,
    Unreachable,
    UsageError,
)
from .project import Notice, Project

if TYPE_CHECKING:
    from ..backends.protocol import Finding
    from ..datasets import Pushed
    from ..specs.models import Cluster
    from ..transports.master import Master


class Sites(Project):
    """The use cases of a cluster."""

    def login(self, name: str | None, keep_s: int) -> Iterator[tuple[Master, bool]]:
        """Logs in by hand to every machine of a cluster that needs it: ssh asks at this process's terminal.

        Each with whether it was opened anew. Raises, once all were tried, for those that could not be reached.
        """
        from ..transports.open import Connector

        failed: list[Unreachable] = []
        num_open = 0
        for master in Connector(self._cluster_or_host(name)).masters():
            try:
                yield master, master.open_by_hand(keep_s)
                num_open += 1
            except Unreachable as problem:
                failed.append(problem)
        if failed and num_open:
            raise PartialAnswer("; ".join(problem.message for problem in failed))
        if failed:
            raise failed[0]

    def _cluster_or_host(self, name: str | None) -> Cluster:
        """A cluster, or a host of which no description tells yet: whoever has to log in first makes one then."""
        from .. import discover

        try:
            return self.cluster(name)
        except UsageError as problem:
            told = isinstance(problem, DescriptionError) or "did you mean" in problem.message
            if name is None or told or "/" in name or name.endswith((".yaml", ".yml")):
                raise
        return discover.by_hand(name)

    def logout(self, name: str | None) -> list[str]:
        """Ends the logins to a cluster that stand open; their names."""
        from ..transports.open import Connector

        masters = Connector(self._cluster_or_host(name)).masters()
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
        from .. import specs
        from ..network_check import Templates, check_network

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
        from ..datasets import push

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
        from .. import discover, specs

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
        from ..contract.text import prepare

        return prepare(files, out)
