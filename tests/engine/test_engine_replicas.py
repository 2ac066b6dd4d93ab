"""Replicas: partitioned inside a group of ranks, summed and copied across; and the library's own sum at stage 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_models import MODELS, batches, digest, relative, train, undistributed, whole_state
from engine_ranks import outcomes, run_ranks

from launcher.checkpoints import needed_shards, relayout
from launcher.contract import partition
from launcher.contract.errors import UsageError
from launcher.contract.topology import Topology
from launcher.contract.train import AdamW, Zero
from launcher.engine.comm import Alone, NativeComm
from launcher.engine.config import EngineConfig
from launcher.engine.job.loop import traffic_of
from launcher.engine.ranks import Ranks, checked_topology
from launcher.engine.saving.checkpoint import read_manifest
from launcher.engine.zero import ZeroEngine

OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)


def _engine(
    stage: int,
    replicas: int,
    name: str = "gpt",
    dtype: torch.dtype = torch.float32,
    precision: str = "fp32",
    accumulation: int = 1,
    **zero: Any,
) -> ZeroEngine:
    settings = Zero(stage, **{"bucket_bytes": 3000, "replicas": replicas, **zero})
    config = EngineConfig(settings, OPTIMIZER, accumulation=accumulation, precision=precision)
    return ZeroEngine(MODELS[name][0]().to(dtype), config)


def _state_is_exact(engine: ZeroEngine) -> None:
    memory = engine.memory()
    assert tuple(memory[k] for k in ("parameters", "gradients", "optimizer")) == tuple(engine.state_bytes())
    assert memory["gathered"] == 0
    group = engine.shard.size
    for flat in engine.units:
        unit, item = flat.unit, flat.full.element_size()
        assert unit.shard_numel * group == unit.padded < unit.numel + group * engine.ranks.replica.size
        if flat.shard is not None:
            assert flat.shard.untyped_storage().nbytes() == unit.shard_numel * item


def _parity(rank: int, world: int, name: str, dtype: torch.dtype, count: int, bounds: tuple[float, float]) -> None:
    """Every stage on two replicas of two ranks, after every step; then the stages' bits."""
    steps = batches(count, 8, MODELS[name][1])
    losses, states = undistributed(name, steps, OPTIMIZER, dtype)
    bits = set()
    for stage in range(4):
        engine = _engine(stage, 2, name, dtype)
        history = []
        for number, batch in enumerate(steps):
            history += train(engine, [batch])
            assert abs(history[-1][0] - losses[number]) < bounds[0] * losses[number], (stage, number)
            found = whole_state(engine)
            assert max(relative(found[n], v) for n, v in states[number].items()) < bounds[1], (stage, number)
        _state_is_exact(engine)
        bits.add((tuple(history), digest(found)))
    assert len(bits) == 1, "the stages have the same bits, with replicas too"


@pytest.mark.parametrize("name", ["gpt", pytest.param("odd", marks=pytest.mark.full)])
def test_float64_equals_undistributed_after_every_step(name: str) -> None:
    run_ranks(4, _parity, name, torch.float64, 4, (1e-12, 1e-12))


def _collectives(rank: int, world: int) -> None:
    """The library's collectives in place of messages between ranks, as on NCCL: the same training, the same counts."""
    topology, groups = Topology((world,), 1, 2), {}
    for of in (topology.shard_group, topology.replica_group):
        for members in dict.fromkeys(of(r) for r in range(world)):
            made = dist.new_group(list(members))
            if rank in members:
                groups[of] = NativeComm(made)
    everyone = NativeComm()
    ranks = Ranks(everyone, everyone, Alone(), *groups.values())
    steps = batches(3, 8, 37)
    losses, states = undistributed("gpt", steps, OPTIMIZER, torch.float64)
    for stage in range(4):
        config = EngineConfig(Zero(stage, 3000, replicas=2), OPTIMIZER)
        engine = ZeroEngine(MODELS["gpt"][0]().double(), config, ranks=ranks)
        before = traffic_of(ranks)["replica_volume_elements"]
        assert [loss for loss, _ in train(engine, steps)] == pytest.approx(losses, rel=1e-12)
        found = whole_state(engine)
        assert max(relative(found[n], v) for n, v in states[-1].items()) < 1e-12, stage
        psi = sum(u.padded for u in engine.layout.units)
        assert traffic_of(ranks)["replica_volume_elements"] - before == 3 * 2 * psi // 2


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_librarys_collectives_do_the_same() -> None:
    run_ranks(4, _collectives)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_float32_stays_close_to_undistributed(name: str) -> None:
    run_ranks(4, _parity, name, torch.float32, 20, (1e-5, 1e-4))


def _volume(rank: int, world: int, replicas: int) -> None:
    """Inside 2Ψ and 3Ψ − kept as without replicas; between them the shard's all-reduce, once a step."""
    for stage in range(4):
        for accumulation in (1, 2):
            engine = _engine(stage, replicas, accumulation=accumulation)
            before = traffic_of(engine.ranks)
            train(engine, batches(1, 2 * world, 37))
            after = traffic_of(engine.ranks)
            sent = {key: after[key] - before[key] for key in after}
            units, group = engine.layout.units, world // replicas
            psi = sum(u.padded for u in units)
            times = accumulation if stage >= 2 else 1
            expected = times * psi + psi
            if stage == 3:
                assert engine.gathering is not None
                kept = sum(units[i].padded for i in engine.gathering.kept)
                expected = times * psi + accumulation * (2 * psi - kept)
            assert sent["volume_elements"] == expected, (stage, accumulation)
            assert sent["sent_bytes"] == expected * 4 * (group - 1) // group
            assert sent["replica_volume_elements"] == 2 * psi // group, (stage, accumulation)
            assert sent["replica_sent_bytes"] == 2 * psi // group * 4 * (replicas - 1) // replicas
            wide = max(min(u.bucket, u.padded) for u in units)
            share = wide // group
            others = wide - share + share - share // replicas  # what is sent inside a group, and across
            assert engine.memory()["buckets"] == 2 * ((wide if stage >= 2 else 0) + others) * 4
            _state_is_exact(engine)


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.full)])
def test_bytes_inside_and_between_are_counted_apart(replicas: int) -> None:
    run_ranks(2 * replicas, _volume, replicas)


def _save(rank: int, world: int, folder: str, stage: int, replicas: int) -> Any:
    engine = _engine(stage, replicas, "odd")
    train(engine, batches(2, 12, 13))
    engine.save(folder, 2)
    bits = digest(whole_state(engine))
    return bits, train(engine, batches(1, 12, 13, seed=3))


def _load(rank: int, world: int, folder: str, stage: int, replicas: int) -> Any:
    engine = _engine(stage, replicas, "odd")
    assert engine.load(folder)[0] == 2
    bits = digest(whole_state(engine))
    return bits, train(engine, batches(1, 12, 13, seed=3))


def test_each_shard_is_saved_once_and_read_with_and_without_replicas(tmp_path: Path) -> None:
    """Saved by two replicas and by none; each read by both."""
    cells = [(4, 3, 2), (2, 1, 1)]  # world, stage, replicas
    for number, (world, stage, replicas) in enumerate(cells):
        folder = str(tmp_path / str(number))
        saved = run_ranks(world, _save, folder, stage, replicas)
        manifest = read_manifest(Path(folder), 2)[1]
        files = sorted(p.name for p in Path(folder, "step-00000002").iterdir())
        assert [s.rank for s in manifest.shards] == list(range(world // replicas))
        assert files == ["manifest.json", *(s.file for s in manifest.shards)], "the other replicas write nothing"
        for other in cells[: 2 - number]:
            found = run_ranks(other[0], _load, folder, other[1], other[2])
            assert {bits for bits, _ in found} == {saved[0][0]}
            if other == (world, stage, replicas):
                assert found[0][1] == saved[0][1], "and goes on to the bit"


def test_a_node_of_another_replica_is_brought_the_first_ones_shards() -> None:
    """Where nothing is shared a node reads what it did not write."""
    rows = partition.gpt_parameters(1, 8, 8, 16)
    old = partition.build(rows, ranks=2, bucket_bytes=1000, tensor=2, replicas=2)
    same = relayout(old, 2, 1000, replicas=2)
    assert same == old
    assert needed_shards(old, same, range(4, 8)) == {0, 1, 2, 3} == needed_shards(old, same, range(4))
    assert needed_shards(old, same, [6]) == needed_shards(old, same, [2]) == {2}
    assert needed_shards(old, relayout(old, 4, 1000), [0]) < {0, 1, 2, 3}


def _narrow(rank: int, world: int) -> None:
    bits = set()
    for stage in (0, 1, 2, 3):
        engine = _engine(stage, 2, precision="bf16")
        history = train(engine, batches(2, 4, 37))
        _state_is_exact(engine)
        bits.add((tuple(history), digest(whole_state(engine))))
    assert len(bits) == 1, "sums are in fp32, of whatever messages"


@pytest.mark.full
def test_16_bits_with_replicas() -> None:
    run_ranks(4, _narrow)


def test_what_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"zero\.replicas: 4 data-parallel ranks cannot form 3 equal replicas"):
        checked_topology((2, 2), 1, 3)
    with pytest.raises(UsageError, match=r"zero\.replicas: 2 leaves one data-parallel rank to each"):
        checked_topology((2, 2), 2, 2)
    with pytest.raises(UsageError, match=r"zero\.replicas: 2 needs as many ranks"):
        Ranks.connect(replicas=2)
    with pytest.raises(UsageError, match=r"native is the library's all-reduce"):
        EngineConfig(Zero(1, reduce_with="native"), OPTIMIZER)


def _other_ranks(rank: int, world: int) -> None:
    config = EngineConfig(Zero(1, replicas=2), OPTIMIZER)
    ZeroEngine(MODELS["gpt"][0](), config, ranks=Ranks.connect())


def test_ranks_that_were_connected_otherwise_are_refused() -> None:
    for ok, said in outcomes(2, _other_ranks):
        assert not ok and "zero.replicas is 2, but the ranks were connected for 1" in said


# --- the library's sum ---------------------------------------------------------------------------------


def _native(rank: int, world: int, name: str, dtype: torch.dtype, count: int, bounds: tuple[float, float]) -> str:
    steps = batches(count, 2 * world, MODELS[name][1])
    losses, states = undistributed(name, steps, OPTIMIZER, dtype)
    engine = _engine(0, 1, name, dtype, reduce_with="native")
    for number, batch in enumerate(steps):
        before = engine.comm.traffic.volume_elements
        loss, _ = train(engine, [batch])[0]
        psi = sum(u.padded for u in engine.layout.units if u.trainable)
        assert engine.comm.traffic.volume_elements - before == 2 * psi
        assert abs(loss - losses[number]) < bounds[0] * losses[number], number
        found = whole_state(engine)
        assert max(relative(found[n], v) for n, v in states[number].items()) < bounds[1], number
    _state_is_exact(engine)
    assert engine.memory()["buckets"] == 0, "the library sums in place"
    return digest(found)


@pytest.mark.parametrize(
    ("world", "name", "dtype", "bounds"),
    [
        (3, "odd", torch.float64, (1e-12, 1e-12)),
        pytest.param(4, "gpt", torch.float64, (1e-12, 1e-12), marks=pytest.mark.full),
        pytest.param(3, "odd", torch.float32, (1e-5, 1e-4), marks=pytest.mark.full),
    ],
)
def test_the_librarys_sum_is_within_bounds_and_equal_on_all_ranks(
    world: int, name: str, dtype: torch.dtype, bounds: tuple[float, float]
) -> None:
    assert len(set(run_ranks(world, _native, name, dtype, 5, bounds))) == 1
