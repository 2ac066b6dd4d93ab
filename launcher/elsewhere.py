"""Runs that lie on a cluster: also those that another laptop submitted, which are taken up here.

What a journal at home would say of such a run is read from what its agents and its submit left in the run's folder.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .attempts import Attempts, remembered
from .backends.protocol import Handle, Place, Poll
from .bundles import is_listing
from .contract.bundle import is_content, read_listing
from .contract.errors import Refused, Unreachable, ZerunError
from .contract.folder import content
from .contract.plain import to_plain
from .observe import combine
from .runs import Event, Run, RunState, RunStore, fold

if TYPE_CHECKING:
    from .backends.protocol import Backend
    from .specs.models import Cluster

_BLOB = re.compile(r"[0-9a-f]{64}\.(zip|tree|tar\.gz)")


@dataclass(frozen=True)
class There:
    """A run on a cluster. ``run`` has no folder at home yet where ``at_home`` is false."""

    run: Run
    owner: str
    folder: str  # on the cluster
    at_home: bool
    ours: bool  # below this description's own paths.runs, not another user's
    place: Place


@dataclass(frozen=True)
class Listed:
    """``closed`` are folders that their owners keep to themselves, ``silent`` places that did not answer."""

    there: Sequence[There]
    closed: Sequence[str] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    unknown: Sequence[str] = ()  # folders without a run.json that can be read


def find_runs(backend: Backend, cluster: Cluster, store: RunStore, *, all_users: bool) -> Listed:
    """Every run on ``cluster``, oldest first. A cluster without a shared disk holds a run in pieces: they are one."""
    known = set(store.names())
    pieces: dict[str, list[tuple[Place, Mapping[str, Any]]]] = {}
    closed: set[str] = set()
    silent: dict[str, str] = {}
    for place, answer in _ask(backend, cluster, sorted(known), all_users, silent):
        closed.update(str(path) for path in answer["closed"])
        for row in answer["runs"]:
            key = row["name"] if _is_ours(place, row) else row["folder"]
            pieces.setdefault(key, []).append((place, row))
    found, unknown = [], []
    for parts in pieces.values():
        place, first = parts[0]
        run = _run(backend.name, store, known, [row for _, row in parts], cluster)
        if run is None:
            unknown.append(str(first["folder"]))
            continue
        told = (str(first["owner"]), str(first["folder"]), run.name in known, _is_ours(place, first), place)
        found.append(There(run, *told))
    found.sort(key=lambda there: there.run.events[0].at if there.run.events else 0.0)
    return Listed(found, sorted(closed), silent, sorted(unknown))


def _is_ours(place: Place, row: Mapping[str, Any]) -> bool:
    return str(row["folder"]).startswith(place.runs.rstrip("/") + "/")


def _run(
    kind: str, store: RunStore, known: set[str], parts: Sequence[Mapping[str, Any]], cluster: Cluster
) -> Run | None:
    """The run at home, or what would be one; None for a folder whose run.json tells of none."""
    from . import specs

    name = str(parts[0]["name"])
    if name in known:
        with contextlib.suppress(ZerunError):
            return store.load(name)
        return None
    about = next((part["about"] for part in parts if part["about"] is not None), None)
    needed = ("job", "cluster", "plan", "code")
    if about is None or any(not isinstance(about.get(key), dict) for key in needed):
        return None
    # The way to the cluster is this laptop's own: the other's key, user and ssh configuration are not here.
    about = {**about, "cluster": specs.describe(cluster), "cluster_name": cluster.name}
    return Run(store.root / name, about, _journal(kind, name, parts))


def _ask(
    backend: Backend, cluster: Cluster, known: Sequence[str], all_users: bool, silent: dict[str, str]
) -> list[tuple[Place, Mapping[str, Any]]]:
    answers = []
    for place in backend.places():
        request = {"runs": place.runs, "written": cluster.paths.runs, "all_users": all_users, "known": list(known)}
        try:
            answers.append((place, backend.call(place, "runs", request)))
        except (Unreachable, Refused) as problem:
            silent[place.transport.name] = problem.message
    return answers


def _journal(kind: str, name: str, parts: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    from .planning import job_name

    attempt = max((int(k) for part in parts for k in part["attempts"]), default=1)
    told = [part["attempts"][str(attempt)] for part in parts if str(attempt) in part["attempts"]]
    if not told:
        return ()
    first, at = told[0], min(float(part["at"]) for part in told)
    handle: Handle | None = None
    if kind == "slurm":
        job = next((part["job"] for part in told if part["job"]), None)
        known: dict[str, Any] = {"job": str(job), "name": job_name(name, attempt)}
        if first.get("inside"):
            known["inside"] = first["inside"]
        handle = Handle("slurm", known) if job else None
    else:
        agents = {node: agent for part in told for node, agent in part["agents"].items()}
        known = {"agents": agents, "name": job_name(name, attempt), "run_dir": str(parts[0]["folder"])}
        handle = Handle("direct", known) if agents else None
    intent = {key: first[key] for key in ("num_nodes", "ranks", "runtime", "resume_step")}
    events = [Event(at, "submitting", attempt, {**intent, "name": job_name(name, attempt)})]
    if handle is not None:
        events.append(Event(at, "submitted", attempt, {"handle": to_plain(handle), "adopted": True}))
    return tuple(events)


@dataclass(frozen=True)
class OnCluster:
    """``states`` beside the ``owners`` of the runs; ``taken_up`` are those that are at home from now on."""

    states: Sequence[RunState]
    owners: Sequence[str]
    taken_up: Sequence[str]
    notes: Sequence[str]


def on_cluster(backend: Backend, attempts: Attempts, listed: Listed) -> OnCluster:
    """The states of the runs that were found, of all with one look. Others' runs are looked at, and stay theirs."""
    notes = [f"{place} did not answer: {reason}" for place, reason in listed.silent.items()]
    notes += [f"{folder} is its owner's alone" for folder in listed.closed]
    notes += [f"{folder} holds no run.json that tells of a run" for folder in listed.unknown]
    ours = [there for there in listed.there if there.ours]
    taken_up = [there.run.name for there in ours if not there.at_home]
    states: dict[str, RunState] = {}
    mine = [there.run if there.at_home else take_up(attempts.store, there) for there in ours]
    known = {run.name: state for run in mine if (state := remembered(run)) is not None}
    asked = [run for run in mine if run.name not in known]
    states.update(known)
    states.update({state.run: state for state in (attempts.look(backend, asked) if asked else [])})
    told = [
        (states[there.run.name] if there.ours else _of_another(backend, there), there.owner) for there in listed.there
    ]
    return OnCluster([state for state, _ in told], [owner for _, owner in told], taken_up, notes)


def _of_another(backend: Backend, there: There) -> RunState:
    answer = backend.call(there.place, "state", {"run_dirs": [there.folder], "attempt": None})
    handle = there.run.handle
    poll = backend.poll([handle])[0] if handle is not None else Poll("absent")
    here = Place(there.place.transport, there.folder.rsplit("/", 1)[0])
    return fold(there.run, combine(there.run, poll, [(here, answer)], {}))


def take_up(store: RunStore, there: There) -> Run:
    """Makes a run that lies on a cluster one of the runs at home: its description, a journal that finds it, and the
    bytes that were shipped, which a resume needs."""
    run = store.create(there.run.name, there.run.about)
    for event in there.run.events:
        run = store.append(run, event.event, event.attempt, event.at, **dict(event.data))
    shipped = [str(event.data.get("runtime", "")) for event in run.events if event.event == "submitting"]
    names = [name for name in (*shipped, str(run.about["code"].get("name", ""))) if _BLOB.fullmatch(name)]
    lacking = [name for name in names if not (store.root / ".blobs" / name).exists()]
    with contextlib.suppress(ZerunError):  # without them all but a resume goes, and that says what it lacks
        if lacking:
            there.place.transport.fetch(lacking, f"{there.place.runs}/.blobs", store.root / ".blobs")
        for name in filter(is_listing, names):
            _fetch_contents(store, there.place, name)
    return run


def _fetch_contents(store: RunStore, place: Place, listing: str) -> None:
    sizes = read_listing(store.root / ".blobs" / listing).sizes
    files = [content(place.runs, digest) for digest in sizes if not is_content(store.root, digest)]
    base = f"{place.runs}/.blobs"
    if files:
        place.transport.fetch([str(path.relative_to(base)) for path in files], base, store.root / ".blobs")
