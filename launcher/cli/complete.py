"""What the shell offers on Tab: names of runs, clusters and pools. Reads only what lies at home, and never fails."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..contract.errors import ZerunError


def runs(incomplete: str) -> list[str]:
    """Newest first: the run that is meant is mostly among the last."""
    from ..app import App

    try:
        names = App().store.names()
    except (OSError, ZerunError):
        return []
    return [name for name in ("last", *reversed(names)) if name.startswith(incomplete)]


def clusters(incomplete: str) -> list[str]:
    return [name for name in _cluster_files() if name.startswith(incomplete)]


def assignments(incomplete: str) -> list[str]:
    """``--set pool=``: the pools of the clusters here."""
    if not incomplete.startswith("pool="):
        return [key for key in ("pool=",) if key.startswith(incomplete)]
    return [found for pool in _pools() if (found := f"pool={pool}").startswith(incomplete)]


def _cluster_files() -> dict[str, Path]:
    from ..app import App

    try:
        folders = App().cluster_folders()
        return {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.yaml"))}
    except OSError:
        return {}


def _pools() -> Iterable[str]:
    """Of the default cluster where there is one, else of all."""
    from .. import specs

    files = _cluster_files()
    chosen = os.environ.get("ZERUN_CLUSTER", "")
    names: dict[str, None] = {}
    for name, path in files.items():
        if chosen in ("", name):
            try:
                names.update(dict.fromkeys(specs.load_cluster(path, ()).pools or ()))
            except (OSError, ZerunError):
                continue
    return names
