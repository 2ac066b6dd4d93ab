"""A config in Python: what it may look like, and what a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.contract.errors import UsageError
from launcher.contract.train import SGD, AdamW, Units, Zero
from launcher.engine import EngineConfig, ZeroEngine

ADAMW, UNITS = "the keys of AdamW are lr, weight_decay, betas", "the keys of Units are classes, names and size_bytes"
STAGE = {"stage": 3}
LR = {"lr": 0.1}


@pytest.mark.parametrize(
    ("optimizer", "meant"),
    [
        ({"kind": "adamw", "lr": 0.1, "betas": [0.8, 0.9]}, AdamW(0.1, betas=(0.8, 0.9))),
        ({"lr": 0.1, "betas": (0.8, 0.9)}, AdamW(0.1, betas=(0.8, 0.9))),
        ({"lr": 0.1, "momentum": 0.0}, SGD(0.1, 0.0)),
        ({"kind": "SGD", "lr": 1, "momentum": 0.9}, SGD(1.0, 0.9)),
        (SGD(0.1, 0.9, nesterov=True), SGD(0.1, 0.9, nesterov=True)),
        (AdamW(0.2), AdamW(0.2)),
    ],
)
def test_the_optimizer_is_the_one_whose_keys_are_given(optimizer: Any, meant: Any) -> None:
    for zero in (STAGE, Zero(3)):
        assert EngineConfig.of({"zero": zero, "optimizer": optimizer}) == EngineConfig(Zero(3), meant)


def test_a_tuple_stands_for_a_list_and_an_object_for_its_keys() -> None:
    for unit in ({"classes": ("Block",)}, {"classes": ["Block"]}, Units(("Block",))):
        config = EngineConfig.of({"zero": {**STAGE, "unit": unit}, "optimizer": LR, "recompute": (0, 2)})
        assert config.zero.unit == Units(("Block",)) and config.recompute == (0, 2)


@pytest.mark.parametrize(
    ("zero", "optimizer", "says"),
    [
        (STAGE, {**LR, "beta": 0.9}, f"config.optimizer: unknown key 'beta'; did you mean 'betas'? {ADAMW}"),
        (STAGE, {"lr": "3e-4"}, "config.optimizer.lr: float was expected, not '3e-4'; that is text: give the number"),
        (STAGE, {**LR, "nesterov": True}, "config.optimizer: 'momentum' is missing; the keys of SGD are"),
        (STAGE, {**LR, "kind": "adam"}, "config.optimizer.kind: 'adam' is not known; accepted are adamw and sgd"),
        (STAGE, torch.optim.AdamW, "config.optimizer: a mapping was expected"),
        ({**STAGE, "bucket": 1}, LR, "config.zero: unknown key 'bucket'; did you mean 'bucket_bytes'?"),
        ({**STAGE, "bucket_bytes": "25MB"}, LR, "config.zero.bucket_bytes: int was expected, not '25MB'"),
        ({**STAGE, "bucket_bytes": 0}, LR, "zero.bucket_bytes is 0"),
        ({**STAGE, "unit": {"class": "A"}}, LR, f"unknown key 'class'; did you mean 'classes'? {UNITS}"),
        ({**STAGE, "unit": {"size": 9}}, LR, "did you mean 'size_bytes'?"),
        ({**STAGE, "unit": "block"}, LR, f"a mapping was expected, not 'block'; {UNITS}, or it is left out"),
        ({**STAGE, "unit": {"classes": "A"}}, LR, "config.zero.unit.classes: a list was expected, not 'A'"),
        (3, LR, "config.zero: a mapping was expected, not 3; the keys of Zero are stage, bucket_bytes"),
    ],
)
def test_what_is_wrong_is_told_with_what_there_is(zero: Any, optimizer: Any, says: str) -> None:
    with pytest.raises(UsageError) as told:
        EngineConfig.of({"zero": zero, "optimizer": optimizer})
    assert says in str(told.value) and str(told.value).count("unknown key") <= 1
    assert told.value.__cause__ is None


def test_an_optimizer_that_was_made_already_is_refused_with_the_way() -> None:
    model = nn.Linear(2, 2)
    config = {"zero": STAGE, "optimizer": LR}
    made: Any = torch.optim.AdamW.__new__(torch.optim.AdamW)  # its constructor loads a compiler, which takes seconds
    with pytest.raises(UsageError, match=r"an instance of AdamW.*give the class \(optimizer=torch.optim.AdamW"):
        ZeroEngine(model, config, optimizer=made)
    named: Any = "adamw"
    with pytest.raises(UsageError, match=r"'adamw'; accepted are a class of torch\.optim and a function"):
        ZeroEngine(model, config, optimizer=named)


def test_what_is_no_loss_is_refused_and_the_step_goes_on() -> None:
    model = nn.Linear(2, 2)
    zero = ZeroEngine(model, {"zero": STAGE, "optimizer": LR})
    out = model(torch.ones(3, 2))
    wrong: Any = out.sum().item()
    with pytest.raises(UsageError, match=r"backward was given float, not a tensor.*not loss.item\(\)"):
        zero.backward(wrong)
    with pytest.raises(UsageError, match=r"of shape \(3, 2\), not one number"):
        zero.backward(out)
    with pytest.raises(UsageError, match="no gradient leads to"):
        zero.backward(out.sum().detach())
    zero.backward(out.mean())
    zero.step()
