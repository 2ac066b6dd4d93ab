"""Which optimizer a job names, what goes with it, and what of it reaches plan and engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.contract.errors import DescriptionError
from launcher.contract.train import SGD, AdamW
from launcher.planning.make import _moments, _optimizer
from launcher.specs import describe, job_from_plain, load_job
from launcher.specs.models import Job

JOB = """name: x
model: {kind: gpt, layers: 2, hidden: 32, heads: 2, seq_len: 32}
data: {text: python-stdlib}
zero: {stage: 2}
batch: {micro: 2, accumulation: 1}
steps: 5
optimizer: {lr: 0.1, %s}
"""


def _load(folder: Path, words: str) -> Job:
    (folder / "x.yaml").write_text(JOB % words)
    return load_job(folder / "x.yaml", [])


@pytest.mark.parametrize(
    ("words", "expected", "counted"),
    [
        ("kind: sgd", SGD(0.1, 0.0), "sgd"),
        (
            "kind: sgd, momentum: 0.9, nesterov: true, weight_decay: 0.1",
            SGD(0.1, 0.9, nesterov=True, weight_decay=0.1),
            "momentum",
        ),
        ("betas: [0.8, 0.9]", AdamW(0.1, betas=(0.8, 0.9)), "adamw"),
    ],
)
def test_an_optimizer_reaches_the_engine(tmp_path: Path, words: str, expected: SGD | AdamW, counted: str) -> None:
    job = _load(tmp_path, words)
    assert job.optimizer is not None
    assert _optimizer(job.optimizer) == expected
    assert _moments(job.optimizer) == counted
    assert job_from_plain(describe(job)) == job


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("kind: sgd, betas: [0.9, 0.99]", "betas goes with kind: adamw; this is sgd"),
        ("momentum: 0.9", "momentum goes with kind: sgd; this is adamw"),
        ("kind: sgd, nesterov: true", "nesterov needs a momentum above 0"),
        ("kind: muon", "'muon' is not accepted; accepted: adamw, sgd"),
        ("kind: sgd, momentum: 1.0", "out of range"),
    ],
)
def test_what_does_not_go_together_is_said_at_its_place(tmp_path: Path, words: str, said: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        _load(tmp_path, words)
    assert "x.yaml:7:" in str(caught.value) and said in str(caught.value)
