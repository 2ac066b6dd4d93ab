"""Pools: kinds of nodes that one cluster has, each with its partition, its device and its limits.

A job names one (``pool: a100``). What a pool leaves out comes from the pool that it is ``like``, then from
``slurm:``; specs.pools makes the cluster that a job in the pool sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from ..contract.folder import is_safe_name
from . import values
from .device_model import Device
from .mistakes import Mistake, did_you_mean, wrong
from .slurm_model import SLURM_KEYS, Slurm, SlurmOptions
from .values import FREEZE, MAPPING, Bytes, Count, Flag, Slots, Word

NODE_KEYS = ("slots", "cpus_per_slot", "memory_per_slot", "time_max")


class Pool(SlurmOptions):
    """Left out: what the pool that it is ``like`` says, then what ``slurm`` says."""

    like: Word | None = None
    nodes: values.NodeList | None = None
    slots: Slots | None = None
    cpus_per_slot: Count | None = None
    memory_per_slot: Bytes | None = None
    time_max: values.SlurmTime | None = None
    device: Device = Device()
    preemptible: Flag = False


def _named(pools: dict[str, Pool]) -> dict[str, Pool]:
    if not pools:
        raise wrong("pools are empty; write one, or slurm:, nodes: and device: at the top level")
    return pools


Pools = Annotated[dict[str, Pool], MAPPING, AfterValidator(_named), FREEZE]


def pool_mistakes(given: Mapping[str, Any], backend: str) -> Iterator[Mistake]:
    """What does not go together in a cluster with ``pools``, as it was given."""
    for key in ("nodes", "device"):
        if given.get(key) is not None:
            yield Mistake((key,), f"{key!r} does not go with pools: write it into each pool", at_key=True)
    pools = given["pools"]
    if not isinstance(pools, Mapping):
        return
    default = given.get("pool")
    if isinstance(default, str) and default not in pools:
        yield Mistake(("pool",), unknown_pool(default, pools))
    slurm = given.get("slurm")
    for name, pool in pools.items():
        if not is_safe_name(str(name)) or "\n" in str(name):
            message = f"pool {name!r} is not a name; accepted: letters, digits, '.', '_', '-'"
            yield Mistake(("pools", name), message, at_key=True)
        if not isinstance(pool, Mapping):
            continue  # its own type says so
        problem = like_problem(str(name), pools)
        if problem:
            yield Mistake(("pools", name, "like"), problem)
            continue
        yield from _of_one(str(name), pools, slurm if isinstance(slurm, Mapping) else {}, backend)


def unknown_pool(name: str, pools: Mapping[str, Any]) -> str:
    """The sentence for a pool that the cluster does not have."""
    return f"there is no pool {name!r}{did_you_mean(name, pools)}; the cluster has {', '.join(pools)}"


def like_problem(name: str, pools: Mapping[str, Any]) -> str | None:
    """Why nobody can say what the pool takes from others; None where that can be followed to its end."""
    seen, at = [name], name
    while isinstance(pools[at], Mapping) and isinstance(pools[at].get("like"), str):
        at = str(pools[at]["like"])
        if at not in pools:
            return unknown_pool(at, pools) if len(seen) == 1 else None  # told at the pool that says so
        if at in seen:
            return f"pools are like each other in a circle: {' → '.join([*seen, at])}"
        seen.append(at)
    return None


def said_of(name: str, key: str, pools: Mapping[str, Any]) -> Any:
    """What a pool says of a key, itself or through the pool that it is like. No circles."""
    pool = pools.get(name)
    if not isinstance(pool, Mapping):
        return None
    if pool.get(key) is not None:
        return pool[key]
    like = pool.get("like")
    return said_of(str(like), key, pools) if isinstance(like, str) else None


def _of_one(name: str, pools: Mapping[str, Any], slurm: Mapping[str, Any], backend: str) -> Iterator[Mistake]:
    pool = pools[name]
    if backend == "direct":
        for key in SLURM_KEYS:
            if pool.get(key) is not None:
                yield Mistake(("pools", name, key), f"{key!r} is for backend: slurm", at_key=True)
        if said_of(name, "nodes", pools) is None:
            yield Mistake(("pools", name), "backend: direct needs the pool's nodes: node[01-04]", at_key=True)
        return
    gpus_by = said_of(name, "gpus_by", pools) or slurm.get("gpus_by") or "none"
    if pool.get("gpu_type") is not None and gpus_by == "none":
        message = "gpu_type needs gpus_by: gres or gpus_by: gpus-per-node, here or under slurm"
        yield Mistake(("pools", name, "gpu_type"), message)


def filled(pools: Mapping[str, Pool], slurm: Slurm) -> dict[str, Pool]:
    """Every pool with all that it takes from others written into it; ``like`` has done its work then."""
    return {name: _filled(pools, name, slurm) for name in pools}


def _filled(pools: Mapping[str, Pool], name: str, slurm: Slurm) -> Pool:
    said: dict[str, Any] = {key: getattr(slurm, key) for key in SLURM_KEYS if key in slurm.model_fields_set}
    chain = [pools[name]]
    while chain[-1].like is not None:
        chain.append(pools[chain[-1].like])
    for pool in reversed(chain):
        said |= {key: getattr(pool, key) for key in pool.model_fields_set}
    said.pop("like", None)
    return Pool.model_construct(**{**Pool().__dict__, **said})
