"""Units by a rule, resharding and prefetch: never one bit, exactly the volume, and nothing gathered beyond its use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import MODELS, batches, digest, train, whole_state
from engine_ranks import outcomes, run_ranks
from torch import Tensor, nn

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Units, Zero
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.model.units import describe
from launcher.engine.tensor.gpt import TensorGPT
from launcher.engine.zero import ZeroEngine
from launcher.planning.shapes import gpt_layout
from launcher.specs.models import GptModel

RULES: dict[str, Units | None] = {
    "block": None,
    "names": Units(names=("blocks.*.attention", "blocks.*.mlp")),
    "divided": Units(size_bytes=6000),
    "filled": Units(size_bytes=30000),
    "linear": Units(classes=("Linear",)),
}
ODD: dict[str, Units | None] = {"block": None, "linear": Units(classes=("Linear",)), "size": Units(size_bytes=1000)}
QUICK = [
    ("block", "keep", 0),
    ("names", "after_forward", 2),
    ("divided", "keep_last", 0),
    ("filled", "after_forward", 1),
    ("linear", "keep_last", 2),
]
REST = [("block", "keep_last", 1), ("divided", "after_forward", 1), ("linear", "keep", 3)]


def _engine(name: str, stage: int = 3, **zero: Any) -> ZeroEngine:
    settings = Zero(stage, 1000, reduce_every="micro_step", **zero)
    optimizer = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5)
    return ZeroEngine(MODELS[name][0](), EngineConfig(settings, optimizer, accumulation=2))


class Watcher:
    """Looks at the storages of all units whenever a module begins or ends and a gradient passes."""

    def __init__(self, engine: ZeroEngine) -> None:
        self.engine = engine
        self.most = 0  # rows of units that hold memory, beside those that may stay
        self.after_forward: set[int] = set()
        rows: dict[tuple[str, ...], list[int]] = {}
        for number, flat in enumerate(engine.units):
            rows.setdefault(flat.unit.modules, []).append(number)
        self.root = rows.pop((), [])
        self.rows = list(rows.values())
        reshard = engine.config.zero.reshard
        staying = {"keep": len(self.rows), "keep_last": 1, "after_forward": 0}[reshard]
        self.stays = self.rows[len(self.rows) - staying :]
        for module in engine.model.modules():
            module.register_forward_pre_hook(self.look)
            module.register_forward_hook(self.look)
        for parameter in engine.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.look)
        engine.model.register_forward_hook(self._ended)

    def held(self) -> set[int]:
        return {i for i, flat in enumerate(self.engine.units) if flat.full.untyped_storage().nbytes()}

    def look(self, *_: Any) -> None:
        held = self.held()
        self.most = max(self.most, sum(1 for row in self.rows if row not in self.stays and held & set(row)))
        bytes_held = sum(f.full.untyped_storage().nbytes() for f in self.engine.units)
        assert self.engine.memory()["gathered"] == bytes_held

    def _ended(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.after_forward = self.held()

    @property
    def kept(self) -> int:
        numbers = [*self.root, *(n for row in self.stays for n in row)]
        return sum(self.engine.units[n].unit.padded for n in numbers)


def _matrix(rank: int, world: int, cases: list[tuple[str, str, int]]) -> None:
    steps = batches(2, 4 * world, 37)
    reference = _engine("gpt", 2)
    expected = (train(reference, steps), digest(whole_state(reference)))
    for rule, reshard, prefetch in cases:
        case = (rule, reshard, prefetch)
        engine = _engine("gpt", unit=RULES[rule], reshard=reshard, prefetch=prefetch)
        watcher = Watcher(engine)
        found = []
        for batch in steps:
            before = engine.comm.traffic.volume_elements
            found += train(engine, [batch])
            psi = sum(u.padded for u in engine.layout.units)
            volume = engine.comm.traffic.volume_elements - before
            assert volume == 2 * (3 * psi - watcher.kept), case
            assert watcher.held() == set(), case
        assert watcher.after_forward == {*watcher.root, *(n for row in watcher.stays for n in row)}, case
        free = len(watcher.rows) - len(watcher.stays)
        assert watcher.most == min(1 + prefetch, free), (case, watcher.most)
        assert tuple(engine.memory()[k] for k in ("parameters", "gradients", "optimizer")) == tuple(
            engine.state_bytes()
        )
        with torch.no_grad():
            engine.model(steps[0][:, :-1], steps[0][:, 1:])
        assert watcher.held() == set(), "an evaluation leaves nothing behind, whatever stays in training"
        assert (found, digest(whole_state(engine))) == expected, case


@pytest.mark.parametrize("cases", [QUICK, pytest.param(REST, marks=pytest.mark.full)], ids=["quick", "rest"])
def test_no_rule_changes_a_bit_and_nothing_outlives_its_use(cases: list[tuple[str, str, int]]) -> None:
    run_ranks(2, _matrix, cases)


def _odd(rank: int, world: int, folder: str) -> None:
    """Tied, frozen, unused, used twice; then a checkpoint of one rule is read by another."""
    steps = batches(3, 4 * world, 13)
    bits = set()
    for name, rule in ODD.items():
        for reshard in ("keep_last", "after_forward", "keep"):
            engine = _engine("odd", unit=rule, reshard=reshard)
            watcher = Watcher(engine)
            history = train(engine, steps[:2])
            assert watcher.held() == set(), (name, reshard)
            bits.add((tuple(history), digest(whole_state(engine))))
    assert len(bits) == 1
    assert engine.config.zero.unit == ODD["size"]
    engine.save(folder, 2)
    other = _engine("odd", 3, unit=ODD["linear"])
    other.load(folder)
    assert other.layout.units != engine.layout.units and engine.layout.rule == ODD["size"]
    assert digest(whole_state(other)) == digest(whole_state(engine))
    assert train(other, steps[2:]) == train(engine, steps[2:])


def test_a_rule_and_an_odd_model_and_any_rule_reads_any_other(tmp_path: Any) -> None:
    run_ranks(2, _odd, str(tmp_path))


class Elsewhere(nn.Module):
    """The second layer's weight is used once more, outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.layers[1].weight).sum()


def _elsewhere(rank: int, world: int) -> None:
    engine = ZeroEngine(Elsewhere(), {"zero": {"stage": 3, "unit": {"classes": ["Linear"]}}, "optimizer": {"lr": 0.1}})
    engine.backward(engine.model(torch.ones(2, 4)))


def test_a_weight_used_outside_its_unit_is_named_before_it_is_read() -> None:
    for ok, said in outcomes(2, _elsewhere):
        assert not ok
        assert "UsageError: parameter layers.1.weight is used outside the forward of layers.1" in said


@pytest.mark.parametrize("name", [*RULES, "lists"])
def test_the_planner_makes_the_engines_units(name: str) -> None:
    rule = Units(classes=("Attention", "Embedding")) if name == "lists" else RULES[name]
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 7, "vocab": 37}
    more: dict[str, Any] = {"ranks": 3, "bucket_bytes": 4000, "replicas": 2, "precision": "bf16"}
    found = describe(GPT(GPTConfig(**sizes)), rule=rule, **more).layout
    assert found == gpt_layout(GptModel(kind="gpt", **sizes), unit=rule, **more)


def _tensor(rank: int, world: int) -> None:
    from launcher.engine.comm import connect

    comm = connect()
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 7, "vocab": 37}
    for rule in (Units(size_bytes=3000), Units(classes=("Block",)), Units(classes=("ColumnLinear", "TensorMLP"))):
        found = describe(TensorGPT(GPTConfig(**sizes), comm), ranks=3, bucket_bytes=4000, tensor=world, rule=rule)
        model = GptModel(kind="gpt", **sizes)
        assert found.layout == gpt_layout(model, ranks=3, bucket_bytes=4000, tensor=world, unit=rule)


def test_the_planner_makes_the_engines_units_of_tensor_ranks() -> None:
    run_ranks(2, _tensor)
