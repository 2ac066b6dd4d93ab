"""Values that train nonsense, and processes that would train alone, are refused; a random state stays a rank's own."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from engine_models import digest, whole_state
from engine_ranks import run_ranks
from torch import Tensor, nn

from launcher.contract.bounds import OPTIMIZER
from launcher.contract.errors import UsageError
from launcher.contract.train import SGD, AdamW, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.zero import ZeroEngine
from launcher.specs.optimizer_model import Optimizer

NAN, INF = float("nan"), float("inf")
WRONG: list[tuple[str, Any, str]] = [
    *(("lr", v, "more than 0") for v in (-1.0, 0, NAN, INF)),
    *(("weight_decay", v, "at least 0") for v in (-0.1, NAN)),
    *(("betas", v, "at least 0 and less than 1") for v in ((0.9, 1.5), (-0.1, 0.9), (1.0, 0.9), (0.9, NAN))),
    *(("eps", v, "more than 0") for v in (-1.0, 0.0)),
    *(("momentum", v, "at least 0 and less than 1") for v in (-2.0, 1.0)),
    *(("clip", v, "more than 0") for v in (-1.0, 0, NAN)),
    ("warmup", -1, "at least 0"),
]


@pytest.mark.parametrize(("key", "value", "accepted"), WRONG)
def test_what_a_job_may_not_say_python_may_not_either(key: str, value: Any, accepted: str) -> None:
    given = {"lr": 0.1, **({"momentum": 0.5} if key == "momentum" else {}), key: value}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
    made = SGD if key == "momentum" else AdamW
    for make in (
        lambda: EngineConfig(Zero(0), made(**given)),
        lambda: EngineConfig.of({"zero": {"stage": 0}, "optimizer": plain}),
    ):
        with pytest.raises(UsageError, match=rf"optimizer\.{key}: .*accepted: {accepted}"):
            make()
    with pytest.raises(ValueError, match=r"is out of range; accepted|is not finite"):
        Optimizer.model_validate({**plain, "kind": "sgd" if key == "momentum" else "adamw"})


def test_the_table_has_every_number_of_the_optimizers() -> None:
    numbers = {k for kind in (AdamW, SGD) for k in kind.__dataclass_fields__} - {"schedule", "nesterov"}
    assert numbers == set(OPTIMIZER)


def test_rates_and_groups_are_held_to_bounds_too() -> None:
    engine = ZeroEngine(nn.Linear(3, 2), {"zero": {"stage": 0}, "optimizer": {"lr": 0.1}})
    for good in (0.0, 1, 2.5, numpy.float32(0.5), torch.tensor(0.25)):  # a schedule may begin at 0
        engine.lr = good
        assert engine.lr == float(good) and type(engine.lr) is float
    for bad in (NAN, INF, -0.1, "0.1", None, True):
        with pytest.raises(UsageError, match=r"zero\.lr: .*; accepted: at least 0"):
            engine.lr = bad
    assert engine.lr == 0.25
    for key, value in (("lr", -1.0), ("lr", 0), ("lr_scale", NAN), ("weight_decay", -1.0)):
        with pytest.raises(UsageError, match=f"parameter group 1: {key}: .*accepted"):
            config = EngineConfig(Zero(0), AdamW(0.1))
            ZeroEngine(nn.Linear(3, 2), config, groups=[{"match": ["bias"], key: value}])


def test_a_process_that_is_told_of_others_and_has_no_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(Zero(3), AdamW(0.1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE is 2, but there is no process group") as told:
        ZeroEngine(nn.Linear(3, 2), config)
    assert "init_process_group" in str(told.value.hint)
    for alone in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", alone)
        ZeroEngine(nn.Linear(3, 2), config)


class _Rows(nn.Module):
    """Sparse where no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(5, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.table, sparse=True).mean()


def test_models_that_cannot_be_trained_here_are_refused_by_name() -> None:
    config = EngineConfig(Zero(2), AdamW(0.1))
    with pytest.raises(UsageError, match="nothing to train: all of its parameters are frozen"):
        ZeroEngine(nn.Linear(3, 2).requires_grad_(False), config)
    with pytest.raises(UsageError, match="module 0 makes sparse gradients"):
        ZeroEngine(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)), config)
    frozen = nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.Linear(3, 1))
    ZeroEngine(frozen, config)
    engine = ZeroEngine(_Rows(), config)
    with pytest.raises(UsageError, match="the gradient of parameter table is sparse"):
        engine.backward(engine.model(torch.tensor([1, 2])))


# --- over ranks -------------------------------------------------------------------------------------------


def _blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(70, 70) for _ in range(3)), nn.Linear(70, 1))


def _looks() -> nn.Module:
    """What cannot be deferred: built whole, a rank at a time."""
    model = _blocks()
    assert float(next(model.parameters()).sum()) != 0
    return model


def _states(rank: int, world: int) -> None:
    config = EngineConfig(Zero(3), AdamW(0.1))
    for factory in (_blocks, _looks):
        torch.manual_seed(100)
        expected = {n: p.detach() for n, p in factory().named_parameters()}
        after = torch.rand(2)
        for own in (100 + rank, 100):
            torch.manual_seed(own)
            untouched = torch.rand(2)
            torch.manual_seed(own)
            engine = ZeroEngine(factory, config)
            drawn = torch.rand(2)
            assert torch.equal(drawn, after if own == 100 else untouched), (factory.__name__, own)
            assert digest(whole_state(engine)) == digest(expected)


def _rates(rank: int, world: int) -> None:
    for stage in (0, 3):
        engine = ZeroEngine(nn.Linear(3, 2), EngineConfig(Zero(stage), AdamW(0.1)))
        engine.lr = 0.1 * (rank + 1)
        before = whole_state(engine)
        engine.backward(engine.model(torch.ones(2, 3)).mean())
        with pytest.raises(UsageError, match=r"zero\.lr is 0\.2 on rank 1, 0\.1 on rank 0: nothing was updated"):
            engine.step()
        assert digest(whole_state(engine)) == digest(before) and engine.optimizer.updates == 0
        engine.lr = 0.1
        engine.backward(engine.model(torch.ones(2, 3)).mean())
        engine.step()
        assert digest(whole_state(engine)) != digest(before)


def _both(rank: int, world: int) -> None:
    _states(rank, world)
    _rates(rank, world)


def test_a_rank_keeps_its_random_state_and_ranks_have_one_rate() -> None:
    run_ranks(2, _both)
