"""Which files a job's data are on a cluster, and by which variables a program of the user's own finds them."""

from __future__ import annotations

from typing import NamedTuple

from ..contract.errors import UsageError
from ..specs.dataset_model import ROLES, Dataset, variable_part
from ..specs.models import Cluster, Data

VARIABLE = "ZERUN_DATA"


class Wanted(NamedTuple):
    """``role``: tokens · heldout, of several data sets pile.tokens and so on; ``digest`` is what the cluster's
    description says, ``dataset`` the name that it has there."""

    role: str
    path: str
    variable: str
    digest: str | None = None
    dataset: str | None = None


def wanted_files(data: Data | None, cluster: Cluster) -> tuple[Wanted, ...]:
    """The files of ``data``, none where samples come from a function or from the standard library's text."""
    if data is None:
        return ()
    if data.dataset is not None:
        return _of_set(data.dataset, cluster, several=False)
    if data.datasets:
        return tuple(file for name in data.datasets for file in _of_set(name, cluster, several=True))
    paths = {"tokens": data.tokens, "heldout": data.heldout}
    return tuple(Wanted(role, path, _variable(ROLES[role])) for role, path in paths.items() if path is not None)


def _of_set(name: str, cluster: Cluster, *, several: bool) -> tuple[Wanted, ...]:
    found = cluster.datasets.get(name)
    if found is None:  # the descriptions' own check says it first, with its place
        raise UsageError(f"cluster {cluster.name} has no dataset {name!r}")
    front = name if several else ""
    return tuple(
        Wanted(f"{front}.{role}" if several else role, path, _variable(front, said), _digest(found, said), name)
        for role, said in ROLES.items()
        if (path := getattr(found, said)) is not None
    )


def _digest(dataset: Dataset, said: str) -> str | None:
    digest = getattr(dataset, f"{said}_digest")
    return None if digest is None else str(digest)


def _variable(*words: str) -> str:
    return "_".join([VARIABLE, *(variable_part(word) for word in words if word)])
