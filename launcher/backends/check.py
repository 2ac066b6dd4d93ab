"""``zerun cluster check``: every node in parallel, what a job would meet there, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..contract.errors import Refused, ZerunError
from ..specs.pools import in_pool
from . import check_room
from .calls import Caller, side_by_side
from .check_slots import logout_warning, outlives, with_slots
from .protocol import Finding

if TYPE_CHECKING:
    from ..specs.models import Cluster, NodeEntry
    from ..transports.open import Connector
    from ..transports.protocol import Result, Transport

MODULES = ("torch", "numpy", "safetensors", "xxhash")
_CLOCK_S = 1.0
_SPACE_BYTES = 10**9


def check_direct(cluster: Cluster, connector: Connector, caller: Caller) -> Sequence[Finding]:
    entries = cluster.node_list

    def one(entry: NodeEntry) -> Finding:
        others = [e.address or e.name for e in entries if e.name != entry.name]
        at = connector.transport(entry.name)
        found = _look_at(entry.name, at, cluster, caller, (entry.slots, others))
        return with_slots(found, entry, cluster, lambda request: caller.call(at, "slots", request))

    checked = side_by_side(one, list(entries), cluster.ssh.connections)
    return [found or _unreached(entry.name, problem) for entry, found, problem in checked]


def check_slurm(cluster: Cluster, login: Transport, caller: Caller, slurm: Callable[..., Result]) -> Sequence[Finding]:
    """The login node's facts (ranks do not run there, so its cores and devices do not count), the partition's
    limits, and what ``sbatch --test-only`` says."""
    try:
        node = _look_at(f"login {login.name}", login, cluster, caller, None)
        pools = [in_pool(cluster, name) for name in cluster.pools] if cluster.pools else [cluster]
        return [node, *(finding for one in pools for finding in (_partition(one, slurm), _test_only(one, slurm)))]
    except ZerunError as problem:
        return [_unreached(f"login {login.name}", problem)]


def _unreached(name: str, problem: ZerunError | None) -> Finding:
    assert problem is not None
    facts = {"reached": False, "host_key": "refused" if isinstance(problem, Refused) else None}
    told = [problem.message, *([problem.hint] if problem.hint else [])]
    return Finding(name, ok=False, facts=facts, problems=tuple(told))


def _look_at(
    name: str, at: Transport, cluster: Cluster, caller: Caller, ranks: tuple[int, Sequence[str]] | None
) -> Finding:
    runs = caller.ready(at)
    request = {
        # What ranks import lies in the container; out here only the agent runs.
        "python": cluster.python if cluster.container is None else cluster.agent_python,
        "modules": list(MODULES) if cluster.container is None else [],
        "resolve": list(ranks[1]) if ranks else [],
        "path": runs,
        "setup": cluster.setup,
    }
    before = time.time()
    said = caller.call(at, "probe", request, timeout_s=60.0)
    # As NTP does it: what the other side spent between its two readings makes the offset no less certain.
    ahead, behind = said["began"] - before, said["now"] - time.time()
    offset_s, error_s = (ahead + behind) / 2, (ahead - behind) / 2
    facts: dict[str, Any] = {
        "reached": True,
        "python": said.get("python"),
        "torch": (said.get("modules") or {}).get("torch"),
        "cores": said["cores"],
        "gpus": said["gpus"],
        "free_bytes": said["free_bytes"],
        "runs": runs,
        "clock_offset_s": offset_s,
        "outlives_logout": outlives(said["outlives"]) if ranks else None,
    }
    left = caller.call(at, "left", {"paths": check_room.paths_of(cluster, runs)})
    facts.update(check_room.facts_of(left))
    facts["free_bytes"] = left["runs"].get("free_bytes", said["free_bytes"])
    grave = [*_grave(said, cluster, ranks[0] if ranks else None), *check_room.problems_of(left)]
    if abs(offset_s) > _CLOCK_S + error_s:
        grave.append(f"its clock is {offset_s:+.1f} s off this machine's: merged logs allow for it, its files do not")
    if said["unresolved"]:
        grave.append(f"it does not know the names of {', '.join(said['unresolved'])}: give those nodes an address")
    warnings = []
    if ranks and cluster.device.kind == "cpu" and ranks[0] > said["cores"]:
        facts["slots"] = ranks[0]
        warnings.append(f"{ranks[0]} slots on {said['cores']} cores: ranks will wait for each other")
    warnings += logout_warning(said["outlives"]) if ranks else []
    return Finding(name, ok=not grave, facts=facts, problems=(*grave, *warnings))


def _grave(said: Mapping[str, Any], cluster: Cluster, slots: int | None) -> list[str]:
    found: list[str] = []
    if said["python_problem"]:
        found.append(f"{said['python_problem']}\n`python:` names the ranks' Python; `setup:` makes it be found")
    elif said["missing"]:
        executable = said["executable"]
        found.append(
            f"missing: {', '.join(said['missing'])}\n{executable} -m pip install {' '.join(said['missing'])}\n"
            "or another Python: `python:` names the ranks' Python; `setup:` makes it be found"
        )
    if not said["writable"]:
        found.append("paths.runs can be neither written nor made")
    free = said["free_bytes"]
    if free is not None and free < _SPACE_BYTES:
        found.append(f"only {free / 1e6:.0f} MB are free where runs lie")
    if cluster.device.kind == "gpu" and slots is not None:
        if said["gpus"] is None:
            found.append("device.kind is gpu, and there is no nvidia-smi")
        elif len(said["gpus"]) < slots:
            found.append(f"{slots} slots, and nvidia-smi shows {len(said['gpus'])} GPUs")
    return found


def _partition(cluster: Cluster, slurm: Callable[..., Result]) -> Finding:
    name = cluster.slurm.partition
    done = slurm("scontrol", "-o", "show", "partition", *([name] if name else []))
    text = done.stdout.decode("utf-8", "replace")
    rows = [dict(w.split("=", 1) for w in line.split() if "=" in w) for line in text.splitlines() if line.strip()]
    row = next((r for r in rows if name or r.get("Default") == "YES"), None)
    title = f"{_of_pool(cluster)}partition {name or (row or {}).get('PartitionName', '(default)')}"
    if done.returncode or row is None:
        nothing = f"Slurm knows no partition {name!r}; sinfo names them" if name else "Slurm has no default partition"
        said = done.stderr.decode("utf-8", "replace").strip() or nothing
        return Finding(title, ok=False, problems=(said,))
    facts = {
        "state": row.get("State"),
        "nodes": row.get("TotalNodes"),
        "cpus": row.get("TotalCPUs"),
        "time_max": row.get("MaxTime"),
        "nodes_max": row.get("MaxNodes"),
        "memory_max": row.get("MaxMemPerNode"),
    }
    problems = [] if row.get("State") == "UP" else [f"it is {row.get('State')}: jobs wait until it is opened"]
    return Finding(title, ok=not problems, facts=facts, problems=tuple(problems))


def _of_pool(cluster: Cluster) -> str:
    return f"pool {cluster.pool}: " if cluster.pools else ""


def _test_only(cluster: Cluster, slurm: Callable[..., Result]) -> Finding:
    """What Slurm would do with a job on one node with everything that the description asks for."""
    said = cluster.slurm
    slots = cluster.slots or 1
    words = ["sbatch", "--test-only", "--nodes=1", "--ntasks-per-node=1", "--time=1"]
    for option in ("partition", "account", "qos", "constraint", "reservation"):
        value = getattr(said, option)
        words += [f"--{option}={value}"] if value is not None else []
    if cluster.cpus_per_slot is not None:
        words.append(f"--cpus-per-task={cluster.cpus_per_slot * slots}")
    if cluster.memory_per_slot is not None:
        words.append(f"--mem={cluster.memory_per_slot * slots // 2**20}M")
    if said.gpus_by != "none":
        gpu = f"{said.gpu_type}:{slots}" if said.gpu_type else str(slots)
        words.append(f"--gres=gpu:{gpu}" if said.gpus_by == "gres" else f"--gpus-per-node={gpu}")
    words += ["--exclusive"] if said.exclusive else []
    words += [f"--{name}" + ("" if value is None else f"={value}") for name, value in said.extra.items()]
    done = slurm(*words, "--wrap=true")
    lines = [line.replace("sbatch: ", "") for line in done.stderr.decode("utf-8", "replace").splitlines() if line]
    title = f"{_of_pool(cluster)}sbatch --test-only"
    if done.returncode:
        return Finding(title, ok=False, problems=("; ".join(lines) or "sbatch failed",))
    return Finding(title, ok=True, facts={"says": lines[-1] if lines else "nothing"})
