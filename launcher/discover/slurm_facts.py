"""What Slurm tells of a cluster: ``scontrol show config`` and ``show partition``, ``sinfo``, ``sacctmgr``, parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SINFO_FIELDS = "%P\x1f%N\x1f%c\x1f%m\x1f%G\x1f%f\x1f%T"
_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_:/]*)=")
_GPU = re.compile(r"gpu(?::(?P<type>[^:(,=]+(?=:)))?:(?P<count>\d+)")
_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "UNLIMITED", "INFINITE", "ALL"})


def key_values(line: str) -> dict[str, str]:
    """One ``scontrol -o`` line. Keys begin with a capital; a value goes on to the next key, blanks and ``=`` included
    (``TRES=cpu=64,mem=8G``, ``Reason=Not responding``)."""
    found = list(_KEY.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=True)}


def config_of(text: str) -> dict[str, str]:
    """``scontrol show config``: ``Key   = value`` lines."""
    pairs = (line.partition("=") for line in text.splitlines() if " = " in line or line.rstrip().endswith("="))
    return {key.strip(): value.strip() for key, _, value in pairs}


def said(value: str | None) -> str | None:
    """A value, or None for Slurm's many words for none."""
    return None if value is None or value in _NOTHING else value


def number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None


def gpus_of(gres: str) -> tuple[int, str | None]:
    """How many GPUs a node's gres has, and their type: ``gpu:a100:4(S:0-1)``, ``gpu:2``. Of several types the first."""
    match = _GPU.search(gres)
    return (int(match["count"]), match["type"]) if match else (0, None)


def seconds_of(text: str | None) -> int | None:
    """Slurm's printed time ``D-HH:MM:SS``; None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text or "")
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True)
class Kind:
    """Nodes that are alike: memory in MiB."""

    cpus: int
    memory_mib: int
    gpus: int
    gpu_type: str | None
    features: str


@dataclass(frozen=True)
class Facts:
    """``partitions`` in Slurm's order, the default one first; ``kinds`` the nodes of each, by what they are;
    ``accounts`` of this user, the default one first (empty where accounting does not say)."""

    config: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    kinds: Mapping[str, Mapping[Kind, tuple[str, ...]]]
    accounts: tuple[str, ...]

    def preemption(self, partition: str) -> str | None:
        """How Slurm takes nodes away from jobs of ``partition`` (REQUEUE, CANCEL, …); None when it does not.

        By partitions' priority: another one that shares a node stands above it. By qos: whenever a mode is set.
        """
        own = self.partitions[partition]
        cluster_wide = self.config.get("PreemptMode", "OFF").split(",")[0]
        mode = said(own.get("PreemptMode")) or cluster_wide
        mode = cluster_wide if mode == "CLUSTER" else mode.split(",")[0]
        if mode in ("OFF", "GANG") or self.config.get("PreemptType", "").endswith("none"):
            return None
        if self.config.get("PreemptType", "").endswith("qos"):
            return mode
        tier = number(own.get("PriorityTier")) or 0
        nodes = {name for names in self.kinds.get(partition, {}).values() for name in names}
        for name, other in self.partitions.items():
            shares = nodes & {n for names in self.kinds.get(name, {}).values() for n in names}
            if shares and (number(other.get("PriorityTier")) or 0) > tier:
                return mode
        return None


def partitions_of(text: str) -> dict[str, dict[str, str]]:
    """``scontrol -o show partition``, the default partition first."""
    rows = [key_values(line) for line in text.splitlines() if "PartitionName=" in line]
    rows.sort(key=lambda row: row.get("Default") != "YES")  # stable
    return {row["PartitionName"]: row for row in rows}


def kinds_of(sinfo: str) -> dict[str, dict[Kind, tuple[str, ...]]]:
    """``sinfo -h -N -o SINFO_FIELDS``: partition → kind of node → its nodes, the most frequent kind first."""
    found: dict[str, dict[Kind, list[str]]] = {}
    for line in sinfo.splitlines():
        fields = [field.strip() for field in line.split("\x1f")]
        if len(fields) != 7:
            continue
        gpus, gpu_type = gpus_of(fields[4])
        features = "" if fields[5] in _NOTHING else fields[5]
        kind = Kind(int(fields[2].rstrip("+")), int(fields[3].rstrip("+")), gpus, gpu_type, features)
        found.setdefault(fields[0].rstrip("*"), {}).setdefault(kind, []).append(fields[1])
    return {
        partition: {
            kind: tuple(dict.fromkeys(names)) for kind, names in sorted(kinds.items(), key=lambda k: -len(k[1]))
        }
        for partition, kinds in found.items()
    }


def accounts_of(assoc: str, user: str) -> tuple[str, ...]:
    """``sacctmgr -nP show user NAME withassoc format=defaultaccount,account``: this user's accounts."""
    rows = [line.split("|") for line in assoc.splitlines() if line.count("|") == 1]
    default = next((row[0] for row in rows if row[0]), None)
    named = [row[1] for row in rows if row[1]]
    return tuple(dict.fromkeys([*([default] if default in named and default else []), *named]))
