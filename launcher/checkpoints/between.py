"""Shards from node to node, where nodes reach each other: only what cannot go that way passes this machine.

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
from ..contract.manifest import ShardFile
from ..contract.plain import to_plain
from .moving import assign, in_parallel, name_of, raise_worst, run_dir, size, total

if TYPE_CHECKING:
    from ..backends.protocol import Backend, Place

_LONGEST_S = 7 * 86400.0  # a node that is silent is noticed by those who pull


@dataclass
class Route:
    """What one node is to pull, from which others (by their index among the holders)."""

    place: Place
    shards: dict[int, list[ShardFile]] = field(default_factory=dict)

    def sentence(self, holders: Sequence[Place]) -> str:
        told = []
        for index, shards in self.shards.items():
            number = f"{len(shards)} shard{'' if len(shards) == 1 else 's'}"
            told.append(f"{number} ({size(total(shards))}) {name_of(holders[index])} → {name_of(self.place)}")
        return "; ".join(told)


def routes(
    wanted: Sequence[tuple[Place, Sequence[ShardFile]]], holders: Sequence[tuple[Place, Mapping[str, int]]]
) -> list[Route]:
    """Who pulls what from whom. Only nodes that can have all they lack from others are among them."""
    found = []
    for place, lacks in wanted:
        others = [(p, {} if p is place else files) for p, files in holders]
        taken, nowhere = assign(lacks, others)
        if lacks and not nowhere:
            found.append(Route(place, taken))
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
        serving = {i: _serve(backend, run, holders[i], launch, open_streams) for i in _sources(planned)}

        def one(route: Route) -> None:
            sources = []
            for index, shards in route.shards.items():
                said = serving[index]
                if isinstance(said, ZerunError):
                    raise said
                sources.append({**said, "shards": [to_plain(shard) for shard in shards]})
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
    return sorted({index for route in planned for index in route.shards})


def _serve(
    backend: Backend, run: str, place: Place, launch: LaunchSpec, open_streams: ExitStack
) -> dict[str, Any] | ZerunError:
    """Where that node serves, for as long as ``open_streams`` is; or why it does not."""
    entry = next((node for node in launch.nodes if node.name == place.node), None)
    request = {
        "run_dir": run_dir(place, run),
        "token": launch.token,
        "node": place.node or "",
        "address": entry.address if entry is not None else "",
        "others": [node.address or node.name for node in launch.nodes if node.name != place.node],
        "ports": list(launch.ports) if launch.ports else None,
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
