"""A job's ``weights:`` before it is queued: are they there, on every node, and (of the reference model) the right ones.

A model of one's own is only known where torch is: its names and shapes are checked by the ranks, before step 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract.errors import UsageError
from ..contract.partition import gpt_parameters
from ..contract.weights import Stored, misfits, read_weights

if TYPE_CHECKING:
    from ..backends.protocol import Backend
    from ..bundles import CodeBundle
    from ..planning.plan import Plan

MOST_TOLD = 20


def check_weights(backend: Backend, plan: Plan, code: CodeBundle) -> list[str]:
    """What will be begun with, in a line; none where the job names no weights. ``code`` is what is shipped.

    Raises UsageError naming the node, the file, and every name and shape that does not fit.
    """
    path = plan.train.weights if plan.train is not None else None
    if path is None:
        return []
    if not path.startswith("/"):
        found = read_weights(Path(code.root) / path)
        lacking = sorted({s.file for s in found.values() if not code.holds(str(s.file.relative_to(code.root)))})
        if lacking:
            raise UsageError(
                f"model.weights: {lacking[0]} is not in the code that is shipped from {code.root}",
                hint="git or .zerunignore leaves it out; a large file is copied to the cluster, and named absolutely",
            )
        _must_fit(plan, path, found)
        return [_told(path, found)]
    nodes = {node.name for node in plan.nodes}
    found = {}
    for place in backend.places():
        if place.node is not None and place.node not in nodes:
            continue
        try:
            answer = backend.call(place, "weights", {"path": path})
        except UsageError as problem:
            raise UsageError(f"model.weights: {problem.message}", hint=problem.hint) from None
        found = {
            name: Stored(name, str(tag), tuple(shape), Path(file), 0, 0)
            for name, (tag, shape, file) in answer["tensors"].items()
        }
        _must_fit(plan, f"{path} on {place.transport.name}", found)
    return [_told(path, found)]


def _must_fit(plan: Plan, where: str, found: Mapping[str, Stored]) -> None:
    gpt = plan.train.gpt if plan.train is not None else None
    if gpt is None:
        return
    units = gpt_parameters(gpt.layers, gpt.hidden, gpt.seq_len, gpt.vocab)
    wrong = misfits([p for _, row in units for p in row], {}, found)
    if wrong:
        told = "\n".join(f"  {w.sentence()}" for w in wrong[:MOST_TOLD])
        more = f"\n  … and {len(wrong) - MOST_TOLD} more" if len(wrong) > MOST_TOLD else ""
        raise UsageError(
            f"model.weights: {where} are not this model's:\n{told}{more}", hint="model: and weights: differ"
        )


def _told(path: str, found: Mapping[str, Stored]) -> str:
    return f"weights: {len(found)} tensors in {path}"
