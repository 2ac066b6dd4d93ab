"""Which optimizer a job names, what goes with it, and what of it reaches plan and engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.contract.errors import DescriptionError
from launcher.contract.train import SGD, AdamW, ParameterGroup
from launcher.planning.make import _groups, _moments, _optimizer
from launcher.planning.shapes import gpt_layout
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


def test_groups_reach_plan_and_engine(tmp_path: Path) -> None:
    text = JOB % "weight_decay: 0.1"
    (tmp_path / "x.yaml").write_text(text.replace("0.1}\n", "0.1, " + _ONE_LINE + "}\n"))
    job = load_job(tmp_path / "x.yaml", [])
    assert _groups(job) == (
        ParameterGroup(("*norm*", "*.bias"), None, 0.0),
        ParameterGroup(("embedding.*", "position.weight"), 0.05, None),
    )
    assert job_from_plain(describe(job)) == job
    layout = gpt_layout(job.model, ranks=2, bucket_bytes=1000, groups=tuple(g.match for g in job.optimizer.groups))  # type: ignore[arg-type,union-attr]
    numbers = {p.name: p.group for p in layout.by_name.values()}
    assert numbers["embedding.weight"] == numbers["position.weight"] == 2
    assert numbers["blocks.1.norm2.weight"] == numbers["blocks.0.mlp.up.bias"] == numbers["norm.bias"] == 1
    assert numbers["blocks.1.mlp.up.weight"] == 0


_ONE_LINE = (
    'groups: [{match: ["*norm*", "*.bias"], weight_decay: 0}, {match: ["embedding.*", "position.weight"], lr: 0.05}]'
)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ('[{match: ["*.biass"], lr: 1}]', ":7:40: '*.biass' matches no parameter of the model; closest: blocks.0"),
        ('[{match: [norm.wieght], lr: 1}]', "closest: norm.weight"),
        ('[{match: ["*"], lr: 1}, {match: ["norm.*"], lr: 2}]', ":7:63: 'norm.*' is left nothing: an earlier"),
        ('[{match: [norm.weight]}]', "a group changes nothing; write lr, weight_decay or both"),
        ('[{match: "*.bias", lr: 1}]', "a list was expected, not '*.bias'"),
        ('[{match: [x], lr: 1, betas: [0, 0]}]', "unknown key 'betas'"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_meant(tmp_path: Path, groups: str, says: str) -> None:
    with pytest.raises(DescriptionError) as caught:
        _load(tmp_path, f"groups: {groups}")
    assert says in str(caught.value)


def test_a_function_gives_the_groups_of_a_model_of_ones_own(tmp_path: Path) -> None:
    own = JOB.replace("{kind: gpt, layers: 2, hidden: 32, heads: 2, seq_len: 32}", "{factory: m:model}")
    own = own.replace("{text: python-stdlib}", "{factory: m:data}") % "clip: 1"
    (tmp_path / "x.yaml").write_text(own + "groups: m:groups\n")
    job = load_job(tmp_path / "x.yaml", [])
    assert job.groups == "m:groups" and job_from_plain(describe(job)) == job
    with pytest.raises(DescriptionError, match=r":8:1: groups goes with a model of your own; write optimizer\.groups"):
        (tmp_path / "x.yaml").write_text(JOB % "clip: 1" + "groups: m:groups\n")
        load_job(tmp_path / "x.yaml", [])
    with pytest.raises(DescriptionError, match=r"write groups or optimizer\.groups, not both"):
        (tmp_path / "x.yaml").write_text(own.replace("clip: 1", _ONE_LINE) + "groups: m:groups\n")
        load_job(tmp_path / "x.yaml", [])
