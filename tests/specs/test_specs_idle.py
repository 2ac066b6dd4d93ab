# ruff: noqa: E501  (answers stand here as they are printed)
"""Keys that mean nothing beside what else is written; a ``--set`` over others lets them be."""

from __future__ import annotations

import pytest

from launcher.contract.errors import DescriptionError
from launcher.planning.partitioned import zero_of
from launcher.specs import describe, job_from_plain, parse_text
from launcher.specs.idle import words

JOB = """name: j
model: {kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}
data: {text: python-stdlib}
zero: {stage: 3, reshard: keep, prefetch: 2}
optimizer: {lr: 3e-4}
batch: {global: 64, micro: 8}
steps: 200
checkpoint:
  every: 50
  background: true
"""
DIRECT = "name: c\nbackend: direct\npaths: {runs: /r}\n"


def refused(kind: str, text: str, *sets: str) -> list[str]:
    with pytest.raises(DescriptionError) as caught:
        parse_text(kind, text, "f.yaml", sets)  # type: ignore[call-overload]
    return str(caught.value).split("\n")


def test_a_file_that_says_so_itself_is_refused_with_all_its_other_mistakes() -> None:
    below = JOB.replace("stage: 3", "stage: 2").replace("  every: 50\n", "").replace("steps: 200", "steps: x")
    assert refused("job", below) == [
        "f.yaml:4:18: reshard says how stage 3 gathers, and means nothing at stage 2: write stage: 3, or leave reshard out",
        "f.yaml:4:33: prefetch says how stage 3 gathers, and means nothing at stage 2: write stage: 3, or leave prefetch out",
        "f.yaml:7:8: a whole number was expected, not 'x'",
        "f.yaml:9:3: background is of saves on the way, and without every there are none: write every: 50, or 30min",
    ]


def test_a_set_over_the_stage_is_a_question_and_what_it_leaves_idle_is_told() -> None:
    job = parse_text("job", JOB, "f.yaml", ["zero.stage=1", "checkpoint.every=null"])
    assert [line.split()[0] for line in words(job)] == ["zero.reshard", "zero.prefetch", "checkpoint.background"]
    assert words(parse_text("job", JOB, "f.yaml")) == ()
    # A run's own description is no file of anybody's: one that goes on from it may --set what it likes.
    kept = describe(job)
    assert kept["zero"]["prefetch"] == 2 and len(words(job_from_plain(kept, ["zero.prefetch=1"]))) == 2
    assert words(job_from_plain(kept, ["zero.stage=3", "checkpoint.every=5"])) == ()
    said = refused("job", JOB, "zero.stage=0", "zero.prefetch=3")
    assert len(said) == 1 and said[0].startswith("--set zero.prefetch: prefetch says how stage 3 gathers")


def test_what_is_so_anyway_may_be_written() -> None:
    text = JOB.replace("stage: 3, reshard: keep, prefetch: 2", "stage: 2, reshard: keep_last, prefetch: 1")
    assert words(parse_text("job", text.replace("background: true", "background: false"), "f.yaml")) == ()


def test_units_are_of_every_stage() -> None:
    job = parse_text(
        "job", JOB.replace("stage: 3, reshard: keep, prefetch: 2", "stage: 1, unit: {size: 1MB}"), "f.yaml"
    )
    assert words(job) == ()


def test_memory_per_slot_without_slurm() -> None:
    alone = DIRECT + "nodes: {names: 'n[1-2]', memory_per_slot: 4GiB}\n"
    assert parse_text("cluster", alone, "f.yaml").memory_per_slot == 4 * 2**30, "a CPU's slot has that much"
    said = refused("cluster", alone + "device: {kind: gpu}\n")
    assert len(said) == 1 and said[0].startswith("f.yaml:4:26: memory_per_slot is what Slurm is asked for;")
    slurm = (alone + "device: {kind: gpu}\n").replace("backend: direct", "backend: slurm")
    parse_text("cluster", slurm, "f.yaml", ["cluster.backend=direct"])


def test_memory_per_slot_of_pools_is_for_those_that_take_it() -> None:
    pools = DIRECT + "pools:\n  a: {nodes: a1, memory_per_slot: 4GiB, device: {kind: gpu}}\n  b: {like: a, nodes: b1}\n"
    assert refused("cluster", pools)[0].startswith("f.yaml:5:18: memory_per_slot is what Slurm is asked for;")
    parse_text("cluster", pools.replace("nodes: b1", "nodes: b1, device: {kind: cpu}"), "f.yaml")
    circle = pools.replace("  a: {", "  a: {like: b, ")
    assert all("in a circle" in line for line in refused("cluster", circle))
    lost = pools.replace("  b: {like: a", "  b: {like: c") + "  d: {like: b}\n"
    assert refused("cluster", lost)[1].startswith("f.yaml:6:13: there is no pool 'c'")


@pytest.mark.parametrize("stage", [0, 3])
def test_what_can_arrive_later_is_what_stages_1_and_2_gather_after_a_step(stage: int) -> None:
    late = JOB.replace("stage: 3, reshard: keep, prefetch: 2", "stage: 2, overlap_gather: true")
    found = job_from_plain(describe(parse_text("job", late, "f.yaml"))).zero
    assert found is not None and found.overlap_gather is True
    said = refused("job", late.replace("stage: 2", f"stage: {stage}"))
    assert len(said) == 1 and said[0].startswith("f.yaml:4:18: overlap_gather lets updated parameters of stages 1 and 2")
    job = parse_text("job", late, "f.yaml", [f"zero.stage={stage}"])
    assert [line.split()[0] for line in words(job)] == ["zero.overlap_gather"]
    assert job.zero is not None and zero_of(job.zero, 1).overlap_gather is None
