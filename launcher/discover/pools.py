"""Slurm's partitions and nodes → ``pools:``, a pool for each kind of node of each partition."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs import nodelist
from ..specs.units import slurm_clock
from .slurm_facts import Facts, Kind, number, said, seconds_of
from .text import entry, to_fill

_LIMITS = ("AllowGroups", "AllowAccounts", "AllowQos", "DenyAccounts", "DenyQos")


def slurm_lines(facts: Facts) -> list[str]:
    """``slurm:`` of the whole cluster."""
    lines = []
    if facts.accounts:
        others = f"yours: {', '.join(facts.accounts)}" if len(facts.accounts) > 1 else "the one that you have"
        lines.append(entry("account", facts.accounts[0], others, indent=2))
    elif "associations" in facts.config.get("AccountingStorageEnforce", "").lower():
        lines.append(to_fill("account: jobs need one here, and Slurm's accounting told of none of yours", indent=2))
    if any(kind.gpus for kinds in facts.kinds.values() for kind in kinds):
        lines.append(entry("gpus_by", "gres", "GPUs are a gres here; gpus-per-node works too with cons_tres", indent=2))
    return ["slurm:", *lines] if lines else []


def pools_lines(facts: Facts) -> list[str]:
    """``pools:``. The default partition comes first, so that a job which names no pool gets it."""
    lines: list[str] = []
    skipped: list[str] = []
    taken: set[str] = set()
    for name, row in facts.partitions.items():
        if row.get("State") != "UP":
            skipped.append(f"  # partition {name} is {row.get('State', 'not up')}: no pool is made of it")
            continue
        kinds = facts.kinds.get(name, {})
        if not kinds:
            skipped.append(f"  # partition {name} has no nodes: no pool is made of it")
        for kind, nodes in kinds.items():
            pool = _name(name, kind, len(kinds), taken)
            lines += _pool(pool, facts, name, kind, nodes)
    return ["pools:", *lines, *skipped]


def _name(partition: str, kind: Kind, num_kinds: int, taken: set[str]) -> str:
    wanted = partition if num_kinds == 1 else f"{partition}-{kind.gpu_type or f'{kind.gpus or kind.cpus}'}"
    wanted = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in wanted)
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}-{count}"
    taken.add(name)
    return name


def _pool(pool: str, facts: Facts, partition: str, kind: Kind, nodes: Sequence[str]) -> list[str]:
    row, slots = facts.partitions[partition], kind.gpus or 1
    lines = [f"  {pool}:"]
    default = "the default partition" if row.get("Default") == "YES" else ""
    lines.append(entry("partition", partition, default, indent=4))
    lines += [f"    # {key}: {row[key]}" for key in _LIMITS if said(row.get(key))]
    if said(row.get("QoS")):
        lines.append(f"    # its own limits are those of qos {row['QoS']}")
    if kind.features:
        lines.append(f"    # features, for constraint: {kind.features}")
    lines.append(entry("nodes", nodelist.fold(nodes), f"{len(nodes)} with {kind.cpus} CPUs each", indent=4))
    most = number(row.get("MaxNodes"))
    if most is not None and most < len(nodes):
        lines.append(f"    # MaxNodes: a job gets at most {most} of them")
    lines += _gpu_lines(kind, facts)
    what = "one a GPU" if kind.gpus else "no GPUs: as many ranks a node as you want"
    lines.append(entry("slots", slots, what, indent=4))
    lines.append(entry("cpus_per_slot", max(1, kind.cpus // slots), f"of {kind.cpus} a node", indent=4))
    lines.append(_memory(facts, partition, kind, slots))
    limit = seconds_of(row.get("MaxTime"))
    if limit is not None:
        usual = row.get("DefaultTime", "NONE")
        told = f"a job that says no time gets {usual}" if said(usual) else ""
        lines.append(entry("time_max", slurm_clock(limit), told, indent=4))
    else:
        lines.append("    # MaxTime: no limit")
    mode = facts.preemption(partition)
    if mode is not None:
        again = "is queued again by itself" if mode == "REQUEUE" else f"is ended ({mode}): zerun resume goes on"
        lines.append(entry("preemptible", True, f"a job whose nodes are taken away {again}", indent=4))
    return [*lines, *_device(kind)]


def _gpu_lines(kind: Kind, facts: Facts) -> list[str]:
    if not kind.gpus:
        gpus_elsewhere = any(other.gpus for kinds in facts.kinds.values() for other in kinds)
        return [entry("gpus_by", "none", indent=4)] if gpus_elsewhere else []
    return [entry("gpu_type", kind.gpu_type, indent=4)] if kind.gpu_type else []


def _memory(facts: Facts, partition: str, kind: Kind, slots: int) -> str:
    """All of a node's memory that a job may have. In MiB, as Slurm counts."""
    row = facts.partitions[partition]
    most, whole = kind.memory_mib, "of all that a node has"
    per_node = number(row.get("MaxMemPerNode")) or number(facts.config.get("MaxMemPerNode"))
    per_cpu = number(row.get("MaxMemPerCPU")) or number(facts.config.get("MaxMemPerCPU"))
    for limit, key in ((per_node, "MaxMemPerNode"), (per_cpu and per_cpu * kind.cpus, "MaxMemPerCPU")):
        if limit and limit < most:
            most, whole = limit, f"{key} allows no more"
    default = number(row.get("DefMemPerCPU")) or number(facts.config.get("DefMemPerCPU"))
    usual = f"; left out: {default} MiB a CPU" if default else ""
    return entry("memory_per_slot", f"{most // slots}MiB", f"{whole}{usual}", indent=4)


def _device(kind: Kind) -> list[str]:
    if not kind.gpus:
        return []
    fill = "model, memory (81920MiB), reserve, peak_flops: without memory no plan can say that it fits"
    ask = "# srun … nvidia-smi --query-gpu=name,memory.total --format=csv says the first two"
    return ["    device:", "      kind: gpu", to_fill(fill, indent=6), f"      {ask}"]
