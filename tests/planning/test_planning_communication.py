"""Bytes by collective and by link, and the bounds that follow."""

from __future__ import annotations

from typing import Any

import pytest
from planning_cases import direct, job, slurm

from launcher.planning import make_plan
from launcher.planning.plan import Plan, Traffic

GPU = {"kind": "gpu", "model": "A100", "memory": "80GB", "peak_flops": {"bf16": "312T"}}


def by_what(plan: Plan) -> dict[tuple[str, str], Traffic]:
    return {(t.what, t.collective): t for t in plan.traffic or ()}


def plan_at(stage: int, accumulation: int = 1, **cluster: Any) -> Plan:
    batch = {"micro": 2, "accumulation": accumulation}
    return make_plan(job(zero={"stage": stage}, batch=batch), slurm(**cluster))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_volume_is_the_papers(stage: int) -> None:
    """2Ψ at stages 0 to 2; at stage 3 exactly 3Ψ less the units that stay gathered."""
    plan = plan_at(stage)
    psi = plan.state.parameters or 0  # nothing is padded here: every unit divides by 4
    kept = (256 + 32) * 64 + 2 * 64 + 12 * 64**2 + 13 * 64
    volume = sum(t.volume_elements for t in plan.traffic or ())
    assert volume == (2 * psi if stage < 3 else 3 * psi - kept)
    assert plan.sent_bytes_per_step == volume * 4 * 3 // 4


def test_accumulation_costs_stages_2_and_3_alone() -> None:
    once, thrice = ({stage: plan_at(stage, a).sent_bytes_per_step or 0 for stage in range(4)} for a in (1, 3))
    assert [thrice[s] / once[s] for s in range(4)] == [1, 1, 2, 3]  # stage 2: (3 + 1) / 2


def test_by_link_all_bytes_are_somewhere() -> None:
    """What the ranks of a node send is what stays inside it plus what leaves it, however it is sent."""
    for device in ({"kind": "cpu"}, GPU):
        plan = plan_at(2, device=device)
        for sent in plan.traffic or ():
            assert 2 * sent.inside_bytes + sent.node_bytes == pytest.approx(2 * sent.sent_bytes, abs=4)
    # Point to point sends each part to each rank of the other node; a library's collective needs to only once.
    peer, native = (by_what(plan_at(2, device=device)) for device in ({"kind": "cpu"}, GPU))
    key = ("gradients", "reduce-scatter")
    assert peer[key].node_bytes == 2 * native[key].node_bytes
    assert peer[key].inside_bytes * 2 == native[key].inside_bytes


def test_one_node_sends_nothing_out_and_one_rank_nothing_at_all() -> None:
    inside = make_plan(job(nodes=1), slurm())
    assert all(t.node_bytes == 0 and t.inside_bytes == t.sent_bytes for t in inside.traffic or ())
    alone = make_plan(job(nodes=1, slots_per_node=1), slurm())
    assert alone.traffic == () and alone.sent_bytes_per_step == 0


def test_tensor_parallel_is_12_bsh_a_block_and_partitioned_activations_a_twelfth_more() -> None:
    base = job(
        model={"kind": "gpt", "layers": 50, "hidden": 64, "heads": 4, "seq_len": 32, "dropout": 0.1},
        parallel={"tensor": 2},
    )
    again = base.model_copy(update={"recompute": "block", "activations": "partitioned"})
    plan = by_what(make_plan(again, slurm()))
    stream, accumulation = 2 * 32 * 64, 16 // (2 * 2)
    reduced = plan["activations and their gradients", "all-reduce"]
    gathered = plan["stored activations", "all-gather"]
    assert reduced.volume_elements == accumulation * stream * (12 * 50 + 4)  # and embedding and head
    assert gathered.volume_elements == accumulation * stream * 50
    hosted = by_what(make_plan(again.model_copy(update={"activations": "host"}), slurm()))
    assert hosted["stored activations", "all-gather"] == gathered, "on the host each rank keeps its part too"
    whole = by_what(make_plan(again.model_copy(update={"activations": "whole"}), slurm()))
    assert ("stored activations", "all-gather") not in whole
    # Without dropout nothing after a block's last sum is saved, so that sum is not made again.
    dry = base.model_copy(update={"model": base.model.model_copy(update={"dropout": 0.0}), "recompute": "block"})
    summed = by_what(make_plan(dry, slurm()))["activations and their gradients", "all-reduce"]
    assert summed.volume_elements == accumulation * stream * (10 * 50 + 4)
    assert 100 * gathered.volume_elements / reduced.volume_elements == pytest.approx(8.3, abs=0.1)
    # The tensor group stands inside a node; data-parallel ranks on other nodes.
    assert reduced.node_bytes == 0 and reduced.inside_bytes == reduced.sent_bytes
    data = plan["gradients", "reduce-scatter"]
    assert data.inside_bytes == 0 and data.node_bytes == 2 * data.sent_bytes


def test_bounds() -> None:
    cluster = slurm(device=GPU, network={"inside": "1GB/s", "between": "8Mbps"})
    plan = make_plan(job(precision="bf16"), cluster)
    bounds, traffic = plan.bounds, plan.traffic or ()
    assert bounds is not None and bounds.missing == ()
    assert bounds.between_s == sum(t.node_bytes for t in traffic) / 10**6
    assert bounds.inside_s == sum(t.inside_bytes for t in traffic) / 10**9
    tokens, psi = 16 * 32, plan.state.parameters or 0
    assert bounds.flops == tokens * (6 * psi + 6 * 32 * 64 * 2)
    assert bounds.compute_s == pytest.approx(bounds.flops / 4 / 312e12)
    assert bounds.bounded_by == "between" and bounds.step_s == bounds.between_s


def test_what_lacks_for_a_bound_is_named() -> None:
    plan = make_plan(job(), direct())
    assert plan.bounds is not None
    assert plan.bounds.missing == ("device.peak_flops.fp32", "network.inside", "network.between")
    assert plan.bounds.step_s is None and plan.bounds.bounded_by is None
    one_node = make_plan(job(nodes=1), direct())
    assert one_node.bounds is not None and one_node.bounds.between_s == 0
