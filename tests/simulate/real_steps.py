"""Steps of the real engine on real ranks, with every storage recorded: what a simulation is held against."""

from __future__ import annotations

from typing import Any

import torch

from launcher.contract.plain import from_plain, to_plain
from launcher.contract.train import GPT, AdamW, Batch, Data, TrainConfig, Zero
from launcher.engine.place import Place
from launcher.engine.policy import wrap
from launcher.engine.ranks import Ranks
from launcher.engine.simulate import Rehearsal, Watched
from launcher.engine.sources import make_model
from launcher.engine.track import FORWARD, Recorded, Recorder, claim

MODEL = GPT(layers=3, hidden=96, heads=3, seq_len=50, vocab=300)


def config(stage: int, *, recompute: str = "none", precision: str = "fp32", **changes: Any) -> TrainConfig:
    """Two micro-batches of a model whose sizes divide nothing, in buckets smaller than its largest parameter."""
    values: dict[str, Any] = {
        "zero": Zero(stage, bucket_bytes=70_000),
        "optimizer": AdamW(1e-3, clip=1.0),
        "batch": Batch(micro=4, accumulation=2),
        "steps": 4,
        "data": Data(tokens="train.bin"),
        "gpt": MODEL,
        "recompute": recompute,
        "precision": precision,
    }
    return TrainConfig(**{**values, **changes})


class _Tokens:
    heldout_batches = 0
    tokens_per_sample = 50

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self.length = vocab, length

    def train(self, first: int, count: int) -> Any:
        both = torch.randint(0, self.vocab, (count, self.length + 1))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def measure(train: TrainConfig, rank: int, world: int) -> dict[str, Any]:
    """Two steps; of the second each phase's peak and what was alive then."""
    assert train.gpt is not None
    device = torch.device("cpu")
    recorder = Recorder()
    with recorder:
        ranks = Ranks.connect(train.tensor)
        policy = wrap(lambda: make_model(train, ranks.tensor), train, device, ranks)
        engine = policy.engine  # type: ignore[attr-defined]
        claim(recorder.ledger, engine)
        place = Place(rank, rank, world, world, "", 0, "here", device)
        batches: Any = _Tokens(train.gpt.vocab, train.gpt.seq_len)
        rehearsal = Rehearsal(train, place, Watched(engine, recorder.ledger), batches)
        for _ in range(2):
            start, before = len(recorder.ledger.log), engine.comm.traffic.sent_bytes
            recorder.ledger.begin(FORWARD)
            rehearsal.one_step()
        sent = engine.comm.traffic.sent_bytes - before
    peaks = Recorded(recorder.ledger, start).peaks
    return {"sent": sent, **{phase: (moment.total, moment.holds) for phase, moment in peaks.items()}}


def measure_all(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [measure(from_plain(TrainConfig, case), rank, world) for case in cases]


def plain(train: TrainConfig) -> Any:
    return to_plain(train)
