"""A job on a cluster: what is decided without the cluster, and every refusal under its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planning_cases import direct, job, slurm

from launcher.contract import train
from launcher.contract.errors import UsageError
from launcher.contract.launch import LaunchSpec, Node
from launcher.contract.plain import dumps, from_plain, to_plain
from launcher.contract.topology import Topology
from launcher.planning import Begun, CannotPlan, check_engine, launch_spec, make_plan, replan
from launcher.planning.disk import sentence
from launcher.planning.memory import readable
from launcher.planning.plan import Disk
from launcher.specs.models import Cluster, Job


def refusal(a_job: Job, cluster: Cluster, **wishes: Any) -> CannotPlan:
    with pytest.raises(CannotPlan) as caught:
        make_plan(a_job, cluster, **wishes)
    return caught.value


def test_direct_takes_the_first_nodes_named() -> None:
    plan = make_plan(job(), direct())
    assert plan.nodes == (Node("node01", 2, among=(0, 1)), Node("node02", 2, among=(0, 1)))
    assert plan.topology == Topology((2, 2))
    assert plan.global_batch == 16
    assert plan.train is not None and plan.train.batch == train.Batch(micro=2, accumulation=2)


def test_nodes_that_differ_keep_their_slots_addresses_and_devices() -> None:
    nodes = [
        {"name": "a", "slots": 3, "address": "10.0.0.1", "devices": [4, 5, 6]},
        {"name": "b", "slots": 1},
    ]
    plan = make_plan(job(), direct(nodes=nodes))
    assert plan.nodes == (Node("a", 3, "10.0.0.1", (4, 5, 6), (4, 5, 6)), Node("b", 1, among=(0,)))
    assert plan.topology.slots == (3, 1)
    one_each = make_plan(job(slots_per_node=1), direct(nodes=nodes))
    assert one_each.nodes[0] == Node("a", 1, "10.0.0.1", (4,), (4, 5, 6))


def test_slurm_chooses_the_nodes() -> None:
    plan = make_plan(job(slots_per_node=1), slurm())
    assert plan.nodes == (Node("", 1), Node("", 1))
    # Nodes that are not named are as many as Slurm has.
    many = make_plan(job(nodes=100, batch={"micro": 1, "accumulation": 3}), slurm(nodes={"slots": 2}))
    assert len(many.nodes) == 100 and many.global_batch == 600


@pytest.mark.parametrize(
    ("a_job", "cluster", "name", "words"),
    [
        (job(nodes=5), direct(), "nodes", "5 nodes were asked for, the cluster has 4 (node01, node02"),
        (job(nodes=5), slurm(), "nodes", "5 nodes were asked for, the cluster has 4 (gpu01"),
        (job(slots_per_node=3), direct(), "slots", "3 ranks were asked for, node node01 has 2"),
        (job(slots_per_node=3), slurm(), "slots", "3 ranks were asked for"),
        (job(slots_per_node=3), slurm(nodes={"slots": 2}), "slots", "3 ranks were asked for, a node has 2"),
        (job(nodes=10**9), slurm(nodes={"slots": 2}), "nodes", "more than any cluster has"),
        (job(nodes=2**16), slurm(nodes={"slots": 2**16}), "slots", "more than any cluster has"),
        (
            job(time="2:00:00"),
            slurm(nodes={"slots": 2, "time_max": "1:30:00"}),
            "time",
            "02:00:00 was asked for, the cluster allows 01:30:00",
        ),
        (
            job(precision="bf16"),
            slurm(device={"kind": "gpu", "model": "V100-SXM3-32GB"}),
            "precision",
            "bf16 is not supported by the device V100-SXM3-32GB",
        ),
        (
            job(precision="fp16"),
            slurm(device={"kind": "gpu", "model": "Odd", "precisions": ["fp32", "bf16"]}),
            "precision",
            "fp16 is not supported by the device Odd",
        ),
        (job(batch={"global": 18, "micro": 2}), direct(), "batch", "= 8; the nearest that are: 16 and 24"),
        (job(batch={"global": 12, "micro": 6}), direct(), "batch", "nearest that is: 24; or keep it with micro 3"),
    ],
)
def test_each_refusal_has_its_name_and_says_what_would_do(a_job: Job, cluster: Cluster, name: str, words: str) -> None:
    error = refusal(a_job, cluster)
    assert [reason.name for reason in error.reasons] == [name]
    assert words in error.message
    assert error.exit_code == 2
    assert error.message.startswith(f"job {a_job.name} on cluster {cluster.name}: ")


def test_every_reason_is_told_at_once() -> None:
    cluster = slurm(
        nodes={"names": "gpu1", "slots": 2, "time_max": "10"}, device={"kind": "gpu", "model": "Tesla V100"}
    )
    error = refusal(job(nodes=2, precision="bf16", time="1:00:00"), cluster)
    assert [reason.name for reason in error.reasons] == ["nodes", "precision", "time"]
    assert len(error.message.splitlines()) == 3


@pytest.mark.parametrize(
    "model", ["V100-SXM3-32GB", "Tesla V100", "T4", "Tesla P100-PCIE-16GB", "K80", "RTX 2080", "GeForce GTX 1080 Ti"]
)
def test_old_devices_have_no_bf16(model: str) -> None:
    a_job = job(precision="bf16", nodes=1)
    assert refusal(a_job, slurm(device={"kind": "gpu", "model": model})).reasons[0].name == "precision"
    # What the description says itself goes first.
    make_plan(a_job, slurm(device={"kind": "gpu", "model": model, "precisions": ["bf16"]}))


@pytest.mark.parametrize(
    "model", ["A100-SXM4-80GB", "H100", "H200 SXM", "L40S", "RTX 4090", "RTX A6000", "MI300X", "GB200"]
)
def test_newer_devices_have(model: str) -> None:
    make_plan(job(precision="bf16"), slurm(device={"kind": "gpu", "model": model}))


def test_what_is_planned_but_not_built_is_refused_by_name_at_submit() -> None:
    cluster = slurm(device={"kind": "gpu", "model": "A100", "memory": "80GB"})
    plan = make_plan(job(zero={"stage": 2, "gradient_dtype": "fp16"}), cluster)
    assert plan.state.verdict == "fits"
    with pytest.raises(UsageError, match="gradient_dtype: fp16 is planned, but at precision fp32"):
        check_engine(plan)
    check_engine(make_plan(job(precision="bf16", zero={"stage": 2, "gradient_dtype": "bf16"}), cluster))
    check_engine(make_plan(job(), direct()))


def test_the_state_of_the_job() -> None:
    cluster = direct(device={"kind": "cpu", "memory": "1.1MB", "reserve": "200kB"})
    plan = make_plan(job(), cluster)
    state = plan.state
    assert state.parameters == 12 * 2 * 64**2 + 13 * 2 * 64 + (256 + 32) * 64 + 2 * 64
    assert state.device_bytes == 900_000
    assert state.chosen == 2 and state.verdict == "fits" and state.stages[2].fits
    tight = make_plan(job(), direct(device={"kind": "cpu", "memory": "660kB"})).state
    assert tight.verdict == "does not fit" and "needs ≥ 8 ranks, the job has 4" in tight.because
    hopeless = make_plan(job(), direct(device={"kind": "cpu", "memory": "400kB"})).state
    assert hopeless.verdict == "does not fit" and "no number of ranks helps" in hopeless.because


def test_memory_per_slot_is_the_budget_of_a_cpu() -> None:
    assert make_plan(job(), slurm(nodes={"slots": 2, "memory_per_slot": "2GiB"})).state.device_bytes == 2 * 2**30
    gpu = slurm(nodes={"slots": 2, "memory_per_slot": "2GiB"}, device={"kind": "gpu"})
    assert make_plan(job(), gpu).state.verdict == "cannot be said"


def test_a_factory_and_a_program_are_planned_without_counting() -> None:
    factory = make_plan(
        job(
            model={"factory": "m:f", "options": {"size": {"a": [1, 2]}}},
            data={"text": "python-stdlib", "options": {"seq_len": 32}},
        ),
        direct(device={"memory": "1GB"}),
    )
    assert factory.state.parameters is None and factory.state.verdict == "cannot be said"
    assert "--simulate" in factory.judgement.because
    assert factory.train is not None and factory.train.factory is not None
    assert to_plain(factory.train.factory.options) == {"size": {"a": [1, 2]}}
    own = job(model=None, data=None, zero=None, optimizer=None, batch=None, steps=None, evaluate=None, checkpoint=None,
              program={"argv": ["python", "train.py"], "stop_grace": "90s"})  # fmt: skip
    plan = make_plan(own, direct())
    assert plan.train is None and plan.program is not None and plan.global_batch is None
    check_engine(plan)


def test_what_the_engine_reads() -> None:
    config = make_plan(job(seed=7), direct()).train
    assert config is not None
    assert config.gpt == train.GPT(2, 64, 4, 32)
    assert config.zero == train.Zero(2, 25_000_000, "fp32")
    assert config.optimizer == train.AdamW(1e-3, clip=1.0, warmup=5)
    assert config.data == train.Data(text="python-stdlib")
    assert config.evaluate == train.Evaluate(5, 4096)
    assert config.checkpoint == train.Checkpointing(every_steps=5, keep=2)
    assert (config.steps, config.seed, config.precision, config.tensor) == (10, 7, "fp32", 1)


def test_a_resume_keeps_the_global_batch() -> None:
    a_job = job(batch={"micro": 2, "accumulation": 2})  # 16 on 4 ranks
    first = make_plan(a_job, direct())
    fewer = make_plan(a_job, direct(), nodes=1, global_batch=first.global_batch)
    assert fewer.train is not None and fewer.train.batch == train.Batch(2, 4)
    assert fewer.global_batch == first.global_batch == 16
    more = make_plan(a_job, direct(), nodes=4, global_batch=16)
    assert more.train is not None and more.train.batch == train.Batch(2, 1)
    error = refusal(a_job, direct(), nodes=3, global_batch=16)
    assert "cannot be kept on 6 data-parallel ranks with micro 2" in error.message
    assert "4 ranks (2 nodes) and 8 ranks (4 nodes)" in error.message


def test_replan() -> None:
    config = make_plan(job(), direct()).train
    assert config is not None
    assert replan(config, global_batch=16, data_parallel=8).batch == train.Batch(2, 1)
    with pytest.raises(UsageError, match="nearest that can: 2 ranks and 4 ranks"):
        replan(config, global_batch=16, data_parallel=3)
    with pytest.raises(UsageError, match=r"(?m)nearest that can: 8 ranks$"):
        replan(config, global_batch=16, data_parallel=9)


def test_the_launch_spec_and_its_way_through_json() -> None:
    hostile = "a,b='\"$HOME`x`\n%j é\\"
    a_job = job(time="0:02:00", env={"BOTH": "job", "ODD": hostile}, secrets=["TOKEN"])
    cluster = direct(
        env={"BOTH": "cluster", "SITE": "1"},
        setup="module load x\n",
        network={"interface": "ib0", "ports": "20000-20010"},
    )
    launch = launch_spec(
        make_plan(a_job, cluster),
        a_job,
        cluster,
        Begun("r-1", 2, "/s/r-1", "/s/.blobs/a.zip", "/s/.blobs/c.tar.gz", "T", "/s/.secrets/r-1.json", resume_step=40),
    )
    assert launch.env == {"BOTH": "job", "SITE": "1", "ODD": hostile}
    assert (launch.time_s, launch.warn_s, launch.stop_signal, launch.resume_step) == (120, 60, "USR2", 40)
    assert launch.ports == (20000, 20010) and launch.interface == "ib0" and launch.shared is False
    assert from_plain(LaunchSpec, json.loads(dumps(launch))) == launch
    site = slurm()
    under_slurm = launch_spec(make_plan(a_job, site), a_job, site, Begun("r-1", 1, "/s/r-1", "/z", None, "T"))
    assert under_slurm.time_s is None  # Slurm's to enforce
    assert [node.name for node in under_slurm.nodes] == ["", ""]


def test_what_a_lost_disk_costs_is_said_where_nothing_is_shared() -> None:
    def remarks(replicas: int, nodes: int = 3, **changes: object) -> str:
        cluster = direct(nodes={"names": "n[1-3]", "slots": 1}, **changes)
        wish = job(
            nodes=nodes, slots_per_node=1, checkpoint={"replicas": replicas}, batch={"micro": 1, "accumulation": 1}
        )
        return "; ".join(make_plan(wish, cluster).remarks)

    assert remarks(0).startswith("one lost disk loses the checkpoint")
    assert remarks(1).startswith("one lost disk loses no checkpoint: each node keeps a copy")
    assert remarks(7).startswith("2 lost disks lose no checkpoint")
    assert remarks(0, nodes=1) == "" and "makes no copies here: there is one node" in remarks(1, nodes=1)
    shared = {"runs": "/runs"}
    assert remarks(0, paths=shared) == "" and "makes no copies here: runs lie on a shared" in remarks(1, paths=shared)


def test_the_disk_line_counts_the_copies_that_other_nodes_keep() -> None:
    def disk(replicas: int, **changes: object) -> Disk:
        wish = job(
            nodes=3, slots_per_node=1, checkpoint={"every": 10, "keep": 2, "replicas": replicas}, steps=100,
            batch={"micro": 1, "accumulation": 1},
        )  # fmt: skip
        found = make_plan(wish, direct(nodes={"names": "n[1-3]", "slots": 1}, **changes)).disk
        assert found is not None
        return found

    plain, one, many = disk(0), disk(1), disk(7)
    assert [d.copies for d in (plain, one, many)] == [0, 1, 2], "there are two other nodes"
    assert plain.all_bytes == plain.checkpoint_bytes * 3 and one.all_bytes == 2 * plain.all_bytes
    assert "of every shard" not in sentence(plain) and sentence(plain).endswith(readable(plain.all_bytes))
    assert f"{readable(2 * one.checkpoint_bytes)} with a copy of every shard" in sentence(one)
    assert sentence(one).endswith(readable(one.all_bytes)) and "with 2 copies of every" in sentence(many)
    assert disk(1, paths={"runs": "/runs"}) == plain, "nothing is copied where runs lie on a shared disk"


def test_what_a_set_leaves_idle_is_a_remark_of_the_plan() -> None:
    kept = job(zero={"stage": 3, "reshard": "keep"})
    assert make_plan(kept, slurm()).remarks == ()
    over = kept.model_copy(update={"zero": kept.zero.model_copy(update={"stage": 1})}) if kept.zero else kept
    assert [remark.split()[0] for remark in make_plan(over, slurm()).remarks] == ["zero.reshard"]
