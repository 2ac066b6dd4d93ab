"""Ranges that the launcher computes are all that a rank of the engine reads, and no more than it has to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash
from engine_models import MODELS, batches, digest, train, whole_state
from engine_ranks import run_ranks
from test_engine_tensor_zero import _engine as tensor_engine
from test_engine_tensor_zero import _train as train_tensor
from test_engine_tensor_zero import _whole as whole_tensor

from launcher.agent.held import held_in
from launcher.checkpoints import needed
from launcher.contract import ranges
from launcher.contract.manifest import Manifest
from launcher.contract.plain import to_plain
from launcher.contract.topology import Topology
from launcher.contract.train import AdamW, Batch, Data, TrainConfig, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.ranks import Ranks
from launcher.engine.saving.checkpoint import read_manifest
from launcher.engine.zero import ZeroEngine

BUCKETS = {"saved": 3000, "loaded": 1400}


def _make(name: str, precision: str, zero: Zero) -> ZeroEngine:
    if name == "tensor":
        return tensor_engine(Ranks.connect(2), zero.stage, bucket=zero.bucket_bytes)
    config = EngineConfig(zero, AdamW(lr=1e-2, weight_decay=0.1, clip=0.5), precision=precision)
    return ZeroEngine(MODELS[name][0](), config)


def _train(engine: ZeroEngine, name: str) -> None:
    (step,) = batches(1, 12, 37 if name == "tensor" else MODELS[name][1])
    (train_tensor(engine, 0, step) if name == "tensor" else train(engine, [step]))


def _save(rank: int, world: int, name: str, precision: str, folder: str) -> Any:
    engine = _make(name, precision, Zero(3, BUCKETS["saved"]))
    _train(engine, name)
    for buffer in engine.model.buffers():
        buffer += 1.5
    engine.save(folder, 7)
    return _bits(engine)


def _load(rank: int, world: int, name: str, precision: str, zero: Zero, folder: str) -> Any:
    engine = _make(name, precision, zero)
    assert engine.load(str(Path(folder) / str(rank)))[0] == 7
    found = _bits(engine)
    _train(engine, name)
    return found


def _bits(engine: ZeroEngine) -> tuple[str, str]:
    state = whole_tensor(engine) if engine.ranks.degree > 1 else whole_state(engine)
    return digest(state), digest(dict(engine.model.named_buffers()))


def _give_ranges(folder: Path, to: Path, topology: Topology, train_config: TrainConfig, saved: TrainConfig) -> float:
    """A folder a rank, as if each had a disk of its own: the manifest, and ranges of every shard that it reads. What
    of the shards' bytes those are, on average."""
    target, manifest, data = read_manifest(folder, 7)
    headers = {int(rank): row for rank, row in held_in(str(target))["headers"].items()}
    reads = needed.needs(manifest, topology, train_config, saved)
    share = []
    for rank, shards in enumerate(reads):
        own = to / str(rank) / target.name
        own.mkdir(parents=True)
        (own / "manifest.json").write_bytes(data)
        for number, runs in shards.items():
            assert runs is not None
            share.append(_cut(target, manifest, number, headers[number], runs, own))
    return sum(share) / len(share)


def _cut(target: Path, manifest: Manifest, number: int, header: Any, runs: Any, own: Path) -> float:
    shard = manifest.shards[number]
    some = ranges.of_tensors(header["header"], header["base"], runs)
    with (target / shard.file).open("rb") as file:
        data = b"".join(ranges.cut(file, to_plain(shard), some, xxhash.xxh3_128_hexdigest))
    (own / ranges.file_of(number)).write_bytes(data)
    return ranges.count(some) / shard.bytes


def _config(zero: Zero, **more: Any) -> TrainConfig:
    return TrainConfig(zero, AdamW(1e-2), Batch(1, 1), 1, Data(), **more)


@pytest.mark.parametrize(
    ("name", "precision", "before", "after", "zero"),
    [
        (
            "odd",
            "fp32",
            3,
            2,
            Zero(2, BUCKETS["loaded"]),
        ),  # buffers, tied and frozen parameters, sizes that divide nothing
        pytest.param("odd", "fp32", 2, 3, Zero(3, BUCKETS["loaded"]), marks=pytest.mark.full),
        pytest.param("gpt", "bf16", 2, 3, Zero(1, BUCKETS["loaded"]), marks=pytest.mark.full),
        pytest.param("odd", "fp32", 3, 4, Zero(3, BUCKETS["loaded"], replicas=2), marks=pytest.mark.full),
        pytest.param("tensor", "fp32", 4, 6, Zero(3, BUCKETS["loaded"]), marks=pytest.mark.full),
    ],
)
def test_a_rank_reads_all_it_needs_from_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str, before: int, after: int, zero: Zero
) -> None:
    monkeypatch.setattr(ranges, "GAP_BYTES", 0)
    bits = run_ranks(before, _save, name, precision, str(tmp_path / "saved"))
    degree = 2 if name == "tensor" else 1
    topology = Topology((1,) * after, degree, zero.replicas)
    saved = _config(Zero(3, BUCKETS["saved"]), tensor=degree)
    share = _give_ranges(tmp_path / "saved", tmp_path / "given", topology, _config(zero, tensor=degree), saved)
    assert 0.2 < share < 0.9
    assert set(run_ranks(after, _load, name, precision, zero, str(tmp_path / "given"))) == set(bits)
