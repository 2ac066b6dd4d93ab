"""Whether nodes without a scheduler reach each other: each opens a port, each tries all the others."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..contract.errors import ZerunError
from .calls import Caller, side_by_side

if TYPE_CHECKING:
    from ..specs.models import Cluster, NodeEntry
    from ..transports.protocol import Transport

_LIMIT_S = 120.0


def pairs(
    cluster: Cluster, run: str, entries: Sequence[NodeEntry], at: Callable[[str], Transport], caller: Caller
) -> list[dict[str, Any]]:
    """A mapping a node, as agent.reach writes it on its board: ``node``, ``failed``, ``absent``, ``problem``."""
    token = secrets.token_hex(16)
    network = cluster.network
    common = {
        "run": run,
        "token": token,
        "nodes": [[e.name, e.address or ""] for e in entries],
        "interface": network.interface,
        "ports": network.ports,
        "limit_s": _LIMIT_S,
    }
    with ExitStack() as doors:

        def open_door(entry: NodeEntry) -> dict[str, Any]:
            request = {**common, "node": entry.name, "address": entry.address or ""}
            transport = at(entry.name)
            stream = transport.stream(caller.argv(transport, "listen"), stdin=json.dumps(request).encode())
            doors.callback(stream.close)
            return _first_line(transport.name, stream)

        opened = side_by_side(open_door, list(entries), cluster.ssh.connections)
        targets = [about for _, about, _ in opened if about is not None]

        def try_others(entry: NodeEntry) -> Mapping[str, Any]:
            request = {"token": token, "targets": [t for t in targets if t["node"] != entry.name]}
            return caller.call(at(entry.name), "reach", request, timeout_s=_LIMIT_S)

        tried = side_by_side(try_others, list(entries), cluster.ssh.connections)
    found = []
    for (entry, about, closed), (_, answer, silent) in zip(opened, tried, strict=True):
        problem = closed or silent
        found.append(
            {
                "node": entry.name,
                "failed": list(answer["failed"]) if answer is not None else [],
                "absent": [],
                "problem": problem.message if problem is not None else None,
                "doors": len(targets),
                "address": about["address"] if about is not None else None,
            }
        )
    return found


def _first_line(name: str, stream: Iterable[bytes]) -> dict[str, Any]:
    said = b""
    for chunk in stream:
        said += chunk
        if b"\n" in said:
            break
    try:
        about = json.loads(said.partition(b"\n")[0])
    except ValueError:
        about = {"error": said.decode("utf-8", "replace")[-200:]}
    if "error" in about:
        raise ZerunError(f"{name}: {about['error']}", hint=about.get("hint"))
    return dict(about)
