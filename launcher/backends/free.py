"""Whether nodes without a scheduler have the slots that a job takes, and waiting until they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.errors import Busy
from ..contract.launch import Node
from .calls import first_error, side_by_side

if TYPE_CHECKING:
    from .protocol import Backend

_AT_ONCE = 32
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0


def request(node: Node, device_kind: str) -> dict[str, Any]:
    """The request of the agent's verb ``slots``."""
    return {"node": node.name, "among": list(node.among or ()), "count": node.slots, "gpu": device_kind == "gpu"}


def busy(ask: Callable[[Node], Mapping[str, Any]], nodes: Sequence[Node]) -> Busy | None:
    """What stands in the way on all ``nodes``, a line a node; None when nothing does."""
    asked = side_by_side(ask, [node for node in nodes if node.among is not None], _AT_ONCE)
    problem = first_error(asked)
    if problem is not None:
        raise problem
    refusals = [answer for _, answer, _ in asked if answer is not None and answer["refusal"]]
    if not refusals:
        return None
    return Busy("\n".join(str(a["refusal"]) for a in refusals), hint=str(refusals[0]["hint"]))


def wait(
    backend: Backend,
    nodes: Sequence[Node],
    device_kind: str,
    limit_s: float | None,
    notice: Callable[[str], None],
) -> None:
    """Returns once the nodes' slots are free. ``limit_s``: 0 refuses at once, None waits for ever.

    Raises Busy. Nothing is kept in the meantime: whoever asks first when they are free gets them.
    """
    end = None if limit_s is None else time.monotonic() + limit_s
    pause, told = _PAUSE_S, ""
    while True:
        problem = backend.busy(nodes, device_kind)
        if problem is None:
            return
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            if limit_s:
                problem.message += f"\nthey were not free within {limit_s:g} s"
            raise problem
        if problem.message != told:
            told = problem.message
            notice(f"waiting for {told}")
        time.sleep(pause if left is None else min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE_S)
