"""Checkpoints as the engine leaves them, written without torch: right sizes, right digests, a real layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from local_places import attempt_at, write_record

from launcher.backends.protocol import Place
from launcher.checkpoints.verify import digests
from launcher.contract import partition
from launcher.contract.folder import RunFolder
from launcher.contract.launch import LaunchSpec, Node
from launcher.contract.manifest import FORMAT, Manifest, ShardFile
from launcher.contract.plain import dumps, write_atomically
from launcher.contract.train import GPT, AdamW, Batch, Data, TrainConfig, Zero

BUCKET = 4000


def layout(ranks: int) -> partition.Layout:
    return partition.build(partition.gpt_parameters(1, 8, 8, 16), ranks=ranks, bucket_bytes=BUCKET)


def launch(run_dir: str, nodes: Sequence[str], slots: int, *, shared: bool, attempt: int = 1) -> LaunchSpec:
    train = TrainConfig(
        zero=Zero(3, bucket_bytes=BUCKET),
        optimizer=AdamW(1e-3),
        batch=Batch(1, 1),
        steps=10,
        data=Data(text="python-stdlib"),
        gpt=GPT(1, 8, 1, 8, 16),
    )
    named = tuple(Node(n, slots) for n in nodes)
    return LaunchSpec("job-1", attempt, run_dir, "/r.zip", named, shared, "token", "python", "python", train=train)


def write_run(places: Sequence[Place], nodes: Sequence[str], slots: int = 2) -> None:
    """An attempt that ended: records, launch.json, logs and metrics of each node in the place that holds them."""
    for index, node in enumerate(nodes):
        place = places[index % len(places)]
        folder = attempt_at(place, "job-1")
        Path(folder.metrics).mkdir(exist_ok=True)
        ranks = range(index * slots, (index + 1) * slots)
        run_dir = str(RunFolder.at(place.runs, "job-1").root)
        spec = launch(run_dir, nodes, slots, shared=len(places) == 1)
        write_atomically(str(folder.launch), dumps(spec))
        write_record(folder, node, ranks)
        for rank in ranks:
            Path(folder.log(rank)).write_bytes(b"line of rank %d\n" % rank * 100)
            Path(folder.metrics_of(rank)).write_bytes(b'{"step":1}\n')


def write_checkpoint(
    places: Sequence[Place], nodes: Sequence[str], step: int, *, slots: int = 2, size: int = 70_000, attempt: int = 1
) -> Manifest:
    """A shard a rank on its node's place; the manifest on every place."""
    shards = []
    for rank in range(len(nodes) * slots):
        place = places[(rank // slots) % len(places)]
        folder = RunFolder.at(place.runs, "job-1").checkpoint(step)
        path = Path(folder.shard(rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(f"{step}.{rank}.{attempt}").randbytes(size + rank))
        whole, blocks = digests(path)
        shards.append(ShardFile(rank, nodes[rank // slots], path.name, size + rank, whole, blocks))
    manifest = Manifest(
        FORMAT,
        "job-1",
        attempt,
        step,
        100,
        8,
        1,
        layout(len(shards)),
        tuple(shards),
        scalars={"optimizer_updates": step},
    )
    for place in places:
        path = Path(RunFolder.at(place.runs, "job-1").checkpoint(step).manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(manifest.to_bytes())
    return manifest


def flip(path: Path, at: int) -> None:
    """One bit, as a bad cable or disk would."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
