"""Plain JSON, manifests, folders, rank arithmetic: what crosses machines must read back equal, or say why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.contract import folder, partition
from launcher.contract.errors import DescriptionError, Exit, Problem, exit_of_signal
from launcher.contract.launch import LaunchSpec, Node
from launcher.contract.manifest import FORMAT, Manifest, ShardFile
from launcher.contract.partition import Parameter
from launcher.contract.plain import PlainError, dumps, from_plain, to_plain, write_atomically
from launcher.contract.records import Outcome
from launcher.contract.topology import Topology
from launcher.contract.train import GPT, AdamW, Batch, Data, Evaluate, TrainConfig, Zero

CONFIG = TrainConfig(
    zero=Zero(3),
    optimizer=AdamW(3e-4, betas=(0.9, 0.95)),
    batch=Batch(8, 2),
    steps=10,
    data=Data(text="python-stdlib"),
    gpt=GPT(2, 32, 2, 16),
    evaluate=Evaluate(5, 100),
)
SPEC = LaunchSpec(
    run="r-é",
    attempt=2,
    run_dir="/runs/r",
    runtime="/runs/.blobs/x.zip",
    nodes=(Node("a", 2), Node("b", 3, devices=(1, 2, 3))),
    shared=True,
    token="t",
    python="python3",
    agent_python="python3",
    train=CONFIG,
    env={"A": 'x,"y" $Z\n=%j'},
    ports=(20000, 29999),
)


def test_launch_spec_survives_json() -> None:
    assert from_plain(LaunchSpec, json.loads(dumps(SPEC))) == SPEC
    assert dumps(SPEC) == dumps(from_plain(LaunchSpec, to_plain(SPEC)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"atempt": 1}, "LaunchSpec: unknown key 'atempt'"),
        ({"attempt": "2"}, "LaunchSpec.attempt: int was expected, not '2'"),
        ({"attempt": True}, "LaunchSpec.attempt"),
        ({"nodes": [{"name": "a"}]}, r"nodes\[0\]: 'slots' is missing"),
        ({"ports": [1, 2, 3]}, "2 values were expected, not 3"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(change: dict[str, object], words: str) -> None:
    with pytest.raises(PlainError, match=words):
        from_plain(LaunchSpec, {**to_plain(SPEC), **change})


def test_a_manifest_survives_json_and_another_format_is_refused() -> None:
    layout = partition.build([("u", [Parameter("w", (5,), tied=("v",))])], ranks=2, bucket_bytes=100)
    shard = ShardFile(0, "n1", "rank-00000.safetensors", 10, "aa", ("bb",))
    manifest = Manifest(FORMAT, "r", 1, 100, 3200, 32, 7, layout, (shard, replace(shard, rank=1)), extra={"k": [1]})
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.bytes == 20
    with pytest.raises(ValueError, match="format 9"):
        Manifest.from_bytes(json.dumps({"format": 9}).encode())
    with pytest.raises(PlainError, match="'run' is missing"):
        Manifest.from_bytes(json.dumps({"format": FORMAT}).encode())


def test_ints_stand_for_floats_and_numbers_must_be_finite() -> None:
    assert from_plain(Outcome, {"outcome": "done", "step": 3, "train_loss": 2}).train_loss == 2.0
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps(Outcome("done", 3, train_loss=float("nan")))


def test_writing_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    write_atomically(target, b"one", durable=True, mode=0o600)
    assert target.read_bytes() == b"one"
    assert target.stat().st_mode & 0o777 == 0o600
    target.unlink()
    target.mkdir()  # a rename onto a folder fails
    with pytest.raises(OSError, match=r"."):
        write_atomically(target, b"two")
    assert list(tmp_path.iterdir()) == [target]


def test_the_run_folder() -> None:
    run = folder.RunFolder.at("/runs", "gpt-1")
    attempt = run.attempt(3)
    assert str(attempt.log(12)) == "/runs/gpt-1/attempts/3/logs/rank-00012.log"
    assert str(run.checkpoint(250).shard(3)) == "/runs/gpt-1/checkpoints/step-00000250/rank-00003.safetensors"
    assert folder.step_of("step-00000250") == 250
    assert folder.step_of("step-250") is None
    assert folder.rank_of("rank-00003.safetensors") == 3
    for name in ("", "../x", "-rf", "a/b", "a..b", "a b", "a\n"):
        assert not folder.is_safe_name(name), name
        with pytest.raises(ValueError, match="unsafe"):
            folder.RunFolder.at("/runs", name)


def test_ranks_are_numbered_node_by_node() -> None:
    topology = Topology((4, 2, 2), tensor=2)
    assert topology.world_size == 8 and topology.data_parallel == 4
    assert [topology.node_rank(r) for r in range(8)] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [topology.local_rank(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 0, 1]
    assert list(topology.tensor_group(5)) == [4, 5]
    assert list(topology.data_group(5)) == [1, 3, 5, 7]
    assert all(topology.node_rank(r) == topology.node_rank(topology.tensor_group(r)[0]) for r in range(8))
    with pytest.raises(ValueError, match="tensor groups of 3"):
        Topology((4, 4), tensor=3)
    with pytest.raises(ValueError, match="rank 8"):
        topology.node_rank(8)


def test_errors_keep_reading_order_and_signals_never_count_as_success() -> None:
    error = DescriptionError([Problem("b", 2, 1, "x"), Problem("a", 9, 1, "y"), Problem("a", 0, 0, "z")])
    assert str(error).splitlines() == ["a: z", "a:9:1: y", "b:2:1: x"]
    assert error.exit_code is Exit.USAGE
    assert exit_of_signal(9) == 137
