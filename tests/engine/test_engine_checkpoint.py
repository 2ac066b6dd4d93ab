"""Checkpoints: a run goes on as if it had not stopped; damage is found and named. What reads what: the table of
``test_engine_checkpoint_cells``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import batches, digest, engine_of, train, whole_state
from engine_ranks import outcomes, run_ranks

from launcher.contract.damage import damage_in
from launcher.contract.errors import UsageError, VerificationFailed
from launcher.contract.holdings import checkpoints_here
from launcher.contract.manifest import Manifest
from launcher.contract.partition import Layout
from launcher.engine.saving import checkpoint, shardfile
from launcher.engine.zero import ZeroEngine


def _whole_moments(engine: ZeroEngine) -> dict[str, torch.Tensor]:
    """Every optimizer tensor, whole, by parameter, joined from all ranks."""
    found: dict[str, torch.Tensor] = {}
    for flat in engine.units:
        unit = flat.unit
        for index in range(len(flat.moments)):
            shards = engine.comm.gather_small(torch.cat(flat.own_moments(index)), "moments")
            for rank in range(engine.comm.size):
                for piece in unit.pieces(rank):
                    name = f"{piece.parameter.name}/{index}"
                    whole = found.setdefault(name, torch.full((piece.parameter.numel,), float("nan")))
                    width = piece.stop - piece.start
                    whole[piece.start : piece.stop] = shards[rank, piece.offset : piece.offset + width]
    return found


def _bits(engine: ZeroEngine) -> tuple[str, str, str]:
    moments = _whole_moments(engine)
    assert not any(bool(m.isnan().any()) for m in moments.values())
    return digest(whole_state(engine)), digest(moments), digest(dict(engine.model.named_buffers()))


def _interrupted(rank: int, world: int, stage: int, folder: str, accumulation: int) -> None:
    steps = batches(6, 4 * world, 37)
    more: dict[str, Any] = {"stage": stage, "bucket": 1000, "accumulation": accumulation}
    whole = engine_of("gpt", **more)
    expected = train(whole, steps)
    first = engine_of("gpt", **more)
    found = train(first, steps[:3])
    first.save(folder, 3)
    second = engine_of("gpt", **more)
    assert second.load(folder, 3) == (3, {})
    found += train(second, steps[3:])
    assert found == expected
    assert _bits(second) == _bits(whole)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_interrupted_and_resumed_is_bitwise_the_same(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _interrupted, stage, str(tmp_path), 2)


# --- damage ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 KiB, so that a small file has several."""
    monkeypatch.setattr(shardfile, "BLOCK_BYTES", 4096)


def _one(folder: Path) -> tuple[ZeroEngine, Path]:
    engine = engine_of("gpt", stage=0)
    train(engine, batches(1, 2, 37))
    return engine, checkpoint.save(engine, folder, 5, checkpoint.About())


def test_a_damaged_block_is_named(tmp_path: Path, small_blocks: None) -> None:
    tmp_path /= "checkpoints"
    engine, target = _one(tmp_path)
    shard = target / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[4096 * 3 + 100] ^= 1
    shard.write_bytes(data)
    with pytest.raises(VerificationFailed, match=r"rank 0: block 3 \(bytes 12288 to 16384\) is damaged"):
        engine.load(tmp_path)
    noted = "is damaged: block 3 of"
    assert damage_in(str(target))[0].startswith(noted), "so that nobody takes it for whole again"
    assert not checkpoints_here(str(tmp_path.parent))[0]["whole"]
    shard.write_bytes(data[:-1])
    assert damage_in(str(target)) == {}, "another file: the note is void"
    with pytest.raises(VerificationFailed, match=f"has {len(data) - 1} bytes, not {len(data)}"):
        engine.load(tmp_path)
    shard.unlink()
    with pytest.raises(VerificationFailed, match="of rank 0 is missing here; node"):
        engine.load(tmp_path)


def test_only_what_is_touched_is_read(tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, target = _one(tmp_path)
    manifest = Manifest.from_bytes((target / "manifest.json").read_bytes())
    read: list[int] = []
    block = shardfile.Reader._block

    def counted(reader: shardfile.Reader, at: int) -> tuple[int, bytes]:
        read.append(at // 4096)
        return block(reader, at)

    monkeypatch.setattr(shardfile.Reader, "_block", counted)
    with shardfile.Reader(target, manifest.shards[0]) as reader:
        read.clear()
        reader.read(4096 * 2 + 5, 4096 * 3 + 5)
    assert read == [2, 3]


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    engine, target = _one(tmp_path)
    assert checkpoint.newest(tmp_path) == 5
    (target / "manifest.json").rename(target / "kept")
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(UsageError, match="holds no whole checkpoint"):
        engine.load(tmp_path)
    with pytest.raises(UsageError, match="has no manifest"):
        engine.load(tmp_path, 5)
    (target / "manifest.json").write_bytes(b"{}")
    with pytest.raises(VerificationFailed, match="cannot be read"):
        engine.load(tmp_path, 5)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    _one(tmp_path)
    with pytest.raises(UsageError, match="is not in the checkpoint"):
        engine_of("odd", stage=1).load(tmp_path)


def test_shards_are_safetensors_and_the_manifest_says_what_is_in_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    engine, target = _one(tmp_path)
    manifest = Manifest.from_bytes((target / "manifest.json").read_bytes())
    tensors = safetensors.load_file(target / "rank-00000.safetensors")
    unit = manifest.layout.units[1]
    assert isinstance(manifest.layout, Layout)
    flat = tensors[f"{unit.name}/parameters"]
    state = engine.model.state_dict()
    for placed in unit.placed:
        assert torch.equal(flat[placed.start : placed.stop].view(placed.parameter.shape), state[placed.parameter.name])
    assert set(tensors) == {
        f"{u.name}/{k}" for u in manifest.layout.units for k in ("parameters", "exp_avg", "exp_avg_sq")
    }
    import xxhash

    for shard in manifest.shards:
        data = (target / shard.file).read_bytes()
        assert xxhash.xxh3_128_hexdigest(data) == shard.digest
        assert len(data) == shard.bytes
    assert json.loads((target / "manifest.json").read_text())["scalars"]["optimizer_updates"] == 1


def test_prune_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    engine = engine_of("gpt", stage=0)
    for step in (1, 2, 3, 4):
        checkpoint.save(engine, tmp_path, step, checkpoint.About())
    (tmp_path / "step-00000009").mkdir()  # one under way: no manifest
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "elsewhere")
    assert checkpoint.prune(tmp_path, 2) == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "elsewhere",
        "step-00000003",
        "step-00000004",
        "step-00000009",
    ]


def test_what_a_resume_left_behind_neither_counts_nor_goes(tmp_path: Path) -> None:
    """``keep`` is about the line that the run is on: else the newest of an abandoned line would cost the new ones."""
    engine = engine_of("gpt", stage=0)
    folder = tmp_path / "checkpoints"
    for attempt, resumed in ((1, None), (2, 2)):
        (tmp_path / f"attempts/{attempt}/metrics").mkdir(parents=True)
        (tmp_path / f"attempts/{attempt}/metrics/rank-00000.jsonl").touch()
        (tmp_path / f"attempts/{attempt}/launch.json").write_text(json.dumps({"resume_step": resumed}))
    for attempt, step in ((1, 1), (1, 2), (1, 8), (1, 9), (2, 3), (2, 4)):
        checkpoint.save(engine, folder, step, checkpoint.About(attempt=attempt))
    assert checkpoint.newest(folder) == 4
    assert checkpoint.prune(folder, 2) == [1, 2]
    assert sorted(int(p.name[5:]) for p in folder.iterdir()) == [3, 4, 8, 9]


def _one_disk_is_full(rank: int, world: int, folder: str) -> None:
    engine = engine_of("gpt", stage=2)
    target = Path(folder)
    if rank == 1:  # a file where the folder should be: this rank cannot write
        target = target / "nothing" / "here"
        target.parent.write_text("")
    engine.save(target, 1)


def test_a_rank_that_cannot_write_leaves_no_checkpoint(tmp_path: Path) -> None:
    found = outcomes(2, _one_disk_is_full, str(tmp_path))
    assert not found[0][0] and not found[1][0]
    assert checkpoint.newest(tmp_path) is None
