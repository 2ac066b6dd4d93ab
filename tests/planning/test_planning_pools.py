"""Nodes that are not alike, and pools, in a plan: what decides, and what a person is told."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import direct, job, slurm

from launcher.planning import Begun, CannotPlan, launch_spec, make_plan
from launcher.planning.told import told_plan
from launcher.specs import in_pool
from launcher.specs.models import Cluster

A100 = {
    "kind": "gpu",
    "model": "A100",
    "memory": "80GB",
    "reserve": "1GB",
    "peak_flops": {"bf16": "312T", "fp32": "19T"},
}
SHARED = {"runs": "/runs"}
V100 = {"kind": "gpu", "model": "V100", "memory": "16GB", "precisions": ["fp32", "fp16"], "peak_flops": {"fp32": "14T"}}


def rack(*devices: dict[str, Any] | None, slots: tuple[int, ...] = (2, 2)) -> Cluster:
    named = zip("abcd", devices, slots, strict=False)
    return direct(
        nodes=[{"name": n, "slots": s, **({"device": d} if d else {})} for n, d, s in named], device=A100, paths=SHARED
    )


def test_unlike_devices_are_planned_by_the_smallest_and_said() -> None:
    plan = make_plan(job(), rack(None, V100))
    assert plan.state.device_bytes == 16_000_000_000
    assert plan.remarks == ("unlike devices (A100 on a; V100 on b): planned by the smallest, 16 GB a rank",)
    assert told_plan(plan)["remarks"] == list(plan.remarks)
    assert plan.bounds is not None and plan.bounds.compute_s is not None
    alone = make_plan(job(), rack(V100, V100))
    assert alone.bounds is not None and plan.bounds.compute_s == alone.bounds.compute_s
    assert make_plan(job(nodes=1), rack(None, V100)).state.device_bytes == 79_000_000_000, "only the nodes it takes"
    with pytest.raises(CannotPlan, match="bf16 is not supported by the device A100, V100"):
        make_plan(job(precision="bf16"), rack(None, V100))
    unknown = make_plan(job(), rack(None, {"kind": "gpu"}))
    assert unknown.state.device_bytes is None and "of unknown memory a rank" in unknown.remarks[0]
    with pytest.raises(CannotPlan, match="one kind of device: a has a gpu, b has a cpu"):
        make_plan(job(), rack(None, {"kind": "cpu"}))


def test_a_kind_that_nodes_alone_say_reaches_the_ranks() -> None:
    cluster = direct(nodes=[{"name": n, "device": V100} for n in "ab"], paths=SHARED)
    plan = make_plan(job(), cluster)
    assert launch_spec(plan, job(), cluster, Begun("r", 1, "/r", "/z", None, "T")).device_kind == "gpu"
    assert plan.remarks == () and plan.state.device_bytes == 16_000_000_000


def test_unequal_slots_are_said() -> None:
    plan = make_plan(job(nodes=2, batch={"micro": 1, "accumulation": 1}), rack(None, None, slots=(3, 1)))
    assert plan.topology.slots == (3, 1) and "unequal slots: 1 to 3 ranks a node" in plan.remarks[0]
    assert make_plan(job(slots_per_node=1), rack(None, None, slots=(3, 1))).remarks == ()


def test_a_preemptible_pool_says_what_a_loss_costs() -> None:
    pools = {"a": {"slots": 2}, "spare": {"like": "a", "preemptible": True}}
    cluster = slurm(nodes=None, slurm=None, pools=pools)
    assert make_plan(job(), in_pool(cluster)).remarks == ()
    plan = make_plan(job(), in_pool(cluster, "spare"))
    assert plan.pool == "spare" and plan.remarks[0].endswith("from the newest whole checkpoint")
    unsaved = make_plan(job(checkpoint=None), in_pool(cluster, "spare"))
    assert "from the beginning" in unsaved.remarks[0]
