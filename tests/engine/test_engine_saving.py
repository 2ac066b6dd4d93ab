"""A save is one checkpoint by all ranks or none, and says so before anything is written; a load is whole, or nobody
trains on what it left; what the checkpoint has no optimizer state of begins as a new parameter does in torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import batches, digest, engine_of, relative, train, whole_state
from engine_ranks import run_ranks
from safetensors.torch import save_file
from torch import Tensor, nn

from launcher.contract.errors import UsageError, VerificationFailed, ZerunError
from launcher.contract.manifest import Manifest, ShardFile
from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine import EngineConfig, ZeroEngine
from launcher.engine.saving import checkpoint

STEPS = batches(6, 4, 13)


class Buffered(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.register_buffer("a", torch.arange(width).to(dtype))
        self.register_buffer("b", 100 + torch.arange(20.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def buffered(width: int, stage: int = 2, dtype: torch.dtype = torch.float32, accumulation: int = 1) -> ZeroEngine:
    torch.manual_seed(width)
    return ZeroEngine(Buffered(width, dtype), EngineConfig(Zero(stage), AdamW(lr=0.1), accumulation=accumulation))


def forward(engine: ZeroEngine) -> Tensor:
    loss: Tensor = engine.model(torch.linspace(-1, 1, 10).view(2, 5) + engine.comm.rank)
    return loss


def refused(says: str, call: Callable[[], Any], kind: type[ZerunError] = UsageError) -> None:
    with pytest.raises(kind, match=says):
        call()


def there(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


# --- saving ---------------------------------------------------------------------------------------------


def _one_checkpoint_or_none(rank: int, world: int, folder: Path) -> None:
    engine = buffered(8, accumulation=2)

    def save(*, to: Path = folder / "refused", step: int = 1, extra: Any = None, background: bool = False) -> None:
        engine.save(to, step, extra, background=background)

    for background in (False, True):
        refused("rank 1 would save step 8, rank 0 step 7", lambda b=background: save(step=7 + rank, background=b))
    refused("rank 1 would save into .*/1, rank 0 into .*/0", lambda: save(to=folder / "refused" / str(rank)))
    says = r"rank 1 says: extra\['ema'\]\[1\] is a torch.Tensor" if rank == 0 else r"^extra\['ema'\]\[1\] is a torch"
    refused(says, lambda: save(extra={"ema": [1, torch.ones(1) if rank == 1 else 2]}))
    engine.backward(forward(engine))
    refused("save was called after 1 of 2 micro-steps", save)
    engine.backward(forward(engine))
    refused("save was called after 2 of 2 micro-steps", save)
    engine.step()
    assert not (folder / "refused").exists(), "nothing was written"

    os.chdir(folder)
    assert engine.save("relative", 1, {"a": {"b": [1, 0.5, "x", None, True]}}) == folder / "relative/step-00000001"
    assert engine.load("relative") == (1, {"a": {"b": [1, 0.5, "x", None, True]}})
    engine.save("going", 1, background=True)
    assert engine.finish_saving() == 1
    assert there(folder / "going/step-00000001")[0] == "manifest.json", "on whatever rank"


def _loads(rank: int, world: int, folder: Path) -> None:
    saved = buffered(8)
    saved.save(folder / "buffers", 1)
    kinds = (
        (4, torch.float32, r"\[4\] of float32"),
        (12, torch.float32, r"\[12\] of float32"),
        (8, torch.int64, "int64"),
    )
    for width, dtype, there_is in kinds:
        engine = buffered(width, 3, dtype)
        before = digest(whole_state(engine))
        says = rf"buffer a is \[8\] of float32 in the checkpoint, .*{there_is} in the model"
        refused(says, lambda e=engine: e.load(folder / "buffers"))
        assert digest(whole_state(engine)) == before
    engine.backward(forward(engine))  # nothing was written, so nothing is refused
    engine.step()

    # A micro-step that had begun is forgotten with its gradient.
    for stage in (0, 2):
        begun, fresh = (buffered(8, stage, accumulation=2) for _ in range(2))
        fresh.load(folder / "buffers")
        begun.backward(forward(begun) * 3)
        begun.load(folder / "buffers")
        for engine in (begun, fresh):
            for _ in range(2):
                engine.backward(forward(engine))
            engine.step()
        assert digest(whole_state(begun)) == digest(whole_state(fresh))

    if rank == 0:
        save_file(Buffered(8).state_dict(), folder / "weights.safetensors")
    # A byte of rank 1's shard: at stage 3 only rank 1 reads it, and all say so at once.
    saved.save(folder / "damaged", 2)
    shard = folder / "damaged/step-00000002/rank-00001.safetensors"
    if rank == 0:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    for stage in (0, 3):
        engine = buffered(8, stage)
        train_one = lambda e=engine: (e.backward(forward(e)), e.step())  # noqa: E731
        says = r"block 0 .* is damaged" if stage == 0 or rank == 1 else r"rank 1 says: shard .*block 0 .* is damaged"
        refused(says, lambda e=engine: e.load(folder / "damaged"), VerificationFailed)
        for call in (train_one, engine.step, lambda e=engine: e.save(folder / "half", 1)):
            refused(r"checkpoint .*step-00000002: reading it failed after it had begun", call)
        assert not (folder / "half").exists()
        engine.load_weights(folder / "weights.safetensors")
        refused("reading it failed", train_one)  # its moments are still half of a checkpoint's
        engine.load(folder / "buffers")
        assert digest(whole_state(engine)) == digest(whole_state(saved))
        train_one()


def _in_one_world(rank: int, world: int, folder: str) -> None:
    _one_checkpoint_or_none(rank, world, Path(folder))
    _loads(rank, world, Path(folder))
    _thawed(rank, world, Path(folder))


def test_a_checkpoint_by_all_ranks_or_none(tmp_path: Path) -> None:
    run_ranks(2, _in_one_world, str(tmp_path))


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({1: 2}, r"extra has the key 1, a int: JSON would give it back as a string"),
        ({"a": {"b": float("nan")}}, r"extra\['a'\]\['b'\] is nan"),
        ({"a": [float("inf")]}, r"extra\['a'\]\[0\] is inf"),
        ({"a": torch.ones(2)}, r"extra\['a'\] is a torch.Tensor"),
        ({"a": {1, 2}}, r"extra\['a'\] is a set"),
    ],
)
def test_what_a_manifest_cannot_keep_is_named(tmp_path: Path, extra: Any, says: str) -> None:
    refused(says, lambda: buffered(8).save(tmp_path, 1, extra))
    refused("is 1.5: a whole number", lambda: buffered(8).save(tmp_path, 1.5))  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["a"] = endless
    refused("cannot be kept", lambda: buffered(8).save(tmp_path, 1, endless))
    assert there(tmp_path) == []


def test_no_manifest_without_the_shards_of_this_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = buffered(8)
    about = checkpoint.About()
    target = checkpoint.begin(engine, tmp_path, 1, about)
    own = checkpoint.write_shard(engine, target, checkpoint.entries_of(engine), about)
    manifest, host = checkpoint.gather_shards(engine, target, checkpoint.draft(engine, 1, about), lambda: own)
    other = replace(own, rank=1, file="rank-00001.safetensors")

    def publish(*shards: ShardFile) -> None:
        files = host | {other.file}  # written on this boot of this machine
        both = checkpoint.Gathered(replace(manifest, shards=shards), files)
        checkpoint.publish(engine, target, both, about)

    refused(
        "rank-00001.* which rank 1 wrote on this host, is not there", lambda: publish(own, other), VerificationFailed
    )
    longer = replace(own, bytes=own.bytes + 1)
    refused(f"has {own.bytes} bytes, not {own.bytes + 1}", lambda: publish(longer), VerificationFailed)
    assert there(target) == [own.file]
    with caplog.at_level(logging.WARNING):
        publish(own, replace(other, node="elsewhere"))
    assert "shards of other hosts (elsewhere) are not to be seen from here: 1, the first is rank 1's" in caplog.text
    assert len(Manifest.from_bytes((target / "manifest.json").read_bytes()).shards) == 2


# --- what begins anew -------------------------------------------------------------------------------------


def _model(frozen: bool) -> nn.Module:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model[2].requires_grad_(not frozen)
    return model


def _data(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _steps(engine: ZeroEngine, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine.model(_data(step, engine.comm.rank)).square().mean())
        engine.step()


def _in_torch(world: int, kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Three steps with a layer frozen, three with its parameters new in the optimizer."""
    model = _model(frozen=True)
    optimizer = kind([p for p in model.parameters() if p.requires_grad])
    for step in range(6):
        if step == 3:
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[2].parameters())})
        (sum(model(_data(step, r)).square().mean() for r in range(world)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def _thawed(rank: int, world: int, folder: Path) -> None:
    """AdamW counts a parameter's own updates; Adagrad's state begins at a value of its own."""
    adagrad = lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.3)  # noqa: E731
    adamw = lambda groups: torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.0)  # noqa: E731
    for name, kind, choice in (("adamw", adamw, None), ("adagrad", adagrad, adagrad)):
        expected = _in_torch(world, kind)
        config = EngineConfig(Zero(2), AdamW(lr=0.1, betas=(0.9, 0.95), weight_decay=0.0, clip=None))
        frozen = ZeroEngine(_model(frozen=True), config, optimizer=choice)
        _steps(frozen, 0, 3)
        frozen.save(folder / name, 3)
        found = []
        for stage in (0, 3):
            engine = ZeroEngine(_model(frozen=False), replace(config, zero=Zero(stage)), optimizer=choice)
            engine.load(folder / name)
            _steps(engine, 3, 6)
            found.append(whole_state(engine))
        assert digest(found[0]) == digest(found[1])
        for key, value in expected.items():
            assert relative(found[0][key], value) < 1e-12, (name, key)
        frozen.load(folder / name)  # and where it is frozen again


def test_a_moment_that_the_checkpoint_does_without_begins_at_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, other = (engine_of("odd", stage=0, optimizer=SGD(lr=0.1, momentum=m)) for m in (0.0, 0.9))
    train(plain, STEPS[:2])
    plain.save(tmp_path, 2)
    train(other, STEPS[2:4])
    with caplog.at_level(logging.WARNING):
        other.load(tmp_path)
    assert "has no optimizer state of momentum_buffer: it begins anew" in caplog.text
    fresh = engine_of("odd", stage=0, optimizer=SGD(lr=0.1, momentum=0.9))
    fresh.load(tmp_path)
    assert train(other, STEPS[2:]) == train(fresh, STEPS[2:])


def test_buffers_among_weights_are_compared_before_a_byte_is_read(tmp_path: Path) -> None:
    state = {name: t.clone() for name, t in Buffered(8).state_dict().items()}
    engine = buffered(8)
    before = digest(whole_state(engine))
    save_file({**state, "a": torch.zeros(9)}, tmp_path / "shape.safetensors")
    refused(r"shape +a: \[9\] there, \[8\] in the model", lambda: engine.load_weights(tmp_path / "shape.safetensors"))
    save_file({**state, "a": torch.zeros(8, dtype=torch.int64)}, tmp_path / "kind.safetensors")
    refused(r"buffer +a: I64 there, F32 in the model", lambda: engine.load_weights(tmp_path / "kind.safetensors"))
    assert digest(whole_state(engine)) == before
    engine.backward(forward(engine))
    save_file(state, tmp_path / "fit.safetensors")
    engine.load_weights(tmp_path / "fit.safetensors")
    assert engine.micro_step == 0
    engine.save(tmp_path, 1)
