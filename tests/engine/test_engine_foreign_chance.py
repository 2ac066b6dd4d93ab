"""Functions that build a model of numbers that torch's own generator does not give; ranks that fail while they build or
save, with whatever error."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.errors import JobFailed, UsageError
from launcher.contract.train import AdamW, Zero
from launcher.engine import EngineConfig, Ranks, ZeroEngine
from launcher.engine.saving import checkpoint

CONFIG = EngineConfig(Zero(2), AdamW(lr=0.1))


def _of_its_own_generator() -> nn.Module:
    """Large enough to be deferred, were it not for the generator, which has moved on when a tensor is made again."""
    own = torch.Generator().manual_seed(5)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in model:
        nn.init.normal_(layer.weight, generator=own)  # type: ignore[arg-type]
        layer.bias.data = torch.randn(64, generator=own)
    return model


def _of_numpy(seed: int, size: int, looks: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, 3))
    model[1].bias.data = torch.from_numpy(numpy.random.default_rng(seed).normal(size=3).astype("float32"))  # type: ignore[union-attr]
    if looks:
        float(model[0].weight.detach().norm())  # type: ignore[union-attr,operator]
    return model


def _built(rank: int, world: int, folder: str) -> None:
    torch.manual_seed(1)
    for precision in ("fp32", "bf16"):
        for stage in (0, 2, 3):
            config = EngineConfig(Zero(stage), AdamW(lr=0.1), precision=precision)
            engine = ZeroEngine(_of_its_own_generator, config)
            state = {name: p.detach() for name, p in _of_its_own_generator().named_parameters()}
            with engine.gathered():
                for name, parameter in engine.model.named_parameters():
                    assert torch.equal(parameter, state[name].to(parameter.dtype)), name
    # A small tensor of numpy's is rank 0's on all; of a function that looks at values all must be alike.
    engine = ZeroEngine(lambda: _of_numpy(rank, 64, looks=False), CONFIG)
    expected = numpy.random.default_rng(0).normal(size=3).astype("float32")
    assert numpy.array_equal(engine.model[1].bias.detach().numpy(), expected)  # type: ignore[index,union-attr]
    digests = {digest(whole_state(engine))}
    assert len(digests) == 1
    with pytest.raises(UsageError, match="gave rank 1 other first values than rank 0"):
        ZeroEngine(lambda: _of_numpy(rank, 64, looks=True), CONFIG)

    def fails() -> nn.Module:
        model = _of_numpy(0, 64, looks=True)
        if rank == 1:
            raise ValueError("no such size")
        return model

    kind, says = (ValueError, "no such size") if rank == 1 else (JobFailed, "rank 1 says: ValueError: no such size")
    with pytest.raises(kind, match=says):
        ZeroEngine(fails, CONFIG)


def _saved(rank: int, world: int, folder: str) -> None:
    engine = ZeroEngine(nn.Linear(4, 4), CONFIG)
    engine.save(folder, 1, extra=MappingProxyType({"a": (1, 2)}))  # type: ignore[arg-type]
    assert engine.load(folder) == (1, {"a": [1, 2]})
    write = checkpoint.write_shard

    def breaks(*given: Any) -> Any:
        if rank == 1:
            raise RuntimeError("the disk is gone")
        return write(*given)

    checkpoint.write_shard = breaks
    told = (JobFailed, "rank 1 says: RuntimeError: the disk is gone")
    kind, says = (RuntimeError, "^the disk") if rank == 1 else told
    with pytest.raises(kind, match=says):
        engine.save(folder, 2)
    engine.save(folder, 3, background=True)
    with pytest.raises(kind, match=says):
        engine.finish_saving()
    checkpoint.write_shard = write
    engine.save(folder, 4, background=True)
    assert engine.finish_saving() == 4
    assert sorted(path.parent.name[-1] for path in Path(folder).glob("*/manifest.json")) == ["1", "4"]
    engine = ZeroEngine(nn.Linear(4, 4), CONFIG)
    engine.save(folder, 5, background=True)
    assert engine.finish_saving() == 5
    gone = weakref.ref(engine)
    gc.disable()
    del engine
    assert gone() is None, "it goes when nobody holds it, without the collector"
    gc.enable()


def _all(rank: int, world: int, folder: str) -> None:
    _built(rank, world, folder)
    _saved(rank, world, folder)


def test_one_model_or_an_error_on_all(tmp_path: Path) -> None:
    run_ranks(2, _all, str(tmp_path))


def _rates(rank: int, world: int) -> None:
    engine = ZeroEngine(nn.Linear(3, 2), CONFIG, ranks=Ranks.connect(2))
    engine.lr = 0.2 if rank == 1 else 0.1
    engine.backward(engine.model(torch.ones(1, 3)).sum())
    with pytest.raises(UsageError, match=r"zero\.lr is 0\.2 on rank 1, 0\.1 on rank 0: nothing was updated"):
        engine.step()


def test_a_rate_that_differs_on_a_tensor_rank_is_told() -> None:
    run_ranks(4, _rates)
