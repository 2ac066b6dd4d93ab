"""The cluster that a job sees: one of its pools, as ``slurm:``, ``nodes:`` and ``device:`` of a plain cluster."""

from __future__ import annotations

from ..contract.errors import UsageError
from .models import Cluster, Nodes
from .pool_model import NODE_KEYS, Pool, filled, unknown_pool
from .slurm_model import SLURM_KEYS
from .values import freeze


def in_pool(cluster: Cluster, name: str | None = None) -> Cluster:
    """``cluster`` as a job in the pool ``name`` sees it (left out: its default pool, the first).

    What reads a cluster reads no pools: nodes, slurm and device are those of the pool. Raises UsageError for a
    pool that it does not have.
    """
    if not cluster.pools:
        if name is not None:
            raise UsageError(f"cluster {cluster.name} has no pools: leave pool {name!r} out")
        return cluster
    chosen = name or cluster.pool or next(iter(cluster.pools))
    if chosen not in cluster.pools:
        raise UsageError(f"cluster {cluster.name}: {unknown_pool(chosen, cluster.pools)}")
    # What was filled says everything itself: when it is filled again, what stands under slurm: by then (the pool's
    # that was chosen before) is no default for any other.
    pools = freeze(filled(cluster.pools, cluster.slurm))
    pool = pools[chosen]
    nodes = Nodes(names=pool.nodes, **{key: getattr(pool, key) for key in NODE_KEYS})
    slurm = cluster.slurm.model_copy(update={key: getattr(pool, key) for key in SLURM_KEYS})
    changes = {"pools": pools, "pool": chosen, "nodes": nodes, "slurm": slurm, "device": pool.device}
    return cluster.model_copy(update=changes)


def moved(cluster: Cluster, name: str | None) -> Cluster:
    """The cluster of a run that goes on, in the pool ``name``. Under ``direct`` that is the pool it began in: its
    files lie on those nodes. Raises UsageError for another one there."""
    if name is not None and cluster.backend == "direct" and cluster.pools and name != cluster.pool:
        raise UsageError(
            f"the run's files lie on the nodes of pool {cluster.pool}: it cannot go on in pool {name}",
            hint="collect it and submit it anew there",
        )
    return in_pool(cluster, name)


def chosen_pool(cluster: Cluster) -> Pool | None:
    """The pool that ``cluster`` was taken to by :func:`in_pool`."""
    return cluster.pools[cluster.pool] if cluster.pools and cluster.pool is not None else None
