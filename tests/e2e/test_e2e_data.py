"""A job's token files: looked at before it queues, staged to a node's own disk, pushed to nodes without a shared one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from e2e_site import GPT, Site


def dataset_job(name: str, data: str, *, nodes: int = 1, steps: int = 2) -> str:
    return GPT.format(name=name, nodes=nodes, stage=2, steps=steps, every=2).replace("{text: python-stdlib}", data)


def write_tokens(folder: Path, seed: int = 1) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(seed)
    for name, size in (("train.bin", 40_000), ("heldout.bin", 9_000)):
        (folder / name).write_bytes(bytes(source.choices(range(97, 110), k=size)))


def test_data_are_checked_before_the_queue_recorded_and_staged(laptop: Site, tmp_path: Path) -> None:
    lustre, local = tmp_path / "lustre", tmp_path / "disk"
    table = f"datasets: {{pile: {{train: {lustre}/train.bin, heldout: {lustre}/heldout.bin{{more}}}}}}\n"
    cluster = laptop.folder / "clusters" / "here.yaml"
    plain = cluster.read_text() + f"paths: {{node_local: {local}}}\n"
    cluster.write_text(plain + table.replace("{more}", ""))
    laptop.write("jobs/a.yaml", dataset_job("a", "{dataset: pile, stage_to: node_local}"))
    submit = ("submit", "jobs/a.yaml", "--cluster", "here")
    told = laptop.zerun(*submit, code=2).stderr
    assert f"data.tokens: {lustre}/train.bin is not there" in told and "zerun data push pile" in told
    unknown = laptop.zerun(*submit, "--set", "data.dataset=pipe", code=2).stderr
    assert "--set data.dataset: cluster here" in unknown
    assert "no dataset is called 'pipe' (did you mean 'pile'?); known: pile" in unknown
    write_tokens(lustre)
    wrong = "xxh3:" + 32 * "0"
    cluster.write_text(plain + table.replace("{more}", f", train_digest: {wrong}"))
    assert f"the cluster's description says {wrong}" in laptop.zerun(*submit, code=2).stderr
    assert not list((laptop.folder / "runs").glob("a-*")), "refused before anything is written"
    cluster.write_text(plain + table.replace("{more}", ""))
    run = laptop.zerun(*submit, "--follow").stdout.strip()
    recorded: list[dict[str, Any]] = json.loads((laptop.run_folder(run) / "run.json").read_text())["data"]
    assert [(r["role"], r["bytes"], r["digest"][:5]) for r in recorded] == [
        ("tokens", 40_000, "xxh3:"), ("heldout", 9_000, "xxh3:")
    ]  # fmt: skip
    copy = local / "zerun-data" / f"{recorded[0]['digest'][5:]}-train.bin"
    assert copy.read_bytes() == (lustre / "train.bin").read_bytes()
    setup = laptop.run_folder(run) / "attempts" / "1" / "logs" / "setup-localhost.log"
    assert f"copied to {copy} (40000 bytes, xxh3:" in setup.read_text()
    # A run goes on with the data that it began with, or not at all.
    write_tokens(lustre, seed=2)
    refused = laptop.zerun("resume", run, "--set", "steps=4", code=2).stderr
    assert f"{lustre}/train.bin is not the file that the run began with" in refused
    write_tokens(lustre)
    # Equal data are not copied twice; a copy that was changed behind our back is.
    (local / "zerun-data" / f"{recorded[1]['digest'][5:]}-heldout.bin").write_bytes(b"damaged")
    laptop.zerun("resume", run, "--set", "steps=4", "--follow")
    setup = laptop.run_folder(run) / "attempts" / "2" / "logs" / "setup-localhost.log"
    assert f"{lustre}/train.bin is at {copy} already" in setup.read_text()
    assert f"{lustre}/heldout.bin copied to" in setup.read_text()


@pytest.mark.full
def test_relative_data_travel_and_odd_sizes_are_refused(laptop: Site) -> None:
    write_tokens(laptop.folder / "data")
    text = dataset_job("b", "{tokens: data/train.bin, heldout: data/heldout.bin}").replace(
        "name: b", "name: b\ncode: {root: ..}"
    )
    laptop.write("jobs/b.yaml", text)
    run = laptop.zerun("submit", "jobs/b.yaml", "--cluster", "here", "--follow").stdout.strip()
    recorded = json.loads((laptop.run_folder(run) / "run.json").read_text())["data"]
    assert [r["path"] for r in recorded] == ["data/train.bin", "data/heldout.bin"] and recorded[0]["bytes"] == 40_000
    (laptop.folder / "data" / "train.bin").write_bytes(b"abc")
    odd = laptop.zerun("submit", "jobs/b.yaml", "--cluster", "here", "--set", "model.vocab=300", code=2).stderr
    assert "has 3 bytes; a vocabulary of 300 takes 2 for each token" in odd
    staged = laptop.zerun("submit", "jobs/b.yaml", "--cluster", "here", "--set", "data.stage_to=node_local", code=2)
    assert "has no paths.node_local to stage to" in staged.stderr
