"""Descriptions: YAML → frozen Cluster and Job, every mistake at once with its place (floor 1).

Names are looked up on first use, so that ``specs.nodelist`` and ``specs.units`` come without pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .load import (
        cluster_from_plain,
        describe,
        find_cluster,
        job_from_plain,
        load_cluster,
        load_job,
        parse_text,
        split_sets,
    )
    from .models import Cluster, Job
    from .pools import in_pool, moved
    from .together import Written, job_on

__all__ = [
    "Cluster",
    "Job",
    "Written",
    "cluster_from_plain",
    "describe",
    "find_cluster",
    "in_pool",
    "job_from_plain",
    "job_on",
    "load_cluster",
    "load_job",
    "moved",
    "parse_text",
    "split_sets",
]

_HOMES = {
    "Cluster": ".models",
    "Job": ".models",
    "Written": ".together",
    "in_pool": ".pools",
    "job_on": ".together",
    "moved": ".pools",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, ".load")
    return getattr(importlib.import_module(home, __name__), name)
