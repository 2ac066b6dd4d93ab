"""Units, resharding, prefetch, replicas and the library's sum: planned as a real step of the engine has them."""

from __future__ import annotations

from typing import Any

import pytest
from engine_ranks import run_ranks
from measured_step import measure_all
from planning_cases import direct, job, slurm

from launcher.contract.train import Units
from launcher.planning import make_plan
from launcher.planning.plan import Plan
from launcher.planning.reasons import CannotPlan

MODEL = {"layers": 3, "hidden": 96, "heads": 3, "seq_len": 50}
CASES: dict[str, dict[str, Any]] = {
    "kept": {"stage": 3, "reshard": "keep"},
    "all released": {"stage": 3, "reshard": "after_forward", "prefetch": 0},
    "two ahead": {"stage": 3, "prefetch": 2},
    "small units": {"stage": 3, "unit": {"names": ["blocks.*.attention", "blocks.*.mlp"]}, "prefetch": 2},
    "small units of replicas": {
        "stage": 3,
        "unit": {"names": ["blocks.*.attention", "blocks.*.mlp"]},
        "prefetch": 2,
        "replicas": 2,
        "reshard": "after_forward",
    },
    "filled units": {"stage": 3, "unit": {"size": "1MB"}, "reshard": "after_forward"},
    "native": {"stage": 0, "reduce_with": "native"},
    "whole gradients": {"stage": 3, "reduce_every": "step"},
    "passing buckets": {"stage": 1, "reduce_every": "micro_step"},
    **{f"replicas {stage}": {"stage": stage, "replicas": 2} for stage in range(4)},
}
_SMALL = Units(names=("blocks.*.attention", "blocks.*.mlp"))
_RULES = {"small units": _SMALL, "small units of replicas": _SMALL, "filled units": Units(size_bytes=10**6)}


def _plan(name: str) -> Plan:
    zero = {**CASES[name], "bucket": "200000B"}
    batch = {"micro": 4, "accumulation": 2}
    a_job = job(nodes=2, model={"kind": "gpt", **MODEL}, zero=zero, batch=batch, evaluate=None)
    return make_plan(a_job, direct())


def _measured(names: list[str]) -> dict[str, dict[str, Any]]:
    """Rank 0 of four, a step of each case."""
    cases = []
    for name in names:
        zero = {key: value for key, value in CASES[name].items() if key not in ("stage", "unit")}
        zero |= {"unit": _RULES.get(name)}
        base = {"model": MODEL, "stage": CASES[name]["stage"], "accumulation": 2, "micro": 4, "world": 4}
        cases.append(base | {"bucket": 200_000, "zero": zero})
    return dict(zip(names, run_ranks(4, measure_all, cases)[0], strict=True))


def test_the_lines_are_what_real_steps_hold() -> None:
    for name, real in _measured(["small units of replicas"]).items():
        _check(name, real)


@pytest.mark.full
def test_the_lines_are_what_all_real_steps_hold() -> None:
    for name, real in _measured(list(CASES)).items():
        _check(name, real)


def _check(name: str, real: dict[str, Any]) -> None:
    plan = _plan(name)
    lines = {line.what: line for line in plan.step}
    for kind in ("parameters", "gradients", "optimizer"):
        assert lines[kind].bytes == real["memory"][kind], kind
    assert lines["communication buckets"].bytes == real["memory"]["buckets"]
    assert lines["norm of the gradient"].alive.backward == real["memory"]["norm"]
    for part, groups in (("", ("data",)), ("replica_", ("replica",))):
        traffic = [t for t in plan.traffic or () if t.group in groups]
        assert sum(t.sent_bytes for t in traffic) == real["sent"].get(f"{part}sent_bytes", 0)
        assert sum(t.volume_elements for t in traffic) == real["sent"].get(f"{part}volume_elements", 0)
    assert plan.sent_bytes_per_step == real["sent_bytes"]
    alive = [line.alive for line in plan.step if line.what != "allocator slack"]
    backward = max(sum(a.loss for a in alive), sum(a.backward for a in alive))
    assert backward == pytest.approx(real["backward"], rel=0.015)


def test_replicas_keep_what_is_sent_between_nodes_small() -> None:
    """A replica a node: all of ZeRO's own messages stay inside, and a shard's sums alone leave it."""
    whole, copied = (
        {t.what: t for t in make_plan(job(zero={"stage": 3, "replicas": r}), slurm()).traffic or ()}
        for r in (1, "nodes")
    )
    assert all(t.node_bytes > 0 for t in whole.values())
    assert {what for what, t in copied.items() if t.node_bytes} == {"gradients across replicas"}
    across = copied["gradients across replicas"]
    assert across.inside_bytes == 0 and across.collective == "all-reduce"
    psi = make_plan(job(), slurm()).state.parameters or 0
    assert across.volume_elements == 2 * psi // 2
    assert sum(t.node_bytes for t in copied.values()) < sum(t.node_bytes for t in whole.values()) / 2


def test_a_stage_that_would_fit_is_told_with_what_it_needs() -> None:
    """The library's sum goes with stage 0: the change that fits says so, instead of being none."""
    model = {"kind": "gpt", "layers": 8, "hidden": 256, "heads": 4, "seq_len": 32}
    cluster = slurm(device={"kind": "gpu", "memory": "76MB"})
    plan = make_plan(job(model=model, zero={"stage": 0, "reduce_with": "native"}), cluster)
    assert plan.judgement.verdict == "does not fit"
    assert plan.judgement.best == ("zero.stage=2", "zero.reduce_with=ordered")


@pytest.mark.parametrize(
    ("zero", "more", "said"),
    [
        ({"stage": 2, "replicas": 3}, {}, r"zero\.replicas: 3 does not divide 4 data-parallel ranks"),
        ({"stage": 2, "replicas": 4}, {}, r"zero\.replicas: 4 leaves one data-parallel rank to each"),
        ({"stage": 2, "replicas": "nodes"}, {"parallel": {"tensor": 2}}, r"zero\.replicas: nodes leaves one"),
        ({"stage": 3, "unit": {"class": "Blok"}}, {}, r"zero\.unit: class: 'Blok' .* closest: Block"),
    ],
)
def test_what_cannot_be_is_refused_by_name(zero: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotPlan, match=said) as caught:
        make_plan(job(zero=zero, **more), slurm())
    assert [reason.name for reason in caught.value.reasons] == ["zero"]
