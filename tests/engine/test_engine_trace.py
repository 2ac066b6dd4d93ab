"""Messages pass while others compute: read from the trace of a real step, by the order of its spans and no clock."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import batches
from engine_ranks import run_ranks

from launcher.contract.train import GPT as GPTConfig
from launcher.contract.train import AdamW, Zero
from launcher.engine.comm import connect
from launcher.engine.comm.choose import SEND
from launcher.engine.config import EngineConfig
from launcher.engine.gpt import GPT
from launcher.engine.watching.trace import COMPUTE, GATHER, REDUCE, WAIT, Span, Trace
from launcher.engine.zero import ZeroEngine

LAYERS = 4


def _step(rank: int, world: int, stage: int, path: str) -> list[list[Span]]:
    torch.manual_seed(3)
    trace = Trace()
    model = GPT(GPTConfig(layers=LAYERS, hidden=16, heads=2, seq_len=8, vocab=32))
    engine = ZeroEngine(model, EngineConfig(Zero(stage), AdamW(1e-3)), comm=trace.of(connect(same_host=SEND)))
    trace.watch(engine)

    def step(tokens: torch.Tensor) -> None:
        engine.backward(engine.model(tokens[:, :-1], tokens[:, 1:]))
        with trace.span("step"):
            engine.step()

    first, second = batches(2, 2, 32, length=8)
    step(first)
    assert not trace.spans, "nothing is kept where nothing records"
    with trace.recording():
        step(second)
    return trace.write(path, engine.comm)


def _one(spans: list[Span], kind: str, what: str, last: bool = False) -> Span:
    found = [s for s in spans if s.kind == kind and s.what == what]
    assert found, (kind, what, sorted({s.what for s in spans}))
    return found[-1 if last else 0]


def _message(unit: int, gradients: bool = False) -> str:
    return f"{'sum of the gradients' if gradients else 'gather'} of unit blocks.{unit}, bucket 0"


def test_at_stage_3_messages_pass_while_units_compute(tmp_path: Path) -> None:
    for ranks in run_ranks(2, _step, 3, str(tmp_path / "step.json")):
        for spans in ranks:
            for unit in range(LAYERS - 1):
                forward = _one(spans, COMPUTE, f"forward blocks.{unit}")
                ahead = _one(spans, GATHER, _message(unit + 1))
                assert ahead.begin < forward.end, f"unit {unit + 1} is fetched before unit {unit}'s forward ends"
                assert ahead.end > forward.begin, "and waited for later"
            for unit in range(1, LAYERS):
                backward = _one(spans, COMPUTE, f"backward blocks.{unit - 1}")
                reduction = _one(spans, REDUCE, _message(unit, gradients=True))
                assert reduction.begin < backward.begin and reduction.end > backward.begin, (
                    f"the gradients of unit {unit} are on their way when unit {unit - 1}'s backward begins"
                )
                if unit < LAYERS - 1:  # the last unit stays gathered
                    behind = _one(spans, GATHER, _message(unit - 1), last=True)
                    own = _one(spans, COMPUTE, f"backward blocks.{unit}")
                    assert behind.begin < own.end, f"unit {unit - 1} is fetched before unit {unit}'s backward ends"
    _assert_readable(tmp_path / "step.json")


def _assert_readable(path: Path) -> None:
    """What perfetto asks of the format: metadata, complete events that nest on a track, pairs of asynchronous ones."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"rank 0", "rank 1", COMPUTE, WAIT}
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        tracks = [[e for e in mine if e["ph"] == "X" and e["tid"] == track] for track in (0, 1)]
        for rows in tracks:
            rows.sort(key=lambda e: e["ts"])
            assert rows
            for before, after in itertools.pairwise(rows):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (before, after)
        opened = {e["id"]: e["ts"] for e in mine if e["ph"] == "b"}
        closed = {e["id"]: e["ts"] for e in mine if e["ph"] == "e"}
        assert opened.keys() == closed.keys() and all(opened[i] <= closed[i] for i in opened)
        assert {e["cat"] for e in mine if e["ph"] == "b"} == {GATHER, REDUCE}


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_without_sharded_parameters_gradients_alone_pass_beside_backward(tmp_path: Path, stage: int) -> None:
    for spans in run_ranks(2, _step, stage, str(tmp_path / "step.json"))[0]:
        for unit in range(1, LAYERS):
            reduction = _one(spans, REDUCE, _message(unit, gradients=True))
            backward = _one(spans, COMPUTE, f"backward blocks.{unit - 1}")
            assert reduction.begin < backward.begin < reduction.end
        # Parameters of stage 2 that the last step left under way are waited for in this forward; its own go off later.
        last = _one(spans, COMPUTE, "backward blocks.0").end
        first = _one(spans, COMPUTE, "forward blocks.0").begin
        gathers = [s for s in spans if s.kind == GATHER and "gradients" not in s.what]
        assert all(s.begin > last or s.begin < first for s in gathers)
        assert bool(gathers) == (stage == 2)
