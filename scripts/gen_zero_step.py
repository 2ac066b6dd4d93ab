"""Draws docs/zero-step.svg: memory and messages of one real step at stage 3, as rank 0 of two saw them (needs torch).

The horizontal axis counts changes of memory, not time, so that the picture is the same wherever it is drawn. Memory is
that of the ledger of storages (``engine/watching/track.py``); messages are seen where collectives live.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "engine")]
PICTURE = ROOT / "docs" / "zero-step.svg"

import torch  # noqa: E402
from engine_models import batches  # noqa: E402
from engine_ranks import run_ranks  # noqa: E402

from launcher.contract.simulation import Held, Peak, Simulation, Timeline  # noqa: E402
from launcher.contract.train import GPT as GPTConfig  # noqa: E402
from launcher.contract.train import AdamW, Zero  # noqa: E402
from launcher.engine.comm import Comm, Pending, connect  # noqa: E402
from launcher.engine.config import EngineConfig  # noqa: E402
from launcher.engine.gpt import GPT  # noqa: E402
from launcher.engine.watching.track import (  # noqa: E402
    BACKWARD,
    CATEGORIES,
    FORWARD,
    UPDATE,
    Ledger,
    Recorded,
    Recorder,
    claim,
)
from launcher.engine.zero import ZeroEngine  # noqa: E402
from launcher.planning.timeline import Bar, Lane, timeline_svg  # noqa: E402

SIZES = GPTConfig(layers=5, hidden=96, heads=4, seq_len=64, vocab=256)
WORLD, MICRO, STEPS, POINTS = 2, 2, 2, 240
TITLE = "A step of ZeRO at stage 3: a GPT of 5 blocks of 96, AdamW, fp32"
COLOURS = {"gather": "#3a9e8c", "reduce": "#c2452d"}

Message = tuple[str, int, int, str]  # kind, places in the ledger's log at which it begins and ends, words


class Seen:
    """A way to communicate that notes where in the ledger each message begins and was waited for."""

    def __init__(self, comm: Comm, ledger: Ledger) -> None:
        self._comm, self._ledger = comm, ledger
        self.bars: list[Message] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def gather(self, flat: torch.Tensor, what: str) -> Pending:
        begin = len(self._ledger.log)
        return _Noted(self, ("gather", begin, what), self._comm.gather(flat, what))

    def reduce(
        self, flat: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, what: str, *, add: bool = False
    ) -> Pending:
        begin = len(self._ledger.log)
        return _Noted(self, ("reduce", begin, what), self._comm.reduce(flat, out, scratch, what, add=add))

    def ended(self, kind: str, begin: int, what: str) -> None:
        self.bars.append((kind, begin, len(self._ledger.log), what))


class _Noted:
    def __init__(self, seen: Seen, about: tuple[str, int, str], pending: Pending) -> None:
        self._seen, self._about, self._pending = seen, about, pending
        self._told = False

    def wait(self) -> None:
        self._pending.wait()
        if not self._told:
            self._told = True
            self._seen.ended(*self._about)


def step(rank: int, world: int) -> tuple[Recorded, list[Message], int]:
    """The second step of a rank: its ledger, its messages, Ψ."""
    recorder = Recorder()
    ledger = recorder.ledger
    with recorder:
        torch.manual_seed(1)
        seen = Seen(connect(same_host="send"), ledger)
        engine = ZeroEngine(GPT(SIZES), EngineConfig(Zero(3), AdamW(1e-3, clip=1.0)), comm=seen)
        claim(ledger, engine)
        for batch in batches(STEPS, MICRO * world, SIZES.vocab, length=SIZES.seq_len):
            mine = batch[rank * MICRO : (rank + 1) * MICRO]
            start, seen.bars = len(ledger.log), []
            ledger.begin(FORWARD)
            loss = engine.model(mine[:, :-1], mine[:, 1:])
            ledger.begin(BACKWARD)
            engine.backward(loss)
            del loss
            ledger.begin(UPDATE)
            engine.step()
        claim(ledger, engine)
        return Recorded(ledger, start, POINTS), seen.bars, engine.layout.psi


def picture() -> str:
    recorded, bars, psi = run_ranks(WORLD, step, timeout_s=200.0)[0]
    peak_of, peak = max(recorded.peaks.items(), key=lambda item: item[1].total)
    marks = [(at, phase) for at, phase in recorded.marks if phase != "build"]

    def holds(held: dict[str, int]) -> tuple[Held, ...]:
        return tuple(Held(what, size) for what, size in held.items())

    seen = Simulation(
        rank=0,
        world_size=WORLD,
        peak_bytes=peak.total,
        peak_phase=peak_of,
        peak_holds=holds(peak.holds),
        peaks=tuple(Peak(phase, moment.total, holds(moment.holds)) for phase, moment in recorded.peaks.items()),
        timeline=Timeline(CATEGORIES, tuple(recorded.points), tuple(marks)),
        parameters=psi,
        state_bytes={},
        volume_elements=0,
        sent_bytes=0,
        collectives="peer",
        torch=torch.__version__,
        took_s=0.0,
    )
    lanes = []
    for kind, colour in COLOURS.items():
        place = [(b - recorded.start, e - recorded.start, what) for which, b, e, what in bars if which == kind]
        drawn = [Bar(b / recorded.share, e / recorded.share, _unit(what), what) for b, e, what in place]
        lanes.append(Lane(kind, colour, drawn))
    return timeline_svg(seen, TITLE, how="a real step; below: messages under way", lanes=lanes)


def _unit(what: str) -> str:
    """The unit's name in that of a message of its."""
    found = re.search(r"unit ([\w.]+)", what)
    return found[1] if found else ""


def main() -> int:
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
