"""Pools: what each takes from others, which one a job sees, and what is too much for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.contract.errors import DescriptionError, UsageError
from launcher.specs import cluster_from_plain, describe, in_pool, job_on, load_job, moved
from launcher.specs.load import parse_text
from launcher.specs.models import Cluster

UNI = """\
name: uni
backend: slurm
slurm: {account: "0123", gpus_by: gres, partition: gpu, extra: {mail-type: END}}
pools:
  a100: {gpu_type: a100, nodes: "gpu[01-25]", slots: 4, cpus_per_slot: 16, time_max: 24:00:00, qos: high,
         device: {kind: gpu, memory: 80GiB, reserve: 2GiB}}
  spare: {like: a100, partition: scavenger, qos: null, preemptible: true}
  cpu: {partition: cpu, gpus_by: none, slots: 32, time_max: 7-0}
  lent: {like: spare, account: other, slots: 2}
paths: {runs: ~/zerun}
"""
JOB = """\
name: j
pool: {pool}
nodes: 26
time: 30:00:00
slots_per_node: 33
program: {{argv: [./run]}}
"""


def uni(sets: tuple[str, ...] = ()) -> Cluster:
    return parse_text("cluster", UNI, "uni.yaml", sets)


def test_a_pool_is_seen_as_a_plain_cluster() -> None:
    first, spare, cpu, lent = uni(), *(in_pool(uni(), name) for name in ("spare", "cpu", "lent"))
    assert (first.pool, first.slurm.partition, first.slots, first.time_max) == ("a100", "gpu", 4, 86400)
    assert len(first.node_list) == 25 and first.device.kind == "gpu" and first.cpus_per_slot == 16
    assert (spare.slurm.partition, spare.slurm.qos, spare.slurm.account) == ("scavenger", "high", "0123")
    assert (cpu.slurm.gpus_by, cpu.device.kind, cpu.slots, cpu.node_list) == ("none", "cpu", 32, ())
    assert (lent.slurm.partition, lent.slurm.account, lent.slots, lent.slurm.gpu_type) == (
        "scavenger",
        "other",
        2,
        "a100",
    )
    assert dict(lent.slurm.extra) == {"mail-type": "END"}
    assert parse_text("cluster", UNI, "uni.yaml", ["pool=cpu"]).slots == 32


def test_what_is_kept_of_a_pool_is_the_same_again_and_leads_to_every_other() -> None:
    for name in ("a100", "spare", "cpu", "lent"):
        kept = cluster_from_plain(describe(in_pool(uni(), name)))
        assert kept == in_pool(uni(), name)
        for other in ("a100", "spare", "cpu", "lent"):
            assert moved(kept, other) == in_pool(uni(), other), f"{name} → {other}"
    with pytest.raises(UsageError, match=r"no pool 'a10' .*did you mean 'a100'"):
        in_pool(uni(), "a10")


def test_more_than_the_pool_has_is_told_at_the_line_of_the_job(tmp_path: Path) -> None:
    def told(pool: str, *sets: str) -> list[str]:
        (tmp_path / "j.yaml").write_text(JOB.format(pool=pool))
        path = tmp_path / "j.yaml"
        with pytest.raises(DescriptionError) as caught:
            job_on(load_job(path, sets), uni(), path, sets)
        return [str(p).removeprefix(f"{tmp_path}/") for p in caught.value.problems]

    assert told("a100") == [
        "j.yaml:3:8: nodes: 26 were asked for, pool a100 has 25 (gpu01, gpu02, gpu03, gpu04, …); enough is in pool cpu",
        "j.yaml:4:7: time: 1-06:00:00 was asked for, pool a100 allows 1-00:00:00; enough is in pool cpu",
        "j.yaml:5:17: slots_per_node: 33 ranks were asked for, a node of pool a100 has 4",
    ]
    assert told("cpu") == ["j.yaml:5:17: slots_per_node: 33 ranks were asked for, a node of pool cpu has 32"]
    unknown = "there is no pool 'sparse' (did you mean 'spare'?); the cluster has a100, spare, cpu, lent"
    assert told("cpu", "pool=sparse") == [f"--set pool: cluster uni: {unknown}"]
    path = tmp_path / "j.yaml"
    assert job_on(load_job(path, ["slots_per_node=2", "pool=cpu"]), uni(), path).pool == "cpu"


def test_pools_of_machines_without_a_scheduler() -> None:
    text = (
        "name: r\nbackend: direct\npaths: {runs: ~/z}\npools:\n  big: {nodes: 'a[1-2]', slots: 4}\n  old: {nodes: b1}\n"
    )
    rack = parse_text("cluster", text, "r.yaml")
    assert [n.name for n in in_pool(rack, "old").node_list] == ["b1"] and rack.slots == 4
    with pytest.raises(UsageError, match="lie on the nodes of pool big"):
        moved(rack, "old")
    with pytest.raises(DescriptionError) as caught:
        parse_text("cluster", text + "  bad: {partition: x}\nnodes: {names: c}\n", "r.yaml")
    assert [str(p) for p in caught.value.problems] == [
        "r.yaml:7:3: backend: direct needs the pool's nodes: node[01-04]",
        "r.yaml:7:9: 'partition' is for backend: slurm",
        "r.yaml:8:1: 'nodes' does not go with pools: write it into each pool",
    ]
