"""A job's token files before it is queued: are they there, on every node that will read them, and the right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contract.data_files import DataFile
from ..contract.errors import UsageError
from ..planning.data_files import wanted_files
from .look import Answer, Seen, file_here, look

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place
    from ..planning.plan import Plan
    from ..specs.models import Cluster, Job


def check(backend: Backend, job: Job, cluster: Cluster, plan: Plan, code: Path | None) -> tuple[DataFile, ...]:
    """Size and digest of every token file. ``code`` is the shipped tree's folder here, in which relative names begin
    (None, at a resume: they are what they were, and left out).

    Raises UsageError naming every file that is missing, differs between nodes, or is not what the cluster's
    description says; what the place's own error is when a node does not answer.
    """
    files = wanted_files(job.data, cluster)
    if not files:
        return ()
    paths = {file.role: file.path for file in files}
    wanted = {file.role: file.digest for file in files if file.digest is not None}
    found = {r: file_here(code / p) for r, p in paths.items() if not p.startswith("/") and code is not None}
    there = {role: path for role, path in paths.items() if path.startswith("/")}
    if there:
        algorithms = {path: wanted[r].partition(":")[0] if r in wanted else None for r, path in there.items()}
        answers, silent = look(backend, cluster, _readers(backend, plan), algorithms)
        for problem in silent.values():
            raise problem
        problems = [p for role, path in there.items() for p in _problems(role, path, answers, wanted.get(role))]
        if problems:
            named = {file.dataset for file in files if file.dataset and any(file.path in p for p in problems)}
            pushes = ", ".join(f"zerun data push {name} --cluster {cluster.name}" for name in sorted(named))
            hint = f"{pushes} copies {'it' if len(named) == 1 else 'them'} there" if named else None
            raise UsageError("\n".join(problems), hint=hint or "an absolute name is on the cluster, on every node")
        found.update({role: answers[0].files[path] for role, path in there.items()})
    _check_width(plan, found)
    return tuple(DataFile(r, paths[r], found[r].bytes, found[r].digest) for r in paths if r in found)


def check_again(
    backend: Backend, job: Job, cluster: Cluster, plan: Plan, before: Sequence[Mapping[str, Any]]
) -> tuple[DataFile, ...]:
    """:func:`check` for a resume: what the run began with is ``before`` (as kept in run.json), and must be so still."""
    now = check(backend, job, cluster, plan, None)
    refuse_changed(before, now)
    kept = tuple(DataFile(**row) for row in before if not str(row["path"]).startswith("/"))
    shipped = {file.path for file in wanted_files(job.data, cluster)}
    return (*(file for file in kept if file.path in shipped), *now)


def refuse_changed(before: Sequence[Mapping[str, Any]], now: Sequence[DataFile]) -> None:
    """Raises UsageError for a file that is no longer the one that the run began with: a sample would be another."""
    kept = {(row["role"], row["path"]): str(row["digest"]) for row in before}
    for file in now:
        digest = kept.get((file.role, file.path), file.digest)
        if digest != file.digest and digest.partition(":")[0] == file.digest.partition(":")[0]:
            raise UsageError(
                f"data.{file.role}: {file.path} is not the file that the run began with "
                f"({file.digest}, it was {digest})",
                hint="bring that one back, or submit a new run",
            )


def _readers(backend: Backend, plan: Plan) -> list[Place]:
    """The places that ranks of the plan will read from: one for all, or one a node."""
    nodes = {node.name for node in plan.nodes}
    return [place for place in backend.places() if place.node is None or place.node in nodes]


def _problems(role: str, path: str, answers: Sequence[Answer], wanted: str | None) -> list[str]:
    groups: dict[str, list[str]] = {}
    digests: dict[str, list[str]] = {}
    for answer in answers:
        seen = answer.files[path]
        name = answer.place.node or answer.place.transport.name
        if seen.problem:
            groups.setdefault(seen.problem, []).append(name)
        else:
            digests.setdefault(seen.digest, []).append(name)
    found = [f"data.{role}: {path} {problem} ({', '.join(names)})" for problem, names in groups.items()]
    wrong = {d: names for d, names in digests.items() if wanted is not None and d != wanted}
    found += [
        f"data.{role}: {path} is {digest} on {', '.join(names)}; the cluster's description says {wanted}"
        for digest, names in wrong.items()
    ]
    if not wrong and len(digests) > 1:
        told = "; ".join(f"{digest} on {', '.join(names)}" for digest, names in digests.items())
        found.append(f"data.{role}: {path} is not the same file on every node: {told}")
    return found


def _check_width(plan: Plan, found: Mapping[str, Seen]) -> None:
    config = plan.train
    if config is None:  # what a program reads is its own affair
        return
    vocab = config.gpt.vocab if config.gpt is not None else config.data.options.get("vocab", 256)
    if not isinstance(vocab, int):
        return
    width = 1 if vocab <= 2**8 else 2 if vocab <= 2**16 else 4
    for role, seen in found.items():
        if seen.bytes == 0 or seen.bytes % width:
            said = f"data.{role}: {seen.path} has {seen.bytes} bytes"
            raise UsageError(f"{said}; a vocabulary of {vocab} takes {width} for each token")
