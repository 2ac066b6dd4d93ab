"""jobs/examples/hf.yaml as it stands: a Hugging Face Llama at stage 3, saved, and resumed on another world size."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from e2e_site import Site


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `hf` (make test installs it)"
)
def test_the_example_trains_and_goes_on_with_another_number_of_ranks(laptop: Site, project: Path) -> None:
    (laptop.folder / "jobs" / "examples").mkdir()
    for name in ("hf.yaml", "llama.py"):
        shutil.copy(project / "jobs" / "examples" / name, laptop.folder / "jobs" / "examples" / name)
    laptop.write(".zerunignore", "config/\n")
    job = laptop.folder / "jobs" / "examples" / "hf.yaml"
    text = job.read_text()
    assert "code:" not in text, "the git root travels; here there is none"
    job.write_text(text.replace("steps: 100", "steps: 10").replace("every: 50", "every: 5") + "code: {root: ../..}\n")
    run = laptop.zerun("submit", "jobs/examples/hf.yaml", "--cluster", "here", "--follow").stdout.strip()
    again = laptop.zerun("resume", run, "--set", "slots_per_node=1", "--set", "steps=14", "--follow")
    assert "step 10: whole, taken" in again.stderr and "saved by 2 ranks" in laptop.zerun("logs", run).stdout
    folder = laptop.run_folder(run) / "attempts"
    rows = [
        json.loads(line)
        for attempt in (1, 2)
        for line in (folder / str(attempt) / "metrics" / "rank-00000.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert sum(r["loss"] for r in rows[11:]) / 3 < rows[0]["loss"] - 0.3
    assert (laptop.run_folder(run) / "checkpoints" / "step-00000014" / "manifest.json").is_file()


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the extra `hf` (make test installs it)"
)
def test_its_own_loss_of_samples_from_a_data_factory(laptop: Site, project: Path) -> None:
    (laptop.folder / "jobs" / "examples").mkdir()
    shutil.copy(project / "jobs" / "examples" / "llama.py", laptop.folder / "jobs" / "examples" / "llama.py")
    text = (project / "jobs" / "examples" / "hf.yaml").read_text().replace("steps: 100", "steps: 16")
    text = text.replace("text: python-stdlib", "factory: jobs.examples.llama:stream").replace("vocab: 256", "period: 5")
    lines = [line for line in text.splitlines() if not line.strip().startswith("loss:")]
    laptop.write("jobs/examples/hf.yaml", "\n".join(lines) + "\ncode: {root: ../..}\n")
    run = laptop.zerun("submit", "jobs/examples/hf.yaml", "--cluster", "here", "--follow").stdout.strip()
    metrics = laptop.run_folder(run) / "attempts" / "1" / "metrics" / "rank-00000.jsonl"
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 16 and losses[-1] < losses[0] - 0.3
