"""Verdicts that act: what is said not to fit is refused by numbers, and what is advised was planned and fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning_cases import direct, job

from launcher.contract.errors import UsageError
from launcher.planning import make_plan
from launcher.planning.plan import Plan
from launcher.planning.search import search
from launcher.planning.step import together
from launcher.planning.verdict import judge, with_micro, with_recompute, with_stage
from launcher.specs import load_cluster, load_job
from launcher.specs.models import Cluster, Job

ROOT = Path(__file__).parents[2]
LONG = {"kind": "gpt", "layers": 4, "hidden": 64, "heads": 4, "seq_len": 256}


def cluster_of(memory: int | None, **more: Any) -> Cluster:
    return direct(device={"kind": "cpu", **({} if memory is None else {"memory": f"{memory}B"})}, **more)


def applied(a_job: Job, sets: tuple[str, ...], plan: Plan) -> tuple[Job, int]:
    """The job that ``--set`` would make."""
    nodes = len(plan.nodes)
    for key, value in (one.split("=") for one in sets):
        if key == "zero.stage":
            a_job = with_stage(a_job, int(value))
        elif key == "batch.micro":
            a_job = with_micro(a_job, int(value), plan.global_batch or 0, 0)
        elif key == "recompute":
            a_job = with_recompute(a_job, value)
        elif key == "nodes":
            nodes = int(value)
    return a_job, nodes


def test_three_verdicts_by_one_budget() -> None:
    """Above everything: fits. Between arithmetic and assumptions: cannot be said. Below arithmetic: does not."""
    plan = make_plan(job(model=LONG), cluster_of(None))
    sure, everything = together(plan.step, assumed=False), together(plan.step, assumed=True)
    assert plan.judgement.verdict == "cannot be said" and "no device memory" in plan.judgement.because
    assert plan.judgement.needs_bytes == sure < everything
    simulated = replace(plan.state, parameters=None, because="a factory's parameters are not counted")
    assert judge(simulated, plan.step) == plan.judgement, "a simulation has counted them: the device is what lacks"
    told = [make_plan(job(model=LONG), cluster_of(n)).judgement for n in (everything, everything - 1, sure, sure - 1)]
    assert [t.verdict for t in told] == ["fits", "cannot be said", "cannot be said", "does not fit"]
    assert "assumed lines decide" in told[1].because
    assert "the largest line is activations of the blocks" in told[3].because


def test_what_is_advised_was_tried_and_fits() -> None:
    a_job = job(model=LONG, batch={"global": 64, "micro": 8}, zero={"stage": 0})
    whole = make_plan(a_job, cluster_of(None))
    for part in (0.95, 0.8, 0.6, 0.45, 0.3):
        budget = int(together(whole.step, assumed=True) * part)
        plan = make_plan(a_job, cluster_of(budget))
        found = plan.judgement
        if found.verdict != "does not fit":
            continue
        assert found.tried
        fitting = [t for t in found.tried if t.verdict == "fits"]
        assert bool(found.best) == bool(fitting)
        for one in fitting:
            changed, nodes = applied(a_job, one.sets, plan)
            again = make_plan(changed, cluster_of(budget), nodes=nodes)
            assert again.judgement.verdict == "fits" and again.global_batch == plan.global_batch
        if any(not t.not_built for t in fitting):
            best = next(t for t in fitting if t.sets == found.best)
            assert not best.not_built  # what the engine can train comes first


def test_the_smallest_change_of_a_kind() -> None:
    a_job = job(model=LONG, batch={"global": 64, "micro": 8})
    whole = together(make_plan(a_job, cluster_of(None)).step, assumed=True)
    plan = make_plan(a_job, cluster_of(int(0.7 * whole)))
    assert plan.judgement.verdict == "does not fit"
    assert plan.judgement.best == ("batch.micro=4",)  # 7, 6 and 5 do not keep a global batch of 64 on 4 ranks
    said = job(model=LONG, batch={"micro": 8, "accumulation": 2})
    assert make_plan(said, cluster_of(int(0.7 * whole))).judgement.best == ("batch.micro=4", "batch.accumulation=4")


def test_a_floor_above_the_device_needs_no_benchmark() -> None:
    plan = make_plan(job(), cluster_of(400_000))
    assert plan.judgement.verdict == "does not fit"
    assert "no number of ranks helps" in plan.judgement.because
    assert "state alone decides, no benchmark is needed" in plan.judgement.because


def test_more_nodes_are_tried_up_to_what_the_cluster_has() -> None:
    model = {"kind": "gpt", "layers": 8, "hidden": 64, "heads": 4, "seq_len": 32}  # its state is most of a step
    a_job = job(model=model, zero={"stage": 3}, nodes=1, batch={"global": 16, "micro": 1})
    cluster = cluster_of(None)
    four = together(make_plan(a_job, cluster, nodes=4).step, assumed=True)
    plan = make_plan(a_job, cluster_of(four))
    assert plan.judgement.verdict == "does not fit"
    nodes = [t.sets for t in plan.judgement.tried if t.sets[0].startswith("nodes=")]
    assert nodes == [("nodes=2",), ("nodes=4",)]  # 3 nodes do not keep the global batch, the cluster has 4
    assert plan.judgement.best == ("nodes=4",)


def test_a_users_own_model_cannot_be_said() -> None:
    data = {"text": "python-stdlib", "options": {"seq_len": 32}}
    plan = make_plan(job(model={"factory": "m:f"}, data=data), cluster_of(10**9))
    assert plan.judgement.verdict == "cannot be said" and "not counted" in plan.judgement.because
    assert plan.step == () and plan.sent_bytes_per_step is None and plan.bounds is None
    with pytest.raises(UsageError, match="is known only when it runs"):
        search(job(model={"factory": "m:f"}, data=data), cluster_of(10**9))


def test_search_finds_what_fits_the_same_global_batch_by_bound() -> None:
    network = {"inside": "1GB/s", "between": "1Gbps"}
    budget = int(0.6 * together(make_plan(job(model=LONG), cluster_of(None)).step, assumed=True))
    found = search(job(model=LONG), cluster_of(budget, network=network))
    assert found.global_batch == 16 and found.found and found.planned > len(found.found)
    assert [one.step_s for one in found.found] == sorted(one.step_s or 0.0 for one in found.found)
    assert all(one.micro_batch * one.accumulation * 4 // one.tensor == 16 for one in found.found)
    assert not any(one.not_built for one in found.found)
    assert {one.recompute for one in found.found} == {"none", "block"}
    assert {one.tensor for one in found.found} == {1, 2}  # the degrees that divide a node's slots and the heads
    with pytest.raises(UsageError, match="no device memory"):
        search(job(), cluster_of(None))


def test_search_takes_every_tensor_degree_that_cuts_evenly_and_says_how_to_get_there() -> None:
    cluster, path = load_cluster(ROOT / "clusters" / "dgx2-25.yaml"), ROOT / "jobs" / "paper" / "memory-100b-c2.yaml"
    found = search(load_job(path), cluster).found
    assert found and {one.tensor for one in found} <= {1, 2, 4, 8, 16} and {1, 16} < {one.tensor for one in found}
    # What is listed is what --set makes: read through the description, planned again.
    for one in (found[0], found[-1], *[f for f in found if f.recompute == "none"][:1]):
        plan = make_plan(load_job(path, list(one.sets)), cluster)
        assert plan.judgement.verdict == "fits" and plan.judgement.needs_bytes == one.needs_bytes
        assert plan.sent_bytes_per_step == one.sent_bytes_per_step
