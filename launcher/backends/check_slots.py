"""What ``cluster check`` says of a node without a scheduler: who holds its slots, and what ends with a logout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..contract.errors import Refused
from ..contract.launch import Node
from . import free
from .protocol import Finding

if TYPE_CHECKING:
    from ..specs.models import Cluster, NodeEntry


def with_slots(
    found: Finding, entry: NodeEntry, cluster: Cluster, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Finding:
    """``found`` with the fact ``leased`` (slots and their holder); strangers on devices are problems."""
    if not cluster.leases:
        return found
    node = Node(entry.name, entry.slots, among=entry.devices or tuple(range(entry.slots)))
    try:
        said = ask(free.request(node, cluster.device_of(entry.name).kind))
    except Refused as problem:  # the folder of the leases is not as it has to be: every submit would meet it
        told = problem.message + (f"\n{problem.hint}" if problem.hint else "")
        return dataclasses.replace(found, ok=False, problems=(told, *found.problems))
    by: dict[str, list[str]] = {}
    for held in said["held"]:
        by.setdefault(str(held["by"]), []).append(str(held["slot"]))
    leased = [f"{','.join(slots)} by {holder}" for holder, slots in by.items()]
    strangers = [
        f"GPU {s['device']} in use by pid {s['pid']} of {s['user']} ({s['program']}), which has no lease"
        for s in said["strangers"]
    ]
    return dataclasses.replace(
        found,
        ok=found.ok and not strangers,
        facts={**found.facts, "leased": leased},
        problems=(*strangers, *found.problems),
    )


def outlives(said: Mapping[str, Any]) -> str:
    """What keeps an agent alive after its user has logged out."""
    return "a scope of the user's systemd (lingering is on)" if said["by"] == "scope" else "setsid"


def logout_warning(said: Mapping[str, Any]) -> list[str]:
    if said["by"] == "scope" or not said["ended_at_logout"]:
        return []
    why = "systemd-run --user does not work here" if said["lingers"] else f"once: loginctl enable-linger {said['user']}"
    return [f"logind ends what a user leaves behind (KillUserProcesses=yes): runs would end at logout\n{why}"]
