"""Deferred construction: bit for bit the model that an ordinary one gives, in a fraction of its memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import MODELS, digest, whole_state
from engine_ranks import run_ranks
from torch import nn

from launcher.contract.errors import UsageError
from launcher.engine import ZeroEngine
from launcher.engine.model import deferred
from launcher.engine.model.deferred import record
from launcher.engine.model.flat import FlatUnit

CONFIG: dict[str, Any] = {"zero": {"stage": 3}, "optimizer": {"lr": 0.1}}


class Strange(nn.Module):
    """Initial values in every way that people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(40, 50)
        self.table = nn.Embedding(60, 40, padding_idx=3)
        self.orthogonal = nn.Linear(40, 40, bias=False)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Parameter(torch.empty(50, 40))
        nn.init.trunc_normal_(self.truncated, std=0.3)
        self.drawn = nn.Parameter(torch.randn(1500) * 0.5 + self.truncated.detach().sum())
        self.ones = nn.Parameter(torch.ones(2000))
        self.convolution = nn.Conv2d(8, 16, 5)
        with torch.no_grad():
            self.plain.weight[7:9].mul_(3.0)
            self.plain.weight.t()[2].fill_(0.25)
        self.tied = nn.Linear(40, 60)
        self.tied.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(40, 40)))
        self.register_buffer("ramp", torch.arange(2000).float() / 7, persistent=False)


def _same(factory: Callable[[], nn.Module]) -> tuple[int, int]:
    torch.manual_seed(11)
    expected = factory()
    after = torch.rand(3)
    torch.manual_seed(11)
    model, recording = record(factory)
    assert torch.equal(torch.rand(3), after), "the generator must end where it would have"
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == wanted.keys()
    for name in reversed(list(wanted)):  # in another order than they were made
        assert torch.equal(recording.whole(found[name]), wanted[name]), name
    large = sum(p.numel() for p in model.parameters() if p.device.type == "meta")
    return large, sum(p.numel() for p in model.parameters())


def _transformer() -> nn.Module:
    return nn.Transformer(16, 2, 1, 1, 2048, batch_first=True)


def _converted() -> nn.Module:
    """The parameters have other storages than those that were filled."""
    return Strange().bfloat16().double()


@pytest.mark.parametrize("factory", [Strange, _transformer, _converted])
def test_the_same_numbers_as_an_ordinary_construction(factory: Callable[[], nn.Module]) -> None:
    large, everything = _same(factory)
    assert large > 0.5 * everything


@pytest.mark.parametrize("name", ["gpt", "odd"])
def test_small_thresholds_too(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(deferred, "LARGE", 4)
    _same(MODELS[name][0])


def _engines(rank: int, world: int) -> None:
    deferred.LARGE = 50
    for name in ("gpt", "odd"):
        ordinary = whole_state(ZeroEngine(MODELS[name][0](), CONFIG))
        for stage in range(4):
            for precision in ("fp32", "bf16"):
                config = {**CONFIG, "zero": {"stage": stage}, "precision": precision}
                zero = ZeroEngine(MODELS[name][0], config)
                assert all(p.device.type == "cpu" for p in zero.model.parameters())
                assert all(b.device.type == "cpu" for b in zero.model.buffers())
                state = {n: t.float() for n, t in whole_state(zero).items()}
                rounded = {n: t.bfloat16().float() if precision == "bf16" else t for n, t in ordinary.items()}
                assert digest(state) == digest(rounded), (name, stage, precision)
                tokens = torch.randint(0, 13, (2, 8))
                zero.backward(zero.model(tokens[:, :-1], tokens[:, 1:]))
                zero.step()


def test_engines_of_a_factory_equal_engines_of_a_model() -> None:
    run_ranks(2, _engines)


def _unseeded(rank: int, world: int) -> str:
    torch.manual_seed(rank)  # nobody seeded the ranks alike
    return digest(whole_state(ZeroEngine(lambda: nn.Sequential(nn.Linear(70, 70), nn.Linear(70, 3)), CONFIG)))


def test_ranks_draw_rank_zeros_numbers() -> None:
    assert len(set(run_ranks(3, _unseeded))) == 1


class Late(nn.Module):
    """A part whose values come from ``reset_parameters()`` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(60, 40))
        self.few = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.2)
        with torch.no_grad():
            self.few.copy_(self.weight[0, :3] * 2)


class Whole(nn.Module):
    """Made empty; the model's own ``init_weights()`` fills all of it, parts in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Late(), Late()
        self.table = nn.Parameter(torch.empty(70, 30))
        self.register_buffer("ramp", torch.empty(2000))

    def init_weights(self) -> None:
        self.ramp.copy_(torch.arange(2000))  # type: ignore[operator]
        nn.init.normal_(self.table)
        self.second.reset_parameters()
        self.first.reset_parameters()


def _on_meta(factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.device("meta"):
            return factory()

    return build


def _late() -> nn.Module:
    return nn.Sequential(Late(), nn.Linear(40, 60), Late())


def _initialised_late() -> nn.Module:
    """What a user does: build, then have each module that was left empty fill itself, in module order."""
    model = _late()
    for part in (model[0], model[2]):  # type: ignore[index]
        part.reset_parameters()  # type: ignore[operator]
    return model


def _initialised_whole() -> nn.Module:
    model = Whole()
    model.init_weights()
    return model


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(("factory", "ordinary"), [(_late, _initialised_late), (Whole, _initialised_whole)])
def test_what_is_built_empty_is_filled_as_its_author_would(
    factory: Callable[[], nn.Module], ordinary: Callable[[], nn.Module], meta: bool
) -> None:
    torch.manual_seed(5)
    expected = ordinary().state_dict()
    torch.manual_seed(5)
    zero = ZeroEngine(_on_meta(factory) if meta else factory, CONFIG)
    found = zero.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_nothing_fills_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(60, 40))

    with pytest.raises(UsageError, match="parameter weight is on the meta device, and nothing gives it"):
        ZeroEngine(_on_meta(Bare), CONFIG)
    with pytest.raises(UsageError, match=r"parameter 0\.weight is on the meta device"):
        ZeroEngine(_on_meta(_late)(), CONFIG)


class Looking(nn.Module):
    """Looks at a large tensor's values while it builds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        while float(self.layer.weight.detach().abs().max()) > 0.1:
            with torch.no_grad():
                self.layer.weight.mul_(0.9)


def _in_turn(rank: int, world: int) -> tuple[str, str]:
    torch.manual_seed(8 + rank)
    zero = ZeroEngine(Looking, CONFIG)
    torch.manual_seed(8)
    return digest(whole_state(zero)), digest({n: p.detach() for n, p in Looking().named_parameters()})


def test_a_factory_that_looks_at_values_is_built_a_rank_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    for found, expected in run_ranks(2, _in_turn):
        assert found == expected
    ZeroEngine(Looking, CONFIG)
    assert "built whole, a rank at a time" in caplog.text


def _apart(rank: int, world: int) -> str:
    """Rank 1 alone prints a norm."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
        if rank == 1:
            print(float(model[0].weight.detach().norm()))
        return model

    with pytest.raises(UsageError) as caught:
        ZeroEngine(build, CONFIG)
    return str(caught.value)


def test_one_rank_that_cannot_record_is_named_on_all() -> None:
    for told in run_ranks(3, _apart):
        assert "rank 1 cannot record the function that builds the model, rank 0 can: Tensor.item()" in told


def _refused() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(2**21, 2**21, bias=False))  # 16 TiB


def _asks_python() -> nn.Module:
    return nn.Sequential(nn.Linear(64, len(bytearray(2**50))))


@pytest.mark.parametrize(
    ("factory", "kind", "told"),
    [
        (
            _refused,
            RuntimeError,
            r"can't allocate memory.*; meanwhile the model was recorded, at .* of 2097152 x 20971",
        ),
        (_asks_python, MemoryError, "memory was refused; meanwhile the model was recorded"),
    ],
)
def test_memory_that_is_refused_is_no_reason_to_build_whole(
    factory: Callable[[], nn.Module], kind: type[Exception], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(kind, match=f"(?s){told}"):
        ZeroEngine(factory, CONFIG)
    assert "built whole" not in caplog.text
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_refused_unit_was_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kw: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FlatUnit, "release", refuse)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\.; meanwhile unit 0 was made"):
        ZeroEngine(lambda: nn.Sequential(nn.Linear(64, 64)), CONFIG)


class Drawn(nn.Module):
    """Draws by the values of deferred tensors, in ways that take as much of the generator whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = nn.Parameter(torch.rand(40, 40))
        self.coins = nn.Parameter(torch.bernoulli(self.chance.detach()))
        self.noise = nn.Parameter(torch.normal(self.coins.detach(), self.chance.detach()))
        self.after = nn.Linear(40, 40)


class Counts(Drawn):
    """… and in one that takes as much as the values say, which cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.poisson(self.chance.detach() * 9))


def test_values_that_are_drawn_by_values() -> None:
    _same(Drawn)
    with pytest.raises(deferred.NotDeferred, match="poisson"):
        record(Counts)


@pytest.mark.parametrize("look", [lambda w: w.numpy(), lambda w: w.tolist(), lambda w: w.cpu(), lambda w: w[w > 0]])
def test_whoever_looks_cannot_be_recorded(look: Callable[[torch.Tensor], object]) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(64, 64)
        look(layer.weight.detach())
        return layer

    with pytest.raises(deferred.NotDeferred):
        record(build)


def _resident_bytes(kind: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(kind))


def _many() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24)))


def _peak(rank: int, world: int, how: str) -> float:
    """Resident bytes that construction needed at its highest before the optimizer's state, in units of the
    whole weights. A quarter of the parameters and of the gradient are this rank's own."""
    record(lambda: nn.Linear(50, 50))  # torch loads what it needs for meta tensors
    seen: list[int] = []
    plain = FlatUnit.make_moments

    def watched(unit: FlatUnit, count: int) -> None:
        seen.append(_resident_bytes("VmHWM"))
        plain(unit, count)

    FlatUnit.make_moments = watched  # type: ignore[method-assign]
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_bytes("VmHWM")
    zero = ZeroEngine(_many if how == "deferred" else _many(), CONFIG)
    return (seen[0] - before) / (4 * zero.layout.numel)


def test_no_rank_ever_holds_the_whole() -> None:
    assert max(run_ranks(4, _peak, "deferred")) < 0.75
    assert min(run_ranks(4, _peak, "ordinary")) > 0.95
