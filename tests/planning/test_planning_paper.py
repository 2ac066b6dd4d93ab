"""The ZeRO paper's evaluation as fixtures: jobs/paper/ and docs/paper.md.

Asserted: what is read in the paper's text [V] and decided by arithmetic. What is second-hand [S] or from memory [M]
only says which job to plan; no figure of those kinds is compared.
"""

from __future__ import annotations

import json
from pathlib import Path

import gen_paper_docs
import pytest
from paper_figures import FIGURE_4, MODELS, TABLE_3, TABLE_5, TABLE_8

from launcher.planning import check_engine
from launcher.planning.make import draft_plan
from launcher.planning.plan import Plan
from launcher.specs import describe as plain_of
from launcher.specs import job_from_plain, load_cluster, load_job
from launcher.specs.models import GptModel, Job

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs" / "paper").glob("*.yaml"))
CLUSTER = load_cluster(ROOT / "clusters" / "dgx2-25.yaml")
RAN = [f"{kind}-{name}" for kind in ("zero", "baseline") for name in TABLE_5] + [f"dp-{name}" for name in FIGURE_4]


def job_of(name: str) -> Job:
    return load_job(ROOT / "jobs" / "paper" / f"{name}.yaml")


def plan_of(name: str) -> Plan:
    return draft_plan(job_of(name), CLUSTER)


def test_every_configuration_is_there() -> None:
    memory = [f"memory-{name}-{config}" for name in TABLE_8 for config in TABLE_3]
    assert {path.stem for path in JOBS} == {*RAN, *memory}


@pytest.mark.parametrize("path", JOBS, ids=lambda p: p.stem)
def test_a_job_is_what_the_paper_says(path: Path) -> None:
    a_job = load_job(path)
    kind, size, *config = path.stem.split("-")
    assert a_job.name == path.stem and isinstance(a_job.model, GptModel) and a_job.cluster == "dgx2-25"
    assert job_from_plain(json.loads(json.dumps(plain_of(a_job)))) == a_job
    model = a_job.model
    assert any((model.layers, model.hidden) == (m.layers, m.hidden) for m in MODELS) or kind == "memory"
    assert a_job.zero is not None and a_job.batch is not None
    if kind == "dp":
        assert (16 * a_job.nodes, a_job.parallel.tensor, a_job.zero.stage) == (128, 1, 2)
        return
    if kind == "memory":
        layers, hidden, run = TABLE_8[size]
        assert (a_job.zero.stage, a_job.activations) == TABLE_3[config[0]]
    else:
        layers, hidden, *runs = TABLE_5[size]
        run = runs[0 if kind == "zero" else 1]
        assert a_job.zero.stage == (2 if kind == "zero" else 0)
    ours = (16 * a_job.nodes, a_job.parallel.tensor, model.heads, a_job.batch.micro, a_job.batch.global_)
    assert (model.layers, model.hidden, *ours) == (layers, hidden, *run)


@pytest.mark.parametrize("name", RAN)
def test_what_the_paper_ran_fits(name: str) -> None:
    """With the assumed lines, on what a V100 really has (32,510 MiB less the reserve)."""
    plan = plan_of(name)
    assert plan.state.device_bytes == (32510 - 1024) * 2**20
    assert plan.judgement.verdict == "fits", plan.judgement.because


@pytest.mark.parametrize("name", ["2.5b", "4b", "6b", "8b", "10b", "11b", "12b", "13b"])
def test_without_zero_the_state_alone_is_above_a_v100(name: str) -> None:
    """The paper's baseline stops at 1.4B [V]: from 2.5B on no batch is small enough."""
    a_job = job_of(f"dp-{name}")
    assert a_job.zero is not None
    without = a_job.model_copy(update={"zero": a_job.zero.model_copy(update={"stage": 0})})
    plan = draft_plan(without, CLUSTER)
    assert plan.state.verdict == "does not fit"
    assert "no benchmark is needed" in plan.judgement.because


def test_partitioned_and_offloaded_activations_save_what_the_text_says() -> None:
    """Figure 7 [V]: C2 below C1, C5 below C4 for 100B. By arithmetic alone."""
    for name in TABLE_8:
        holds = {config: plan_of(f"memory-{name}-{config}").judgement.needs_bytes or 0 for config in TABLE_3}
        assert holds["c2"] < holds["c1"] and holds["c4"] < holds["c3"] and holds["c5"] < holds["c4"]


def test_the_engine_trains_what_they_ask_for() -> None:
    """fp16 with fp16 gradients, tensor parallelism, partitioned activations: nothing is refused by name any more."""
    check_engine(plan_of("zero-170b"))


def test_the_baselines_tensor_groups_cross_nodes_and_zeros_do_not() -> None:
    for name in ("60b", "100b"):
        for kind, crosses in (("zero", False), ("baseline", True)):
            traffic = plan_of(f"{kind}-{name}").traffic or ()
            assert any(t.group == "tensor" and t.node_bytes > 0 for t in traffic) == crosses


def test_the_page_is_fresh() -> None:
    kept = gen_paper_docs.PAGE.read_text(encoding="utf-8")
    assert kept == gen_paper_docs.page(), "docs/paper.md is stale: run make docs"
    assert "differs" not in kept
