"""The peak of live storages at stage 3 beside what it should be: state, one gathered unit, the buckets, activations.

``peaks.py`` prints a table, ``peaks.py --write`` puts it into docs/zero.md. The peak is that of the second of two real
steps, of the rank that has most, by a ledger of every storage (``engine/watching/track.py``). The sum beside it:

- state in closed form (``contract/partition.py``), parameters, gradients, moments of the shard;
- the largest unit, whole;
- the buckets that are kept (``memory()["buckets"]``): two for messages and two for arrivals, none larger than a unit;
- activations: what an undistributed step of plain torch, watched by the same ledger, needs beyond its parameters when
  each gradient is dropped as it arrives.

What the sum leaves out, and a tenth is left for: units that stay gathered (embeddings), the one that is fetched ahead,
the norm's and the optimizer's scratch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ranks
import torch
from measuring import ROOT
from torch import Tensor, nn

from launcher.contract.partition import ITEM_BYTES
from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.activations.recompute import recompute
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.watching.track import FORWARD, Recorded, Recorder, claim
from launcher.engine.zero import ZeroEngine

PAGE = ROOT / "docs" / "zero.md"
BEGIN, END = "<!-- peaks: begin -->\n", "<!-- peaks: end -->"
WITHIN = 0.10
BATCH = 8


class Convolutions(nn.Module):
    """Residual blocks over images, with normalisation: nothing of it is a transformer."""

    def __init__(self, blocks: int = 8, width: int = 96) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU())
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def _gpt() -> nn.Module:
    torch.manual_seed(1)
    return GPT(GPTConfig(layers=8, hidden=192, heads=6, seq_len=64))


def _convolutions() -> nn.Module:
    torch.manual_seed(1)
    return Convolutions()


def _tokens(rank: int) -> tuple[Tensor, Tensor]:
    both = torch.randint(256, (BATCH, 65), generator=torch.Generator().manual_seed(rank))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def _images(rank: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH, 3, 16, 16, generator=chance), torch.randint(10, (BATCH,), generator=chance)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]] = {
    "GPT, 8 × 192": (_gpt, _tokens),
    "convolutions, 8 × 96": (_convolutions, _images),
}
CASES = [(name, world, how) for name in MODELS for world in (2, 4) for how in ("none", "block")]


@dataclass(frozen=True)
class Peak:
    """Bytes of the rank that has most."""

    model: str
    world: int
    recompute: str
    state: int
    unit: int
    buckets: int
    activations: int
    peak: int

    @property
    def stated(self) -> int:
        return self.state + self.unit + self.buckets + self.activations

    @property
    def over(self) -> float:
        return self.peak / self.stated


def measure(rank: int, world: int, name: str, how: str) -> dict[str, Any]:
    """A :class:`Peak` as a mapping: two steps on this rank among others, and an undistributed one."""
    build, batch = MODELS[name]
    activations = _undistributed(build(), batch(rank), how)
    recorder = Recorder()
    with recorder:
        config = EngineConfig(Zero(3), AdamW(1e-3, clip=1.0), recompute=how)
        engine = ZeroEngine(build, config)
        claim(recorder.ledger, engine)
        for _ in range(2):
            start = len(recorder.ledger.log)
            recorder.ledger.begin(FORWARD)
            engine.backward(engine.model(*batch(rank)))
            engine.step()
    units = engine.layout.units
    found = Peak(
        model=name,
        world=world,
        recompute=how,
        state=engine.state_bytes().total,
        unit=max(unit.padded * ITEM_BYTES[unit.dtype] for unit in units),
        buckets=engine.memory()["buckets"],
        activations=activations,
        peak=Recorded(recorder.ledger, start).peak.total,
    )
    return asdict(found)


def _undistributed(model: nn.Module, batch: tuple[Tensor, Tensor], how: str) -> int:
    """The most that a step holds beyond its parameters, gradients dropped as they arrive."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    recompute(model, how, None)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    recorder = Recorder()
    with recorder:
        for _ in range(2):
            recorder.ledger.peak = 0
            loss = model(*batch)
            loss.backward()
            del loss
    return recorder.ledger.peak - sum(t.untyped_storage().nbytes() for t in model.buffers())


def worst(peaks: Sequence[dict[str, Any]]) -> Peak:
    return max((Peak(**peak) for peak in peaks), key=lambda peak: peak.over)


def table(rows: Sequence[Peak]) -> str:
    heads = "| model | ranks | recompute | state | a unit | buckets | activations | sum | peak | over the sum |"
    lines = [heads, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        sizes = (row.state, row.unit, row.buckets, row.activations, row.stated, row.peak)
        told = " | ".join(f"{size:,}" for size in sizes)
        lines.append(f"| {row.model} | {row.world} | {row.recompute} | {told} | {row.over:.3f}× |")
    return "\n".join(lines)


def write(text: str) -> None:
    page = PAGE.read_text("utf-8")
    found = re.search(re.escape(BEGIN) + ".*?" + re.escape(END), page, re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE} has no marks for peaks")
    PAGE.write_text(page[: found.start()] + BEGIN + text + "\n" + END + page[found.end() :], "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="peaks.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/zero.md")
    given: Any = parser.parse_args()
    rows = [worst(ranks.run(world, measure, name, how)) for name, world, how in CASES]
    print(table(rows))
    if given.write:
        write(table(rows))


if __name__ == "__main__":
    main()
