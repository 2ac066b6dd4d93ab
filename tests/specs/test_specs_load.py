# ruff: noqa: E501  (descriptions on one line)
"""Descriptions that are right: text stays text, what follows from what was written, and the way through run.json."""

from __future__ import annotations

import copy
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from launcher.contract.errors import DescriptionError, UsageError
from launcher.specs import (
    Cluster,
    Job,
    cluster_from_plain,
    describe,
    find_cluster,
    job_from_plain,
    load_cluster,
    load_job,
    parse_text,
    split_sets,
)
from launcher.specs.models import FactoryModel, GptModel, Nodes
from launcher.specs.values import Text

ROOT = Path(__file__).parents[2]

SLURM = """
name: uni
backend: slurm
slurm: {partition: NO, account: 0123, qos: null, gpus_by: gres, gpu_type: a100, extra: {mail-type: END, hold: null, comment: 1e3}}
nodes: {names: "gpu[01-25]", slots: 4, cpus_per_slot: 16, memory_per_slot: 120GiB, time_max: 1:30:00}
device: {kind: gpu, model: A100, memory: 81920MiB, reserve: 2GiB, peak_flops: {bf16: 312T}, precisions: [bf16, fp32]}
network: {inside: 600GB/s, between: 200Gbps, interface: ib0, ports: 20000-29999}
paths: {runs: "/lustre/$USER/zerun"}
setup: |
  module load cuda
env: {A: yes, B: 0x10, C: 1_000, D: "", E: 'it''s', F: "a\\nb", G: 2024-01-01, H: ~user}
"""

JOB = """
name: gpt
nodes: 4
time: 30
model: {kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}
data: {text: python-stdlib}
zero: {stage: 2, bucket: 25MB}
optimizer: {lr: 3e-4, betas: [0.9, .95], clip: 1}
batch: {global: 64, micro: 8}
steps: 200
checkpoint: {every: 30min, keep: 3}
"""


OWN = JOB.replace("python-stdlib}", "python-stdlib, options: {seq_len: 128}}")  # for a model of one's own


def test_text_stays_text() -> None:
    cluster = parse_text("cluster", SLURM, "uni.yaml")
    assert (cluster.slurm.partition, cluster.slurm.account, cluster.slurm.qos) == ("NO", "0123", None)
    assert cluster.slurm.extra == {"mail-type": "END", "hold": None, "comment": "1e3"}
    assert cluster.env == {
        "A": "yes", "B": "0x10", "C": "1_000", "D": "", "E": "it's", "F": "a\nb", "G": "2024-01-01", "H": "~user",
    }  # fmt: skip
    assert cluster.setup == "module load cuda\n"


def test_numbers_and_units() -> None:
    cluster = parse_text("cluster", SLURM, "uni.yaml")
    assert isinstance(cluster.nodes, Nodes)
    assert cluster.time_max == 5400
    assert cluster.memory_per_slot == 120 * 2**30
    assert cluster.network.between == 25 * 10**9
    assert cluster.network.ports == (20000, 29999)
    assert cluster.device.peak_flops == {"bf16": 312 * 10**12}
    assert cluster.device.computes("bf16") and not cluster.device.computes("fp16")
    job = parse_text("job", JOB, "gpt.yaml")
    assert job.time == 1800
    assert job.optimizer is not None and job.optimizer.betas == (0.9, 0.95)
    assert (job.checkpoint.every_steps, job.checkpoint.every_s, job.checkpoint.keep) == (None, 1800, 3)
    assert parse_text("job", JOB.replace("30min", "50"), "gpt.yaml").checkpoint.every_steps == 50
    assert job.batch is not None and (job.batch.global_, job.batch.accumulation) == (64, None)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for pair in value.items() for part in pair for leaf in _leaves(part)]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value]


def test_nothing_of_the_reader_is_left_in_a_model() -> None:
    job = OWN.replace("kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256", "factory: a:b, options: {x: [y, 1]}")
    for model in (
        parse_text("cluster", SLURM, "x"),
        parse_text("job", JOB + "slots_per_node: all\n", "x"),
        parse_text("job", job, "x"),
    ):
        assert not [leaf for leaf in _leaves(model.model_dump()) if isinstance(leaf, Text)]


def test_node_list_keeps_order_and_padding() -> None:
    cluster = parse_text("cluster", SLURM, "x")
    assert [n.name for n in cluster.node_list][:2] == ["gpu01", "gpu02"]
    assert {n.slots for n in cluster.node_list} == {4}
    listed = "name: x\nbackend: direct\npaths: {runs: ~/z}\nnodes:\n- {name: b, slots: 2}\n- {name: a, address: 10.0.0.1, devices: [0, 3]}\n"
    cluster = parse_text("cluster", listed, "x")
    assert [(n.name, n.slots, n.address, n.devices) for n in cluster.node_list] == [
        ("b", 2, None, None),
        ("a", 2, "10.0.0.1", (0, 3)),
    ]
    assert cluster.slots == 2 and cluster.cpus_per_slot is None


def test_slurm_without_names_lets_slurm_choose() -> None:
    cluster = parse_text("cluster", "name: x\nbackend: slurm\nnodes: {slots: 3}\npaths: {runs: /r}\n", "x")
    assert cluster.node_list == () and cluster.slots == 3 and not cluster.local


def test_the_laptop_cluster_needs_three_lines() -> None:
    cluster = parse_text("cluster", "name: me\nbackend: ssh\nnodes: {names: localhost, slots: 2}\n", "x")
    assert cluster.local and cluster.backend == "direct"
    assert cluster.python == cluster.agent_python == sys.executable
    assert cluster.paths.runs == "" and cluster.paths.shared
    same = parse_text("cluster", 'name: me\nbackend: direct\nnodes: [{name: localhost}]\npython: ""\nssh:\n', "x")
    assert same.local and same.python == sys.executable
    other = parse_text("cluster", "name: me\nbackend: direct\nnodes: {names: localhost}\npython: /v/python\n", "x")
    assert other.python == "/v/python" and other.agent_python == sys.executable


@pytest.mark.parametrize(
    "more", ["ssh: {port: 2222}", "nodes: {names: 'localhost,b'}", "nodes: [{name: localhost, address: 10.0.0.2}]"]
)
def test_other_clusters_are_not_the_laptop(more: str) -> None:
    nodes = "" if more.startswith("nodes") else "nodes: {names: localhost}\n"
    text = f"name: me\nbackend: direct\n{nodes}{more}\n"
    with pytest.raises(DescriptionError, match="runs is missing"):
        parse_text("cluster", text, "x")
    cluster = parse_text("cluster", text + "paths: {runs: ~/zerun}\n", "x")
    assert not cluster.local and cluster.python == cluster.agent_python == "python3"


def test_null_means_not_written() -> None:
    job = parse_text("job", JOB + "evaluate: null\nseed: ~\ncode:\n", "x")
    assert job.evaluate is None and job.seed == 0 and job.code.limit == 50_000_000


def test_options_are_read_as_yaml() -> None:
    text = OWN.replace(
        "{kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}",
        '{factory: "my.pkg:make", loss: "my:loss", options: {size: 1b, n: 3, f: 1e-3, t: true, q: "3", no: no, l: [1, {a: null}], z: .5}}',
    )
    model = parse_text("job", text, "x").model
    assert isinstance(model, FactoryModel)
    assert model.options == {
        "size": "1b", "n": 3, "f": 0.001, "t": True, "q": "3", "no": "no", "l": (1, {"a": None}), "z": 0.5,
    }  # fmt: skip


def test_anchors_are_fine() -> None:
    cluster = parse_text("cluster", SLURM + "ssh: &s {}\nlogin: {host: &h login1, user: *h}\n", "x")
    assert cluster.login is not None and cluster.login.user == "login1"
    assert parse_text("cluster", SLURM.replace("\n", "\r\n"), "x") == parse_text("cluster", SLURM, "x")
    assert parse_text("cluster", b"\xef\xbb\xbf" + SLURM.encode(), "x").name == "uni"


# --- --set ----------------------------------------------------------------------------------------


def test_sets_override_and_add() -> None:
    sets = [
        "nodes=2",
        "zero.stage=3",
        "optimizer.betas=[0.8, 0.9]",
        "evaluate.every=10",
        "env.X=[a: 'b, $c",
        "env.Y=",
        "time=null",
    ]
    job = parse_text("job", JOB, "x", sets)
    assert (job.nodes, job.time) == (2, None)
    assert job.zero is not None and job.zero.stage == 3
    assert job.optimizer is not None and job.optimizer.betas == (0.8, 0.9)
    assert job.evaluate is not None and (job.evaluate.every, job.evaluate.tokens) == (10, 65536)
    assert job.env == {"X": "[a: 'b, $c", "Y": ""}
    assert parse_text("job", JOB, "x", ["zero.stage=1", "zero.stage=0"]).zero.stage == 0  # type: ignore[union-attr]


def test_sets_on_a_cluster() -> None:
    for_job, for_cluster = split_sets(["nodes=2", "cluster.slurm.partition=NO", "cluster=uni"])
    assert (for_job, for_cluster) == (["nodes=2", "cluster=uni"], ["cluster.slurm.partition=NO"])
    assert parse_text("cluster", SLURM.replace("NO", "x"), "x", for_cluster).slurm.partition == "NO"
    listed = "name: x\nbackend: direct\npaths: {runs: ~/z}\nnodes:\n- {name: b, slots: 2}\n- {name: a}\n"
    assert parse_text("cluster", listed, "x", ["nodes.1.slots=8"]).node_list[1].slots == 8


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("optimizer.lr=fast", "--set optimizer.lr: a number was expected, not 'fast'"),
        ("optimizer.rl=1", "--set optimizer.rl: unknown key 'rl' (did you mean 'lr'?); accepted: kind, "),
        ("nodes=0", "--set nodes: 0 is out of range; accepted: at least 1"),
        ("batch.global=63", "--set batch.global: global 63 is not a multiple of micro 8; accepted near it: 56 and 64, or"),
        ("name.x=1", "--set name.x: name holds no keys to set"),
        ("optimizer.betas.7=1", "--set optimizer.betas.7: '7' is not an item of a list of 2; accepted: 0 to 1"),
        ("optimizer.betas=[0.9", "--set optimizer.betas: not YAML: "),
        ("steps", "--set: 'steps' is not an assignment; accepted: key=value"),
        ("a..b=1", "--set: 'a..b=1' is not an assignment"),
        ("env.RANK=1", "--set env.RANK: RANK is set by the launcher"),
    ],
)
def test_set_mistakes_name_the_flag(assignment: str, says: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_text("job", JOB, "gpt.yaml", [assignment])
    assert says in str(caught.value)


def test_set_mistakes_on_a_cluster_name_the_flag_as_it_was_given() -> None:
    with pytest.raises(DescriptionError, match=r"^--set cluster\.slurm\.partiton: unknown key 'partiton'"):
        parse_text("cluster", SLURM, "x", ["cluster.slurm.partiton=x"])


# --- frozen, and through run.json -----------------------------------------------------------------


def test_descriptions_are_frozen_all_the_way_down() -> None:
    cluster, job = parse_text("cluster", SLURM, "x"), parse_text("job", JOB, "x", ["env.A=1"])
    for change in (
        lambda: setattr(cluster, "name", "y"),
        lambda: setattr(cluster.slurm, "partition", "y"),
        lambda: cluster.env.__setitem__("A", "y"),
        lambda: cluster.env.update(A="y"),
        lambda: cluster.slurm.extra.pop("hold"),
        lambda: job.env.setdefault("B", "y"),
        lambda: job.env.clear(),
        lambda: job.env.__ior__({"B": "y"}),
    ):
        with pytest.raises((TypeError, ValidationError)):
            change()
    assert hash(cluster) == hash(parse_text("cluster", SLURM, "x"))
    assert copy.deepcopy(cluster) == cluster == pickle.loads(pickle.dumps(cluster))  # noqa: S301
    assert job.model_copy(update={"nodes": 2}).nodes == 2


PROGRAM = 'name: p\nprogram: {argv: [python, train.py, --lr, 1e-3, "a b"], stop_signal: SIGUSR1, stop_grace: 120s}\nsecrets: [K]\n'
FACTORY = OWN.replace(
    "{kind: gpt, layers: 8, hidden: 512, heads: 8, seq_len: 256}", "{factory: a:b, options: {l: [1, {a: null}]}}"
)
JOBS = [
    JOB,
    JOB.replace("30min", "50"),
    PROGRAM,
    FACTORY,
    JOB.replace("global: 64, micro: 8", "micro: 8, accumulation: 2"),
]
CLUSTERS = [
    SLURM,
    SLURM + "login: {host: h, port: 22}\nssh: {jump: 'me@gate:22,b', key: /k}\n",
    "name: l\nbackend: direct\nnodes: {names: localhost}\n",
    "name: l\nbackend: direct\nnodes: [{name: a, devices: [1]}, {name: b}]\npaths: {runs: $HOME/z, shared: false}\nssh: {connections: 3}\n",
]


@pytest.mark.parametrize("text", JOBS)
def test_a_job_comes_back_from_run_json(text: str) -> None:
    job = parse_text("job", text, "x")
    plain = json.loads(json.dumps(describe(job)))
    assert job_from_plain(plain) == job
    assert parse_text("job", _yaml(plain), "again.yaml") == job


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_cluster_comes_back_from_run_json(text: str) -> None:
    cluster = parse_text("cluster", text, "x")
    plain = json.loads(json.dumps(describe(cluster)))
    assert cluster_from_plain(plain) == cluster
    assert parse_text("cluster", _yaml(plain), "again.yaml") == cluster


def _yaml(plain: Any) -> str:
    out = io.StringIO()
    YAML(typ="safe").dump(plain, out)
    return out.getvalue()


def test_a_damaged_run_json_is_told_by_its_keys() -> None:
    plain = describe(parse_text("job", JOB, "x"))
    plain["zero"]["stage"] = 9
    with pytest.raises(DescriptionError, match=r"the job in run\.json: zero\.stage: 9 is not accepted"):
        job_from_plain(plain)


def test_python_callers_get_the_same_checks() -> None:
    with pytest.raises(ValidationError, match="cannot be divided"):
        GptModel(kind="gpt", layers=1, hidden=10, heads=3, seq_len=8)
    assert Job.model_validate({"name": "x", "program": {"argv": ["true"]}}).nodes == 1
    assert Cluster.model_validate({"name": "l", "backend": "direct", "nodes": {"names": "localhost"}}).local


# --- files ----------------------------------------------------------------------------------------


def test_a_hostfile_is_read_beside_its_cluster_and_kept(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("b slots=3\na # default\n")
    file = tmp_path / "lab.yaml"
    file.write_text(
        "name: lab\nbackend: direct\nnodes: {hostfile: hosts.txt, slots: 2, time_max: 2h}\npaths: {runs: ~/z}\n"
        "ssh: {config: conf/ssh_config, key: keys/id}\n"
    )
    cluster = load_cluster(file)
    assert [(n.name, n.slots) for n in cluster.node_list] == [("b", 3), ("a", 2)]
    assert cluster.ssh.config == str(tmp_path / "conf/ssh_config") and cluster.ssh.key == str(tmp_path / "keys/id")
    (tmp_path / "hosts.txt").unlink()
    again = cluster_from_plain(json.loads(json.dumps(describe(cluster))))
    assert again == cluster and [n.name for n in again.node_list] == ["b", "a"]


def test_hostfile_mistakes_stand_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("a\na\n")
    file = tmp_path / "lab.yaml"
    file.write_text("name: lab\nbackend: direct\nnodes: {hostfile: hosts.txt}\npaths: {runs: r}\n")
    with pytest.raises(DescriptionError) as caught:
        load_cluster(file)
    assert [(Path(p.file).name, p.line, p.column) for p in caught.value.problems] == [
        ("hosts.txt", 2, 1),
        ("lab.yaml", 4, 15),
    ]
    file.write_text("name: lab\nbackend: direct\nnodes: {hostfile: host.txt}\npaths: {runs: /r}\n")
    with pytest.raises(DescriptionError, match=r"lab\.yaml:3:19: cannot read .*host\.txt: No such file"):
        load_cluster(file)


def test_paths_in_a_job_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "j.yaml"
    file.write_text(JOB + "code: {root: ..}\ncluster: ../clusters/x.yaml\n")
    job = load_job(file)
    assert job.code.root == str(tmp_path) and job.cluster == str(tmp_path / "clusters/x.yaml")
    assert load_job(file, ["cluster=laptop"]).cluster == "laptop"
    with pytest.raises(UsageError, match=r"cannot read .*no\.yaml: No such file"):
        load_job(tmp_path / "no.yaml")


def test_find_cluster(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    (theirs / "laptop.yaml").touch()
    (theirs / "uni.yml").touch()
    (mine / "laptop.yaml").touch()
    assert find_cluster("laptop", [mine, tmp_path / "none", theirs]) == mine / "laptop.yaml"
    assert find_cluster("uni", [mine, theirs]) == theirs / "uni.yml"
    assert find_cluster(str(theirs / "laptop.yaml"), []) == theirs / "laptop.yaml"
    with pytest.raises(
        UsageError, match=r"no cluster is called 'labtop' \(did you mean 'laptop'\?\); known: laptop, uni"
    ):
        find_cluster("labtop", [mine, theirs])
    with pytest.raises(UsageError, match="no cluster file"):
        find_cluster("./laptop.yaml", [mine])


# --- what ships -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dgx2-25", "laptop", "slurm-site", "ssh-lab"])  # beside them lie one's own
def test_shipped_clusters(name: str) -> None:
    cluster = load_cluster(ROOT / "clusters" / f"{name}.yaml")
    assert cluster.name == name
    assert cluster_from_plain(json.loads(json.dumps(describe(cluster)))) == cluster


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_jobs(path: Path) -> None:
    job = load_job(path)
    assert job.name == path.stem
    assert job_from_plain(json.loads(json.dumps(describe(job)))) == job


def test_the_trio_differs_in_the_stage_alone() -> None:
    jobs = [describe(load_job(ROOT / "jobs" / f"stage{n}.yaml")) for n in (1, 2, 3)]
    assert [job["zero"].pop("stage") for job in jobs] == [1, 2, 3]
    assert [job.pop("name") for job in jobs] == ["stage1", "stage2", "stage3"]
    assert jobs[0] == jobs[1] == jobs[2]


def test_dgx2_is_what_was_asked_for() -> None:
    cluster = load_cluster(ROOT / "clusters" / "dgx2-25.yaml")
    assert len(cluster.node_list) == 25 and cluster.slots == 16
    assert cluster.device.memory == 32510 * 2**20
    assert cluster.network.between == 10**11 and cluster.network.inside == 3 * 10**11
    assert cluster.device.computes("fp16") and not cluster.device.computes("bf16")


def test_what_is_planned_but_not_trained_is_read() -> None:
    """Recomputation, tensor parallelism and narrow gradients load; planning refuses them when a job starts."""
    planned = "parallel: {tensor: 2}\nprecision: bf16\nrecompute: block\nactivations: host\n"
    job = parse_text("job", JOB.replace("bucket: 25MB", "gradient_dtype: bf16") + planned, "f")
    assert job.zero is not None and job.zero.gradient_dtype == "bf16"
    assert (job.parallel.tensor, job.recompute, job.activations) == (2, "block", "host")
    some = parse_text("job", JOB + "recompute: [7, 0]\n", "f")
    assert some.recompute == (0, 7)
    for kept in (job, some):
        assert job_from_plain(json.loads(json.dumps(describe(kept)))) == kept


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("recompute: all", "'all' is not accepted; accepted: none, block, or a list of blocks that counts from 0"),
        ("recompute: []", "a list is not accepted"),
        ("recompute: [1, 1]", "a list is not accepted"),
        ("recompute: [8]", "block 8 is not there; accepted: 0 to 7"),
        ("activations: host", "activations: host needs recompute: it moves what recompute stores"),
    ],
)
def test_recompute_refuses_what_it_cannot_mean(line: str, said: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        parse_text("job", JOB + line + "\n", "f")
    assert said in str(caught.value)


def test_a_model_of_ones_own_over_token_files_says_how_long_its_samples_are() -> None:
    with pytest.raises(DescriptionError, match=r"f:6:1: a model of your own over token files"):
        parse_text("job", FACTORY.replace(", options: {seq_len: 128}", ""), "f")
    with pytest.raises(DescriptionError, match="options go with data"):
        parse_text("job", OWN, "f")
