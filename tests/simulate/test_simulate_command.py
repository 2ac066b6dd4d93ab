"""``zerun plan --simulate``: what it says, what it draws, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from launcher.planning.memory import readable

ROOT = Path(__file__).parents[2]
JOB = """
name: own
cluster: {cluster}
model: {{factory: "{factory}", options: {{width: 8}}}}
data: {{tokens: train.bin, options: {{seq_len: 16, vocab: 50}}}}
zero: {{stage: 3}}
optimizer: {{lr: 1e-3}}
batch: {{micro: 2, accumulation: 1}}
steps: 3
"""
MODELS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, tokens, targets):
        x = self.table(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), targets.flatten())

def make(width):
    return Model(width)

def broken(width):
    return open("corpus-that-is-elsewhere.txt").read()
"""
CLUSTER = """
name: pair
backend: direct
nodes: {names: localhost, slots: 2}
device: {kind: cpu, memory: 1GiB}
"""


def zerun(*arguments: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ZERUN_RUNS": str(folder / "runs"), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    (tmp_path / "ownmodels.py").write_text(MODELS)
    return tmp_path


def job(folder: Path, factory: str) -> str:
    (folder / "job.yaml").write_text(JOB.format(cluster="pair.yaml", factory=factory))
    return "job.yaml"


def test_a_model_of_ones_own(folder: Path) -> None:
    """Arithmetic does not know it; the simulation counts it, says what was alive, decides, and draws."""
    done = zerun(
        "plan", job(folder, "ownmodels:make"), "--cluster", "pair.yaml", "--simulate", "--rank", "1",
        "--svg", "step.svg", "--json", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["parameters"] == 50 * 8 + 3 * (8 * 8 + 8)
    assert told["peak_bytes"] == sum(h["bytes"] for h in told["peak_holds"])
    assert {"parameters", "gradients", "optimizer", "activations"} <= {h["what"] for h in told["peak_holds"]}
    assert told["simulation"]["rank"] == 1 and "timeline" not in told["simulation"]
    assert {s["source"] for s in told["step"]} == {"simulated", "assumed"}
    assert told["verdict"] == "fits"
    root = ElementTree.parse(folder / "step.svg").getroot()
    drawn = {t.text for t in root.iter("{http://www.w3.org/2000/svg}title")}
    assert {"parameters", "optimizer", "gathered", "activations"} <= drawn
    words = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [w for w in words if w.startswith("peak ")] == [f"peak {readable(told['peak_bytes'])}, in backward"]
    assert {"0", "forward", "backward", "update", "gathered parameters"} <= set(words)
    assert len([w for w in words if w.endswith(" kB") and float(w[:-3]) % 1 == 0]) >= 3, "an axis of round numbers"
    assert not (folder / "runs").exists()


def test_a_factory_that_reads_data_is_told_with_its_own_lines(folder: Path) -> None:
    done = zerun("plan", job(folder, "ownmodels:broken"), "--cluster", "pair.yaml", "--simulate", folder=folder)
    assert done.returncode == 2
    assert "model.factory: ownmodels:broken" in done.stderr and "corpus-that-is-elsewhere.txt" in done.stderr
    assert "job.yaml:4: " in done.stderr, "where the job names it"
    assert "ownmodels.py" in done.stderr and "in broken" in done.stderr
    assert "sources.py" not in done.stderr, "our own frames are of no use to them"
    (folder / "ownmodels.py").write_text(MODELS + "DATA = open('corpus-at-import.txt').read()\n")
    done = zerun("plan", job(folder, "ownmodels:make"), "--cluster", "pair.yaml", "--simulate", folder=folder)
    assert done.returncode == 2 and "job.yaml:4: model.factory: ownmodels:make failed" in done.stderr
    assert "in <module>" in done.stderr and "No such file or directory: 'corpus-at-import.txt'" in done.stderr
    assert "importlib" not in done.stderr


def test_without_torch_it_says_what_to_install(folder: Path) -> None:
    bare = "/usr/bin/python3"
    probe = subprocess.run([bare, "-c", "import torch"], capture_output=True)
    if probe.returncode == 0:
        pytest.skip("the system's Python has torch")
    done = zerun(
        "plan", job(folder, "ownmodels:make"), "--cluster", "pair.yaml", "--simulate",
        folder=folder, ZERUN_TORCH_PYTHON=bare,
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs torch" in done.stderr and f"{bare} -m pip install torch" in done.stderr


def test_what_cannot_be_simulated_is_named(folder: Path) -> None:
    name = job(folder, "ownmodels:make")
    for words, said in (
        (["--simulate", "--rank", "2"], "rank 2 is not in a world of 2"),
        (["--rank", "1"], "give --simulate with them"),
        (["--simulate", "--search"], "--simulate is of one plan"),
        (["--search"], "how many parameters factory ownmodels:make has"),
    ):
        done = zerun("plan", name, "--cluster", "pair.yaml", *words, folder=folder)
        assert done.returncode == 2 and said in done.stderr
    (folder / "program.yaml").write_text("name: p\ncluster: pair.yaml\nprogram: {argv: [python, train.py]}\n")
    done = zerun("plan", "program.yaml", "--cluster", "pair.yaml", "--simulate", folder=folder)
    assert done.returncode == 2 and "a program of its own" in done.stderr
