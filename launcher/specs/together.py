"""What a job and its cluster say of each other: which pool, and whether the job asks for more than there is.

Each mistake is told where the job says it, like any other mistake of its description.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..contract.errors import DescriptionError, Problem
from .dataset_model import unknown_dataset
from .document import Document
from .idle import Kind
from .load import written
from .mistakes import Loc, Mistake
from .models import Cluster, Job, NodeEntry
from .pool_model import unknown_pool
from .pools import in_pool
from .units import slurm_clock


def job_on(job: Job, cluster: Cluster, path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Cluster:
    """``cluster`` as ``job`` sees it: in its pool. ``path`` and ``sets`` are where the job was loaded from.

    Raises DescriptionError, with a place in the job's file, for a pool that is not there, and for more time, nodes or
    slots than there are.
    """
    found = _pool_mistake(job, cluster)
    seen = cluster if found else in_pool(cluster, job.pool)
    mistakes = [found] if found else [*_too_much(job, seen), *_data_mistakes(job, seen)]
    if mistakes:
        document = written("job", path, sets)
        for mistake in mistakes:
            document.wrong(mistake.loc, mistake.message)
        raise DescriptionError(document.problems)
    return seen


@dataclass(frozen=True)
class Written:
    """Where a job and its cluster were loaded from: to say at which key of which file they do not go together."""

    job: str | os.PathLike[str]
    cluster: str | os.PathLike[str]
    job_sets: Sequence[str] = ()
    cluster_sets: Sequence[str] = ()

    def problems(self, reasons: Iterable[tuple[Sequence[str], str]], job: str, cluster: str) -> list[Problem]:
        """``reasons`` why ``job`` cannot be on ``cluster``, each at the first of its keys that is written, or at the
        nearest around it. Keys are as ``--set`` writes them: ``zero.stage``, ``cluster.nodes``."""
        documents: dict[Kind, Document] = {
            "job": written("job", self.job, self.job_sets),
            "cluster": written("cluster", self.cluster, self.cluster_sets),
        }
        pool = _pool_of(documents["job"].tree, documents["cluster"].tree)
        for keys, message in reasons:
            places = [_place_of(key, pool) for key in keys]
            kind, loc = next(((k, at) for k, at in places if documents[k].holds(at)), places[0])
            documents[kind].wrong(loc, f"{f'on cluster {cluster}' if kind == 'job' else f'job {job}'}: {message}")
        return [*documents["job"].problems, *documents["cluster"].problems]


def _place_of(key: str, pool: str | None) -> tuple[Kind, Loc]:
    first, *rest = key.split(".")
    if first != "cluster":
        return "job", (first, *rest)
    return "cluster", (*(("pools", pool) if pool is not None else ()), *rest)


def _pool_of(job: Mapping[str, Any], cluster: Mapping[str, Any]) -> str | None:
    pools = cluster.get("pools")
    if not isinstance(pools, Mapping):
        return None
    return str(job.get("pool") or cluster.get("pool") or next(iter(pools)))


def _pool_mistake(job: Job, cluster: Cluster) -> Mistake | None:
    if job.pool is None:
        return None
    if not cluster.pools:
        return Mistake(("pool",), f"cluster {cluster.name} has no pools; leave pool out")
    if job.pool not in cluster.pools:
        return Mistake(("pool",), f"cluster {cluster.name}: {unknown_pool(job.pool, cluster.pools)}")
    return None


def _too_much(job: Job, cluster: Cluster) -> Iterator[Mistake]:
    where = f"pool {cluster.pool}" if cluster.pools else f"cluster {cluster.name}"
    longer = _others(cluster, lambda c: c.time_max is None or job.time is None or c.time_max >= job.time)
    if job.time is not None and cluster.time_max is not None and job.time > cluster.time_max:
        asked, most = slurm_clock(job.time), slurm_clock(cluster.time_max)
        yield Mistake(("time",), f"time: {asked} was asked for, {where} allows {most}{longer}")
    entries = cluster.node_list
    if entries and job.nodes > len(entries):
        more = _others(cluster, lambda c: not c.node_list or len(c.node_list) >= job.nodes)
        yield Mistake(("nodes",), f"nodes: {job.nodes} were asked for, {where} has {_named(entries)}{more}")
    if job.slots_per_node == "all":
        return
    most_slots = max((entry.slots for entry in entries), default=cluster.slots or 1)
    if job.slots_per_node > most_slots:
        asked_slots = job.slots_per_node
        larger = _others(cluster, lambda c: max((e.slots for e in c.node_list), default=c.slots or 1) >= asked_slots)
        message = f"slots_per_node: {asked_slots} ranks were asked for, a node of {where} has {most_slots}{larger}"
        yield Mistake(("slots_per_node",), message)


def _data_mistakes(job: Job, cluster: Cluster) -> Iterator[Mistake]:
    data = job.data
    if data is None:
        return
    if data.stage_to is not None and cluster.paths.node_local is None:
        yield Mistake(("data", "stage_to"), f"cluster {cluster.name} has no paths.node_local to stage to")
    for at, name in enumerate(data.datasets):
        if name not in cluster.datasets:
            unknown = unknown_dataset(name, cluster.datasets)
            yield Mistake(("data", "datasets", at), f"cluster {cluster.name}: {unknown}")
    if data.dataset is None:
        return
    found = cluster.datasets.get(data.dataset)
    if found is None:
        yield Mistake(("data", "dataset"), f"cluster {cluster.name}: {unknown_dataset(data.dataset, cluster.datasets)}")
    elif job.evaluate is not None and found.heldout is None:
        yield Mistake(("evaluate",), f"dataset {data.dataset} of cluster {cluster.name} has no heldout to evaluate")


def _others(cluster: Cluster, enough: Callable[[Cluster], bool]) -> str:
    """``; pool b has enough`` where other pools would do."""
    names = [name for name in cluster.pools or () if name != cluster.pool and enough(in_pool(cluster, name))]
    return f"; enough is in pool {' and '.join(names)}" if names else ""


def _named(entries: Sequence[NodeEntry]) -> str:
    names = [entry.name for entry in entries]
    return f"{len(entries)} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})"
