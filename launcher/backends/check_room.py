"""What ``cluster check`` says of room: the home folder's quota, where runs lie, each node's own disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..specs.models import Cluster

_FEW_FILES = 1000
_HOME_BYTES = 2 * 10**8


def paths_of(cluster: Cluster, runs: str) -> dict[str, str]:
    """What the agent's verb ``left`` is asked about."""
    local = cluster.paths.node_local
    return {"home": "~", "runs": runs, **({"node_local": local} if local is not None else {})}


def facts_of(left: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """``home_free_bytes`` and so on; where a quota limits, its name, and files where they are counted."""
    facts: dict[str, Any] = {}
    for name, told in left.items():
        if "problem" in told:
            facts[name] = "known inside a job alone" if name == "node_local" else told["problem"]
            continue
        if name != "runs":
            facts[f"{name}_free_bytes"] = told["free_bytes"]
        facts[f"{name}_free_files"] = told["free_files"]
        if told["by"] != "filesystem":
            facts[f"{name}_limited_by"] = told["by"]
    return facts


def problems_of(left: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What will stop a job: a folder that can take no more files, a home that is full."""
    found = []
    for name, told in left.items():
        if "problem" in told:
            continue
        files = told["free_files"]
        if files is not None and files < _FEW_FILES:
            found.append(f"only {files} more files can be made at {told['path']} ({told['by']})")
        if name == "home" and told["by"] != "filesystem" and told["free_bytes"] < _HOME_BYTES:
            left_mb = told["free_bytes"] / 1e6
            found.append(f"the quota of {told['path']} leaves {left_mb:.0f} MB: programs that keep caches there fail")
    return found
