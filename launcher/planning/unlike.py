"""Nodes that are not alike: a job on them is planned by the smallest device, because every rank owns an equal share."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.launch import Node
from ..specs.models import Cluster, Device
from .devices import device_bytes
from .memory import readable
from .reasons import Reason


def on_nodes(cluster: Cluster, nodes: Sequence[Node]) -> tuple[Cluster, list[Reason]]:
    """``cluster`` with the one device that stands for those of ``nodes``: of everything the least."""
    kinds = {cluster.device_of(node.name).kind: node.name for node in nodes}
    if len(kinds) > 1:
        told = ", ".join(f"{name} has a {kind}" for kind, name in kinds.items())
        return cluster, [Reason("device", f"ranks of one job compute on one kind of device: {told}")]
    devices = list(dict.fromkeys(cluster.device_of(node.name) for node in nodes))
    if devices == [cluster.device]:
        return cluster, []
    return cluster.model_copy(update={"device": _least(cluster, devices)}), []


def remarks(cluster: Cluster, nodes: Sequence[Node]) -> tuple[str, ...]:
    """What a person should know of ``nodes`` that are not alike; a line each."""
    told = []
    groups: dict[Device, list[str]] = {}
    for node in nodes:
        groups.setdefault(cluster.device_of(node.name), []).append(node.name)
    if len(groups) > 1:
        least = _least(cluster, list(groups))
        has = "; ".join(f"{_called(cluster, device)} on {' '.join(names[:4])}" for device, names in groups.items())
        told.append(f"unlike devices ({has}): planned by the smallest, {_size(_bytes(cluster, least))} a rank")
    slots = sorted({node.slots for node in nodes})
    if len(slots) > 1:
        told.append(
            f"unequal slots: {slots[0]} to {slots[-1]} ranks a node; every rank owns an equal share all the same"
        )
    return tuple(told)


def _least(cluster: Cluster, devices: Sequence[Device]) -> Device:
    """Memory of the smallest (unknown where one is), the slowest peak of each precision, what all compute in."""
    if len(devices) == 1:
        return devices[0]
    sizes = [_bytes(cluster, device) for device in devices]
    smallest = devices[sizes.index(min(s for s in sizes if s is not None))] if None not in sizes else None
    listed = [set(device.precisions) for device in devices if device.precisions is not None]
    common = set.intersection(*listed) if listed else None
    peaks = {p: min(d.peak_flops.get(p, 0) for d in devices) for p in devices[0].peak_flops}
    return devices[0].model_copy(
        update={
            "model": ", ".join(dict.fromkeys(d.model for d in devices if d.model)) or None,
            "memory": smallest.memory if smallest else None,
            "reserve": smallest.reserve if smallest else 0,
            "peak_flops": {precision: peak for precision, peak in peaks.items() if peak},
            "precisions": None if common is None else tuple(p for p in ("fp32", "bf16", "fp16") if p in common),
        }
    )


def _bytes(cluster: Cluster, device: Device) -> int | None:
    return device_bytes(cluster.model_copy(update={"device": device}))


def _called(cluster: Cluster, device: Device) -> str:
    return device.model or f"{device.kind} {_size(_bytes(cluster, device))}"


def _size(count: int | None) -> str:
    return "of unknown memory" if count is None else readable(count)
