"""From Slurm's own words to pools that load: sites whose answers differ from the testbed's."""

from __future__ import annotations

from launcher.discover.pools import pools_lines, slurm_lines
from launcher.discover.slurm_facts import (
    Facts,
    Kind,
    accounts_of,
    config_of,
    gpus_of,
    key_values,
    kinds_of,
    partitions_of,
    seconds_of,
)
from launcher.discover.text import scalar
from launcher.specs.load import parse_text
from launcher.specs.models import Cluster
from launcher.specs.pools import in_pool

CONFIG = """\
Configuration data as of 2026-11-29T20:00:00
AccountingStorageEnforce = associations,limits,qos
ClusterName             = uni
DefMemPerCPU            = 4000
EnforcePartLimits       = ALL
MaxMemPerNode           = UNLIMITED
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SLURM_VERSION           = 23.11.4
"""
PARTITIONS = "\n".join(
    [
        "PartitionName=cpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A DefaultTime=01:00:00 "
        "MaxNodes=UNLIMITED MaxTime=UNLIMITED Nodes=c[001-004] PriorityTier=1 PreemptMode=OFF State=UP TotalCPUs=256 "
        "DefMemPerCPU=UNLIMITED MaxMemPerCPU=2000 TRES=cpu=256,mem=1T,node=4,billing=256",
        "PartitionName=gpu AllowGroups=ALL AllowAccounts=physics,bio AllowQos=ALL Default=YES QoS=gpu_limits "
        "DefaultTime=NONE MaxNodes=1 MaxTime=2-00:00:00 Nodes=g[01-03,07] PriorityTier=10 PreemptMode=OFF State=UP",
        "PartitionName=spare Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=08:00:00 Nodes=g[01-03] "
        "PriorityTier=1 PreemptMode=REQUEUE State=UP MaxMemPerNode=256000",
        "PartitionName=old Default=NO MaxTime=08:00:00 Nodes=o1 PriorityTier=1 PreemptMode=OFF State=DRAIN",
    ]
)
SINFO = "\n".join(
    "\x1f".join(fields)
    for fields in [
        ("cpu", "c001", "64", "257000", "(null)", "(null)", "idle"),
        ("cpu", "c002", "64", "257000", "(null)", "(null)", "mixed"),
        ("gpu*", "g01", "64", "515000", "gpu:a100:4(S:0-1)", "nvlink,a100", "idle"),
        ("gpu*", "g02", "64", "515000", "gpu:a100:4(S:0-1)", "nvlink,a100", "allocated"),
        ("gpu*", "g07", "32", "128000", "gpu:v100:2,nvme:1", "(null)", "drained*"),
        ("spare", "g01", "64", "515000", "gpu:a100:4(S:0-1)", "nvlink,a100", "idle"),
        ("spare", "g02", "64", "515000", "gpu:a100:4(S:0-1)", "nvlink,a100", "allocated"),
        ("old", "o1", "8", "16000", "gpu:1", "(null)", "down*"),
    ]
)
FACTS = Facts(config_of(CONFIG), partitions_of(PARTITIONS), kinds_of(SINFO), ("physics", "chem"))


def loaded(facts: Facts = FACTS) -> tuple[Cluster, str]:
    head = ["name: uni", "backend: slurm", "paths: {runs: ~/zerun}"]
    text = "\n".join([*head, *slurm_lines(facts), *pools_lines(facts), ""])
    return parse_text("cluster", text, "uni.yaml"), text


def test_key_value_lines_with_equal_signs_and_blanks_inside() -> None:
    line = "NodeName=n1 Gres=gpu:2 CfgTRES=cpu=16,mem=8G,billing=16 Reason=Not responding [root@2026] OS=Linux 5.1 x"
    assert key_values(line) == {
        "NodeName": "n1",
        "Gres": "gpu:2",
        "CfgTRES": "cpu=16,mem=8G,billing=16",
        "Reason": "Not responding [root@2026]",
        "OS": "Linux 5.1 x",
    }
    assert [gpus_of(g) for g in ("gpu:a100:4(S:0-1)", "gpu:2", "(null)", "craynetwork:4,gpu:v100:2", "gpu")] == [
        (4, "a100"), (2, None), (0, None), (2, "v100"), (0, None),
    ]  # fmt: skip
    assert [seconds_of(t) for t in ("2-00:00:00", "08:00:00", "UNLIMITED", None)] == [172800, 28800, None, None]


def test_every_kind_of_node_of_a_partition_that_is_up_becomes_a_pool() -> None:
    cluster, text = loaded()
    assert list(cluster.pools or ()) == ["gpu-a100", "gpu-v100", "cpu", "spare"] and cluster.pool == "gpu-a100"
    assert (cluster.slots, cluster.cpus_per_slot, cluster.slurm.gpu_type) == (4, 16, "a100")
    assert cluster.memory_per_slot == 515000 // 4 * 2**20 and cluster.time_max == 172800
    old = in_pool(cluster, "gpu-v100")
    assert [n.name for n in old.node_list] == ["g07"] and (old.slots, old.slurm.gpu_type) == (2, "v100")
    cpu = in_pool(cluster, "cpu")
    assert (cpu.slurm.gpus_by, cpu.device.kind, cpu.time_max) == ("none", "cpu", None)
    assert cpu.memory_per_slot == 64 * 2000 * 2**20, "MaxMemPerCPU allows no more"
    assert in_pool(cluster, "spare").memory_per_slot == 64000 * 2**20, "MaxMemPerNode"
    assert "# partition old is DRAIN: no pool is made of it" in text
    for told in ("AllowAccounts: physics,bio", "MaxNodes: a job gets at most 1", "qos gpu_limits", "nvlink,a100"):
        assert told in text
    assert cluster.slurm.account == "physics" and "yours: physics, chem" in text


def test_who_can_lose_nodes_to_whom() -> None:
    pools = loaded()[0].pools or {}
    assert {name for name, pool in pools.items() if pool.preemptible} == {"spare"}
    assert [FACTS.preemption(name) for name in ("gpu", "spare", "cpu")] == [None, "REQUEUE", None]
    by_qos = Facts(
        {"PreemptType": "preempt/qos", "PreemptMode": "CANCEL"},
        {"p": {"PartitionName": "p"}}, {"p": {Kind(8, 8000, 0, None, ""): ("a",)}}, (),
    )  # fmt: skip
    assert by_qos.preemption("p") == "CANCEL" and "zerun resume goes on" in loaded_text(by_qos)
    off = Facts({"PreemptType": "preempt/none", "PreemptMode": "OFF"}, by_qos.partitions, by_qos.kinds, ())
    assert off.preemption("p") is None


def loaded_text(facts: Facts) -> str:
    return "\n".join(pools_lines(Facts(facts.config, {"p": {"PartitionName": "p", "State": "UP"}}, facts.kinds, ())))


def test_accounts_and_words() -> None:
    assert accounts_of("bio|chem\nbio|bio\n|x\n", "u") == ("bio", "chem", "x")
    assert accounts_of("", "u") == ()
    no_account = Facts(FACTS.config, FACTS.partitions, FACTS.kinds, ())
    assert any("FILL IN account" in line for line in slurm_lines(no_account))
    for text in ("node[01-04]", "1:30:00", "a: b", "x:", "null", "# c", "0123", "é", "", "- a"):
        cluster = parse_text("job", f"name: n\nprogram: {{argv: [a]}}\nenv:\n  A: {scalar(text)}\n", "j.yaml")
        assert dict(cluster.env) == {"A": text}
