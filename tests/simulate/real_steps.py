"""Steps of the real engine on real ranks, with every storage recorded: what a simulation is held against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from launcher.contract.plain import from_plain, to_plain
from launcher.contract.train import GPT, SGD, AdamW, Batch, Data, TrainConfig, Zero
from launcher.engine.job.loop import traffic_of
from launcher.engine.job.place import Place
from launcher.engine.job.policy import wrap
from launcher.engine.job.sources import make_model
from launcher.engine.ranks import Ranks
from launcher.engine.rehearsal.simulate import Rehearsal, Watched
from launcher.engine.watching.track import FORWARD, Recorded, Recorder, claim

MODEL = GPT(layers=3, hidden=96, heads=3, seq_len=50, vocab=300)
SMALL = GPT(layers=2, hidden=92, heads=4, seq_len=50, vocab=301)
"""For tensor ranks, which divide heads, and for 16-bit precisions, which are slow here."""

SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16, gradients too": {"precision": "bf16", "gradient_dtype": "bf16"},
    "fp16": {"precision": "fp16"},
    "SGD": {"optimizer": SGD(1e-3, momentum=0.0, clip=1.0)},
    "SGD with momentum": {"optimizer": SGD(1e-3, momentum=0.9)},
    "reduced every step": {"reduce_every": "step"},
    "reduced every micro-step": {"reduce_every": "micro_step"},
    "activations in host memory": {"activations": "host"},
    "2 tensor ranks": {"tensor": 2},
    "2 tensor ranks, bf16": {"tensor": 2, "precision": "bf16"},
    "2 tensor ranks, activations partitioned": {"tensor": 2, "activations": "partitioned"},
    "2 tensor ranks, activations in host memory": {"tensor": 2, "activations": "host"},
}
"""What else a step's memory hangs on, beside stage, recomputation and ranks."""


def setting(name: str, stage: int, recompute: str) -> TrainConfig:
    """The job of a row of the second table."""
    changes = dict(SETTINGS[name])
    of_zero = {key: changes.pop(key) for key in ("gradient_dtype", "reduce_every") if key in changes}
    made = config(stage, recompute=recompute, gpt=SMALL, **changes)
    return replace(made, zero=replace(made.zero, **of_zero))


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
        ranks = Ranks.connect(train.tensor, replicas=train.zero.replicas)
        policy = wrap(lambda: make_model(train, ranks.tensor), train, device, ranks)
        engine = policy.engine  # type: ignore[attr-defined]
        claim(recorder.ledger, engine)
        place = Place(rank, rank, world, world, "", 0, "here", device)
        batches: Any = _Tokens(train.gpt.vocab, train.gpt.seq_len)
        rehearsal = Rehearsal(train, place, Watched(engine, recorder.ledger), batches)
        for _ in range(2):
            start, before = len(recorder.ledger.log), _sent(ranks)
            recorder.ledger.begin(FORWARD)
            rehearsal.one_step()
        sent = _sent(ranks) - before
        claim(recorder.ledger, engine)  # some of what it keeps is made in the first step
    peaks = Recorded(recorder.ledger, start).peaks
    return {"sent": sent, **{phase: (moment.total, moment.holds) for phase, moment in peaks.items()}}


def _sent(ranks: Ranks) -> int:
    return sum(int(count) for name, count in traffic_of(ranks).items() if name.endswith("sent_bytes"))


def measure_all(rank: int, world: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [measure(from_plain(TrainConfig, case), rank, world) for case in cases]


def plain(train: TrainConfig) -> Any:
    return to_plain(train)
