"""Descriptions from files: ``load_cluster``, ``load_job``; every mistake at once, each with its place.

>>> job = load_job("jobs/quickstart.yaml", ["zero.stage=3"])
>>> cluster = load_cluster(find_cluster("laptop", [Path("clusters")]))
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from pydantic import ValidationError

from ..contract.errors import DescriptionError, UsageError
from . import nodelist
from .description import Description
from .document import Document, Place, apply_set, read
from .idle import Kind, refuse_idle
from .mistakes import did_you_mean
from .models import Cluster, Job, NodeEntry, Nodes
from .pools import in_pool
from .setup_text import place_setup

D = TypeVar("D", bound=Description)
_CLUSTER_PREFIX = "cluster."
_SUFFIXES = (".yaml", ".yml")


def load_cluster(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Cluster:
    """The cluster that ``path`` describes, with ``--set`` assignments (with or without ``cluster.`` before them).

    Files that it names are read or made absolute, so that the result stands for itself.
    Raises DescriptionError with every mistake, UsageError when there is no such file.
    """
    return parse_text("cluster", _source(path), os.fspath(path), sets)


def load_job(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Job:
    """The job that ``path`` describes; ``code.root`` and a ``cluster`` written as a path become absolute."""
    return parse_text("job", _source(path), os.fspath(path), sets)


@overload
def parse_text(kind: Literal["cluster"], text: bytes | str, filename: str, sets: Sequence[str] = ()) -> Cluster: ...
@overload
def parse_text(kind: Literal["job"], text: bytes | str, filename: str, sets: Sequence[str] = ()) -> Job: ...
def parse_text(kind: Kind, text: bytes | str, filename: str, sets: Sequence[str] = ()) -> Cluster | Job:
    """Like load_cluster and load_job, from text that stands (or would stand) in ``filename``."""
    document = _assigned(read(text, filename), kind, sets)
    place_setup(document, text if isinstance(text, str) else text.decode("utf-8", "replace"))
    folder = Path(filename).absolute().parent
    if kind == "job":
        job = _validated(Job, document)
        refuse_idle(document, kind)
        _raise(document)
        assert job is not None
        return _resolved_job(job, folder)
    cluster = _validated(Cluster, document)
    entries = _hostfile_entries(document, folder)
    refuse_idle(document, kind)
    _raise(document)
    assert cluster is not None
    return in_pool(_resolved_cluster(cluster, entries, folder))


def _assigned(document: Document, kind: Kind, sets: Sequence[str]) -> Document:
    # Without a tree there is nothing to set, and nothing more to say than that.
    if document.tree or not document.problems:
        for assignment in sets:
            bare = assignment.removeprefix(_CLUSTER_PREFIX) if kind == "cluster" else assignment
            apply_set(document, bare, assignment)
    return document


def written(kind: Kind, path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Document:
    """A description as it stands in ``path`` with ``sets`` over it: where to say what its values do to others."""
    return _assigned(read(_source(path), os.fspath(path)), kind, sets)


def split_sets(sets: Iterable[str]) -> tuple[list[str], list[str]]:
    """``--set`` assignments for the job, and those for the cluster (``cluster.a.b=…``)."""
    listed = list(sets)
    for_cluster = [s for s in listed if s.startswith(_CLUSTER_PREFIX)]
    return [s for s in listed if not s.startswith(_CLUSTER_PREFIX)], for_cluster


def find_cluster(name_or_path: str, search: Sequence[Path]) -> Path:
    """A cluster's file: a path that is there, or a name found as ``NAME.yaml`` in the folders of ``search``."""
    if "/" in name_or_path or name_or_path.endswith(_SUFFIXES):
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return path
        raise UsageError(f"there is no cluster file {name_or_path}", hint="a path, or a name in clusters/")
    known: dict[str, Path] = {}
    for folder in search:
        for suffix in _SUFFIXES:
            for found in sorted(folder.glob(f"*{suffix}")):
                known.setdefault(found.name.removesuffix(suffix), found)
    if name_or_path in known:
        return known[name_or_path]
    where = ", ".join(str(folder) for folder in search) or "nowhere"
    listed = f"known: {', '.join(sorted(known))}" if known else "there is none"
    raise UsageError(
        f"no cluster is called {name_or_path!r}{did_you_mean(name_or_path, known)}; {listed}",
        hint=f"looked for NAME.yaml in: {where}; a path works too",
    )


# --- plain form -----------------------------------------------------------------------------------


def describe(model: Cluster | Job) -> dict[str, Any]:
    """The resolved description as plain data, kept in ``run.json``; what says nothing is left out.

    Written as YAML it is a valid description again, but for the hosts that came out of a hostfile, and for keys that
    a ``--set`` over others left without a meaning: two runs must not differ in what nobody changed.
    """
    plain: dict[str, Any] = _without_nulls(model.model_dump(mode="json", by_alias=True, exclude=set(model.unsaid())))
    if isinstance(model, Cluster) and "slurm" in plain:
        plain["slurm"] = {k: v for k, v in plain["slurm"].items() if k not in model.unsaid_of_slurm()}
    return plain


# Mappings whose keys are the user's own: a null there says something.
_USERS_OWN = frozenset({"extra", "options", "env"})


def _without_nulls(plain: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict) and key not in _USERS_OWN:
            result[key] = _without_nulls(value)
        elif isinstance(value, list):
            result[key] = [_without_nulls(v) if isinstance(v, dict) else v for v in value]
        elif value is not None:
            result[key] = value
    return result


def cluster_from_plain(plain: Mapping[str, Any]) -> Cluster:
    """The cluster that :func:`describe` wrote down; the same checks as for a file."""
    return in_pool(_from_plain(Cluster, plain))


def job_from_plain(plain: Mapping[str, Any], sets: Sequence[str] = ()) -> Job:
    """The job that :func:`describe` wrote down, with ``--set`` assignments over it."""
    return _from_plain(Job, plain, sets)


def _from_plain(model: type[D], plain: Mapping[str, Any], sets: Sequence[str] = ()) -> D:
    document = Document(f"the {model.__name__.lower()} in run.json", copy.deepcopy(dict(plain)))
    for assignment in sets:
        apply_set(document, assignment, assignment)
    found = _validated(model, document, written=False)
    _raise(document)
    assert found is not None
    return found


# --- inside ---------------------------------------------------------------------------------------


def _source(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise UsageError(f"cannot read {os.fspath(path)}: {problem.strerror}") from None


def _raise(document: Document) -> None:
    if document.problems:
        raise DescriptionError(document.problems)


def _validated(model: type[D], document: Document, *, written: bool = True) -> D | None:
    """The model, or None with its mistakes among the document's problems."""
    if document.problems and not document.tree:
        return None
    try:
        return model.model_validate(document.tree, context={"written": written})
    except ValidationError as error:
        for line in error.errors(include_url=False, include_input=False):
            # Tags of unions ("<list>") are steps that no file has.
            loc = tuple(step for step in line["loc"] if not str(step).startswith("<"))
            if loc in document.refused:
                continue
            message = line["msg"]
            if not written:
                message = f"{'.'.join(map(str, loc))}: {message}" if loc else message
            offset = line.get("ctx", {}).get("offset")
            document.wrong(loc, message, at_key=line["type"] == "key", offset=offset)
        return None


def _hostfile_entries(document: Document, folder: Path) -> tuple[NodeEntry, ...] | None:
    nodes = document.tree.get("nodes")
    written = nodes.get("hostfile") if isinstance(nodes, dict) else None
    if not isinstance(nodes, dict) or not isinstance(written, str) or not written:
        return None
    path = folder / Path(written).expanduser()
    shown = os.path.join(os.path.dirname(document.file), written)
    try:
        text = path.read_text("utf-8")
    except OSError as problem:
        document.wrong(("nodes", "hostfile"), f"cannot read {shown}: {problem.strerror}")
        return None
    except UnicodeDecodeError:
        document.wrong(("nodes", "hostfile"), f"{shown} is not UTF-8 text")
        return None
    except ValueError:  # no path at all; the key's own type says so
        return None
    hosts, mistakes = nodelist.parse_hostfile(text)
    document.problems += [Place(shown, m.line, m.column).problem(m.message) for m in mistakes]
    slots = nodes.get("slots")
    default = int(slots) if isinstance(slots, str) and re.fullmatch(r"0*[1-9]\d{0,17}", slots, re.ASCII) else 1
    if mistakes:
        return None
    return tuple(NodeEntry(name=host, slots=count or default) for host, count in hosts)


def _resolved_cluster(cluster: Cluster, entries: tuple[NodeEntry, ...] | None, folder: Path) -> Cluster:
    changes: dict[str, Any] = {}
    if entries is not None and isinstance(cluster.nodes, Nodes) and cluster.nodes.hostfile:
        absolute = str(folder / Path(cluster.nodes.hostfile).expanduser())
        changes["nodes"] = cluster.nodes.model_copy(update={"entries": entries, "hostfile": absolute})
    files = {k: v for k in ("config", "key") if (v := getattr(cluster.ssh, k))}
    if files:
        absolutes = {k: os.path.normpath(folder / Path(v).expanduser()) for k, v in files.items()}
        changes["ssh"] = cluster.ssh.model_copy(update=absolutes)
    return cluster.model_copy(update=changes) if changes else cluster


def _resolved_job(job: Job, folder: Path) -> Job:
    changes: dict[str, Any] = {}
    if job.code.root is not None:
        root = os.path.normpath(folder / Path(job.code.root).expanduser())
        changes["code"] = job.code.model_copy(update={"root": root})
    if job.cluster is not None and ("/" in job.cluster or job.cluster.endswith(_SUFFIXES)):
        changes["cluster"] = os.path.normpath(folder / Path(job.cluster).expanduser())
    return job.model_copy(update=changes) if changes else job
