"""Parameters with settings of their own: against torch's groups, over resumes, and from a job's description."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_job import Job
from engine_models import MODELS, TINY, batches, digest, engine_of, relative, train, undistributed, whole_state
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.errors import UsageError
from launcher.contract.groups import assign
from launcher.contract.train import SGD, AdamW, Batch, Checkpointing, Data, Factory, ParameterGroup, TrainConfig, Zero
from launcher.engine import EngineConfig, ZeroEngine
from launcher.planning.shapes import gpt_layout
from launcher.specs.models import GptModel

OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.3, clip=0.5, eps=1e-5)
PATTERNS = (("*.bias", "*norm*"), ("blocks.*",), ("embedding.*",))
GROUPS: list[dict[str, Any]] = [
    {"match": PATTERNS[0], "weight_decay": 0.0},
    {"match": PATTERNS[1], "lr": 7e-3},
    {"match": PATTERNS[2], "lr": 3e-2, "weight_decay": 0.1},
]


def _torch_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The same for torch, told apart by hand."""
    rows: dict[str, list[nn.Parameter]] = {"small": [], "block": [], "embedding": [], "rest": []}
    for name, parameter in model.named_parameters():
        small = name.endswith(".bias") or "norm" in name
        rows["small" if small else name.split(".")[0].replace("blocks", "block") if name[0] in "be" else "rest"].append(
            parameter
        )
    assert all(rows.values())
    return [
        {"params": rows["small"], "weight_decay": 0.0},
        {"params": rows["block"], "lr": 7e-3},
        {"params": rows["embedding"], "lr": 3e-2, "weight_decay": 0.1},
        {"params": rows["rest"]},
    ]


def _against_torch(rank: int, world: int) -> set[str]:
    steps = batches(6, 2 * world, 37)
    losses, states = undistributed("gpt", steps, OPTIMIZER, torch.float64, _torch_groups)
    bits = set()
    for stage in range(4):
        zero = engine_of("gpt", stage=stage, dtype=torch.float64, optimizer=OPTIMIZER, groups=GROUPS, bucket=3000)
        for (loss, _), expected in zip(train(zero, steps), losses, strict=True):
            assert loss == pytest.approx(expected, rel=1e-12), stage
        state = whole_state(zero)
        assert max(relative(state[n], v) for n, v in states[-1].items()) < 1e-12, stage
        memory = zero.memory()
        assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == tuple(zero.state_bytes())
        bits.add(digest(state))
    return bits


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_patterns_equal_torch_with_groups_at_every_stage(world: int) -> None:
    found = run_ranks(world, _against_torch)
    assert len(set.union(*found)) == 1, "stages are bitwise equal with groups too"


def _save(rank: int, world: int, folder: str, stage: int) -> list[float]:
    zero = engine_of("gpt", stage=stage, optimizer=OPTIMIZER, groups=GROUPS)
    sizes = dataclasses.asdict(TINY)
    model = GptModel(kind="gpt", **sizes)
    assert zero.layout == gpt_layout(model, ranks=world, bucket_bytes=25_000_000, groups=PATTERNS), "as it is planned"
    steps = batches(5, 12, 37)
    train(zero, steps[:2])
    zero.save(folder, 2)
    return [loss for loss, _ in train(zero, steps[2:])]


def _load(rank: int, world: int, folder: str, stage: int) -> list[float]:
    # Other patterns for the same settings: units are cut otherwise than in the checkpoint.
    plain = [n for n, _ in MODELS["gpt"][0]().named_parameters() if n.endswith(".bias") or "norm" in n]
    others = [GROUPS[2], {"match": plain, "weight_decay": 0.0}, GROUPS[1]]
    zero = engine_of("gpt", stage=stage, optimizer=OPTIMIZER, groups=others)
    assert zero.load(folder)[0] == 2
    return [loss for loss, _ in train(zero, batches(5, 12, 37)[2:])]


def test_saved_with_groups_and_resumed_on_other_ranks_stages_and_numbers_of_groups(tmp_path: Path) -> None:
    expected = run_ranks(2, _save, str(tmp_path), 2)[0]
    assert run_ranks(2, _load, str(tmp_path), 3)[0] == expected
    for world, stage in ((3, 1), (1, 0)):
        assert run_ranks(world, _load, str(tmp_path), stage)[0] == pytest.approx(expected, rel=1e-5)


def test_the_engines_rate_moves_all_groups_in_proportion() -> None:
    moved: dict[str, Any] = {}
    for name, lr in (("whole", 1e-2), ("half", 5e-3)):
        zero = engine_of("gpt", stage=0, optimizer=SGD(1e-2, 0.0), groups=GROUPS[1:])
        before = whole_state(zero)
        zero.lr = lr
        train(zero, batches(1, 2, 37))
        moved[name] = {n: t - before[n] for n, t in whole_state(zero).items()}
    for name in ("embedding.weight", "blocks.0.mlp.up.weight", "norm.weight"):
        torch.testing.assert_close(moved["half"][name], moved["whole"][name] / 2, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("stage", [1, 3])
def test_any_elementwise_optimizer_takes_groups(stage: int) -> None:
    steps = batches(3, 2, 37)
    zero = engine_of("gpt", stage=stage, choice=torch.optim.RMSprop, optimizer=AdamW(1e-3), groups=GROUPS[:1])
    train(zero, steps)
    model = MODELS["gpt"][0]()
    few = [p for n, p in model.named_parameters() if n.endswith(".bias") or "norm" in n]
    rest = [p for n, p in model.named_parameters() if not (n.endswith(".bias") or "norm" in n)]
    both: list[dict[str, Any]] = [{"params": rest}, {"params": few, "weight_decay": 0.0}]
    theirs = torch.optim.RMSprop(both, lr=1e-3, weight_decay=0.0)
    for batch in steps:
        theirs.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        theirs.step()
    for name, value in zero.model.named_parameters():
        torch.testing.assert_close(value.detach(), model.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)


def test_the_first_group_that_matches_wins_and_what_takes_nothing_is_named() -> None:
    names = [["a.weight", "tied.weight"], ["a.bias"], ["b.weight"]]
    assert assign(names, [["tied.*"], ["*.weight", "a.*"]]) == [1, 2, 2]
    with pytest.raises(ValueError, match=r"'\*\.wieght' matches no parameter of the model; closest: a\.weight"):
        assign(names, [["*.wieght"]])
    with pytest.raises(ValueError, match=r"'a\.\*' is left nothing: an earlier group takes all"):
        assign(names, [["*"], ["a.*"]])


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"match": ["*.biass"], "lr": 1.0}], r"'\*\.biass' matches no parameter.*closest: blocks\.0\.norm1\.bias"),
        ({"plain": {"match": ["*"], "wd": 0}}, r"parameter group plain has the key 'wd'"),
        ([{"match": ["*"], "params": ["norm.weight"]}], "parameter group 1 needs one of 'match' and 'params'"),
        ([{"match": ["*"], "lr": 1.0, "lr_scale": 1.0}], "has both lr and lr_scale"),
        (["norm.weight"], "parameter group 1 is str, not a mapping"),
    ],
)
def test_groups_that_cannot_be_meant(groups: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engine_of("gpt", stage=0, groups=groups)


OWN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1))

def loss(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

def data(split, start_sample):
    number = start_sample
    while True:
        yield torch.randn(4, generator=torch.Generator().manual_seed(number))
        number += 1

def groups(model):
    return {"still": {"params": list(model[0].parameters()), "lr": 1e-12, "weight_decay": 0.0}}
"""


def _job(folder: Path, **changes: Any) -> tuple[Job, TrainConfig]:
    (folder / "code").mkdir()
    (folder / "code" / "own.py").write_text(OWN)
    config = TrainConfig(
        zero=Zero(3),
        optimizer=AdamW(lr=1e-2, weight_decay=0.1, warmup=1),
        batch=Batch(2, 1),
        steps=3,
        data=Data(factory="own:data"),
        factory=Factory("own:model", loss="own:loss"),
        checkpoint=Checkpointing(every_steps=1),
        **changes,
    )
    return Job(folder), config


def _moved(folder: Path) -> Mapping[str, float]:
    """How far each parameter of the job's model went from step 1 to step 3."""
    values = []
    for step in (1, 3):
        zero = ZeroEngine(
            nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 1)), EngineConfig(Zero(0), AdamW(1e-2))
        )
        zero.load(folder / "checkpoints" / f"step-{step:08d}")
        values.append(whole_state(zero))
    return {n: float((values[1][n] - values[0][n]).abs().max()) for n in values[0]}


def _patterns(folder: Path) -> tuple[Job, TrainConfig]:
    return _job(folder, groups=(ParameterGroup(("0.*",), lr=1e-12, weight_decay=0.0),))


def _function(folder: Path) -> tuple[Job, TrainConfig]:
    return _job(folder, group_function="own:groups")


@pytest.mark.parametrize("made", [_patterns, _function])
def test_a_job_trains_with_groups(tmp_path: Path, made: Callable[[Path], tuple[Job, TrainConfig]]) -> None:
    """Its factory is deferred: patterns and the function meet parameters that have no memory yet."""
    job, config = made(tmp_path)
    assert job.run(config) == [0, 0], job.log(0)
    moved = _moved(tmp_path)
    assert moved["0.weight"] < 1e-9 and moved["0.bias"] < 1e-9
    assert moved["2.weight"] > 1e-3 and moved["2.bias"] > 1e-3
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    found = {p["name"]: p["group"] for u in manifest["layout"]["units"] for p in u["parameters"]}
    assert found == {"0.weight": 1, "0.bias": 1, "2.weight": 0, "2.bias": 0}
