"""Shards, or ranges of them, from node to node: only what cannot go that way passes this machine.

The nodes that have them serve (agent verb ``serve``) for as long as this machine listens, the nodes that lack them
pull, prove every block, and put all in place at once or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..contract.errors import NoSpace, Refused, Unreachable, ZerunError
from ..contract.launch import LaunchSpec
from ..contract.plain import to_plain
from .moving import assign, in_parallel, name_of, raise_worst, run_dir
from .needed import Wanted, told

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

_LONGEST_S = 7 * 86400.0  # a node that is silent is noticed by those who pull


@dataclass
class Route:
    """What one node is to pull, from which others (by their index among the holders)."""

    place: Place
    wanted: dict[int, list[Wanted]] = field(default_factory=dict)

    def sentence(self, holders: Sequence[Place]) -> str:
        target = name_of(self.place)
        return "; ".join(f"{told(w)} {name_of(holders[index])} → {target}" for index, w in self.wanted.items())


def routes(
    wanted: Sequence[tuple[Place, Sequence[Wanted]]], holders: Sequence[tuple[Place, Mapping[str, int]]]
) -> list[Route]:
    """Who pulls what from whom. Only nodes that can have all they lack from others are among them."""
    found = []
    for place, lacks in wanted:
        others = [(p, {} if p is place else files) for p, files in holders]
        taken, nowhere = assign([w.shard for w in lacks], others)
        if lacks and not nowhere:
            by_rank = {w.shard.rank: w for w in lacks}
            found.append(Route(place, {i: [by_rank[s.rank] for s in shards] for i, shards in taken.items()}))
    return found


def move(
    backend: Backend,
    run: str,
    step: int,
    planned: Sequence[Route],
    holders: Sequence[Place],
    launch: LaunchSpec,
    notice: Callable[[str], None],
) -> list[Route]:
    """Moves along ``planned``; returns what did not go through, of which nothing was put in place.

    Raises NoSpace and Refused; that nodes do not reach each other, or cannot prove what arrives, is told by ``notice``.
    """
    notice(f"step {step}, from node to node: " + "; ".join(route.sentence(holders) for route in planned))
    with ExitStack() as open_streams:
        serving = {i: serve(backend, run, holders[i], launch, open_streams) for i in _sources(planned)}

        def one(route: Route) -> None:
            sources = []
            for index, wanted in route.wanted.items():
                said = serving[index]
                if isinstance(said, ZerunError):
                    raise said
                whole = [to_plain(w.shard) for w in wanted if not w.ranges]
                ranges = [{"shard": to_plain(w.shard), "ranges": w.ranges} for w in wanted if w.ranges]
                sources.append({**said, "shards": whole, "ranges": ranges})
            request = {
                "run_dir": run_dir(route.place, run),
                "step": step,
                "token": launch.token,
                "python": launch.python,
                "sources": sources,
            }
            backend.call(route.place, "pull", request, timeout_s=_LONGEST_S)

        done = in_parallel(one, planned)
    problems = [f for f in done if isinstance(f, ZerunError)]
    raise_worst(p for p in problems if isinstance(p, (NoSpace, Refused)))
    left = [route for route, came in zip(planned, done, strict=True) if isinstance(came, ZerunError)]
    for route, problem in zip(left, problems, strict=True):
        notice(f"step {step}: not from node to node to {name_of(route.place)}: {problem.message}")
    return left


def _sources(planned: Sequence[Route]) -> list[int]:
    return sorted({index for route in planned for index in route.wanted})


def serve(
    backend: Backend, run: str, place: Place, launch: LaunchSpec, open_streams: ExitStack, *, own: bool = False
) -> dict[str, Any] | ZerunError:
    """Where that node serves, for as long as ``open_streams`` is; or why it does not. ``own``: files of the job's own
    instead of shards."""
    entry = next((node for node in launch.nodes if node.name == place.node), None)
    request = {
        "run_dir": run_dir(place, run),
        "token": launch.token,
        "node": place.node or "",
        "address": entry.address if entry is not None else "",
        "others": [node.address or node.name for node in launch.nodes if node.name != place.node],
        "ports": list(launch.ports) if launch.ports else None,
        "python": launch.python,
        "own": own,
    }
    try:
        stream = open_streams.enter_context(backend.serve(place, request))
        data = b""
        for chunk in stream:
            data += chunk
            if b"\n" in data:
                break
        said = json.loads(data.split(b"\n")[0] or b"null")
    except ValueError:
        said = None
    except ZerunError as problem:
        return problem
    if not isinstance(said, dict) or "port" not in said:
        return Unreachable(f"{name_of(place)} does not serve: {(said or {}).get('error', 'it said nothing')}")
    return {"addresses": said["addresses"], "port": said["port"]}
