"""A job's token files: looked at before it queues, staged to a node's own disk, pushed to nodes that keep their own."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from e2e_site import GPT, PROGRAM, Site


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


FINDS = """\
import json, os, pathlib

told = {name: value for name, value in os.environ.items() if name.startswith("ZERUN_DATA")}
print(json.dumps({name: [path, len(pathlib.Path(path).read_bytes())] for name, path in sorted(told.items())}))
"""


def test_a_programs_data_are_checked_staged_and_told_by_name(laptop: Site, tmp_path: Path) -> None:
    lustre, local = tmp_path / "lustre", tmp_path / "disk"
    cluster = laptop.folder / "clusters" / "here.yaml"
    sets = ", ".join(f"{name}: {{train: {lustre}/{name}/train.bin}}" for name in ("pile", "c4-en"))
    cluster.write_text(cluster.read_text() + f"paths: {{node_local: {local}}}\ndatasets: {{{sets}}}\n")
    laptop.write("finds.py", FINDS)
    laptop.write("own/held.bin", "abc")
    job = PROGRAM.format(name="p", nodes=1, time="5:00", python="python", more="data: {data}").replace(
        "script.py", "finds.py"
    )
    submit = ("submit", "jobs/p.yaml", "--cluster", "here")
    laptop.write("jobs/p.yaml", job.replace("{data}", "{datasets: [pile, c4], stage_to: node_local}"))
    assert "jobs/p.yaml" in (told := laptop.zerun(*submit, code=2).stderr) and "no dataset is called 'c4'" in told
    laptop.write("jobs/p.yaml", job.replace("{data}", "{datasets: [pile, c4-en], stage_to: node_local}"))
    write_tokens(lustre / "pile")
    told = laptop.zerun(*submit, code=2).stderr
    assert f"data.c4-en.tokens: {lustre}/c4-en/train.bin is not there" in told
    assert "zerun data push c4-en --cluster here copies it there" in told
    write_tokens(lustre / "c4-en", seed=2)
    run = laptop.zerun(*submit, "--follow").stdout.strip()

    def seen() -> Any:
        line = laptop.zerun("logs", run, "--rank", "0").stdout.splitlines()[-1]
        return json.loads(line[line.index("{") :])

    recorded = json.loads((laptop.run_folder(run) / "run.json").read_text())["data"]
    assert [r["role"] for r in recorded] == ["pile.tokens", "c4-en.tokens"]
    copies = [f"{local}/zerun-data/{r['digest'].partition(':')[2][:32]}-train.bin" for r in recorded]
    assert seen() == {"ZERUN_DATA_C4_EN_TRAIN": [copies[1], 40_000], "ZERUN_DATA_PILE_TRAIN": [copies[0], 40_000]}
    write_tokens(lustre / "pile", seed=3)
    assert "is not the file that the run began with" in laptop.zerun("resume", run, "--set", "time=6:00", code=2).stderr
    # Not staged: where they are; of the code, where that was unpacked.
    laptop.write("jobs/p.yaml", job.replace("{data}", f"{{tokens: {lustre}/pile/train.bin, heldout: own/held.bin}}"))
    run = laptop.zerun(*submit, "--follow").stdout.strip()
    held = [str(laptop.run_folder(run) / "code" / "own" / "held.bin"), 3]
    assert seen() == {"ZERUN_DATA_HELDOUT": held, "ZERUN_DATA_TRAIN": [f"{lustre}/pile/train.bin", 40_000]}


def test_a_rank_that_had_no_room_is_exit_6(laptop: Site) -> None:
    laptop.write("script.py", "open('/dev/full', 'w').write('x' * 100_000)\n")
    laptop.write("jobs/f.yaml", PROGRAM.format(name="f", nodes=1, time="5:00", python="python", more=""))
    done = laptop.zerun("submit", "jobs/f.yaml", "--cluster", "here", "--follow", code=6)
    assert "No space left on device" in done.stderr and "zerun cluster check here" in done.stderr
    assert laptop.json("wait", done.stdout.strip(), code=6)["cause"]["no_space"] is True


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


@pytest.mark.full
def test_a_dataset_is_pushed_to_every_node_and_proven_there(rack: Site, testbed: Any) -> None:
    folder = "/scratch/trainer/sets/pile"
    table = f"datasets: {{pile: {{train: {folder}/train.bin, heldout: {folder}/held/heldout.bin}}}}\n"
    cluster = rack.folder / "clusters" / "rack.yaml"
    cluster.write_text(cluster.read_text() + table)
    write_tokens(rack.folder / "data" / "pile")
    told = rack.zerun("data", "push", "pile", "--cluster", "rack")
    assert "pile: 2 files, 47.9 KiB; 191.4 KiB go to node01, node02, node03, node04" in told.stderr
    assert "pile is right on node01, node02, node03, node04; moved to node01, node02" in told.stdout
    right = (rack.folder / "data" / "pile" / "heldout.bin").read_bytes()
    for node in testbed.nodes:
        assert testbed.exec(node, ["cat", f"{folder}/held/heldout.bin"]).stdout == right
    # One byte is wrong, size and time are not: found, and only that node is served again.
    flip = f"f=open('{folder}/train.bin','r+b'); f.write(b'X'); import os; s=os.stat(f.fileno()); f.close(); "
    damage = flip + f"os.utime('{folder}/train.bin', ns=(s.st_mtime_ns, s.st_mtime_ns + 1))"
    testbed.exec("node03", ["python3", "-c", damage])
    rack.write("jobs/d.yaml", dataset_job("d", "{dataset: pile}", nodes=4))
    refused = rack.zerun("submit", "jobs/d.yaml", "--cluster", "rack", code=2).stderr
    assert "train.bin is not the same file on every node" in refused and "on node03" in refused
    again = rack.json("data", "push", "pile", "--cluster", "rack")
    assert again["moved"] == ["node03"] and len(again["nodes"]) == 4
    # A node that cannot take it is named, and the others have it all the same.
    testbed.exec("node02", ["rm", "-rf", "/scratch/trainer/sets"])
    testbed.exec("node02", ["install", "-d", "-m", "555", "/scratch/trainer/sets"])
    testbed.exec("node04", ["rm", f"{folder}/train.bin"])
    part = rack.zerun("data", "push", "pile", "--cluster", "rack", code=8).stderr
    assert "pile is on node01, node03, node04, not on node02" in part and "Permission denied" in part
    missing = rack.zerun("submit", "jobs/d.yaml", "--cluster", "rack", code=2).stderr
    assert "train.bin is not there (node02)" in missing and "zerun data push pile --cluster rack" in missing
    testbed.exec("node02", ["chmod", "755", "/scratch/trainer/sets"])
    cluster.write_text(cluster.read_text().replace("heldout.bin}", f"heldout.bin, train_digest: 'sha256:{64 * '0'}'}}"))
    assert "the description of rack says" in rack.zerun("data", "push", "pile", "--cluster", "rack", code=7).stderr
