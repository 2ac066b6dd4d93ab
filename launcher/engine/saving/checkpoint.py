"""Saving and loading a partitioned state: a shard a rank, then a manifest that makes it a checkpoint.

What a rank owns is saved once, whatever the stage: the same shards come out of stages 0 to 3. A load
computes from the manifest's partition which bytes of which shards make up its own, at any number of
ranks, and reads no others.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...contract.damage import is_note, note_damage
from ...contract.errors import UsageError, VerificationFailed
from ...contract.folder import CheckpointFolder, rank_of, step_of
from ...contract.holdings import read_shards
from ...contract.lineage import left_behind, resumed_from
from ...contract.manifest import FORMAT, Manifest, ShardFile
from ...contract.partition import Copy
from ...contract.plain import PlainError, from_plain, read_file, to_plain, write_atomically
from ...contract.pruning import remove_checkpoint
from ...contract.slices import reshard_tensor
from ..comm import barrier, gather_bytes
from . import shardfile

if TYPE_CHECKING:
    from ..zero import ZeroEngine

PARAMETERS = "parameters"


@dataclass(frozen=True)
class About:
    """What a manifest says beyond the engine's own state, and who writes it."""

    run: str = ""
    attempt: int = 0
    samples: int = 0
    global_batch: int = 0
    seed: int = 0
    node: str = ""
    writes_manifest: bool | None = None  # None: rank 0, on a shared filesystem
    model: dict[str, Any] | None = None
    data_state: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    shared: bool = True  # one filesystem for all nodes


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


@torch.no_grad()
def save(engine: ZeroEngine, folder: Path, step: int, about: About) -> Path:
    """Writes ``folder/step-N`` by all ranks together; returns it once its manifest is there."""
    target = begin(engine, folder, step, about)
    shard = write_shard(engine, target, entries_of(engine), about) if writes_shard(engine) else None
    publish(engine, target, draft(engine, step, about), about, shard)
    barrier(engine.ranks.world, "checkpoint written", engine.device)
    return target


def begin(engine: ZeroEngine, folder: Path, step: int, about: About) -> Path:
    """The folder for the shards. A checkpoint of this step that another attempt left there is none from now on: what
    is half of one and half of the other must not look whole."""
    engine.finish_gathering()
    target = step_folder(folder, step)
    target.mkdir(parents=True, exist_ok=True)
    if _writes_manifest(engine, about):
        (target / "manifest.json").unlink(missing_ok=True)
    barrier(engine.ranks.world, "checkpoint begun", engine.device)
    return target


def writes_shard(engine: ZeroEngine) -> bool:
    """Replicas hold the same: the first of them saves it."""
    return engine.ranks.replica.rank == 0


def _writes_manifest(engine: ZeroEngine, about: About) -> bool:
    return engine.ranks.world.rank == 0 if about.writes_manifest is None else about.writes_manifest


def write_shard(engine: ZeroEngine, target: Path, entries: Sequence[shardfile.Entry], about: About) -> ShardFile:
    rank = engine.ranks.world.rank
    path = Path(CheckpointFolder(PurePosixPath(target)).shard(rank))
    return shardfile.write(path, entries, rank=rank, node=about.node or socket.gethostname())


def draft(engine: ZeroEngine, step: int, about: About) -> Manifest:
    """The manifest as far as it is known when the state is taken: without shards."""
    return Manifest(
        format=FORMAT,
        run=about.run,
        attempt=about.attempt,
        step=step,
        samples=about.samples,
        global_batch=about.global_batch,
        seed=about.seed,
        layout=engine.layout,
        shards=(),
        scalars={
            "optimizer": engine.optimizer.name,
            "optimizer_updates": engine.optimizer.updates,
            "optimizer_scalars": engine.optimizer.scalars(),
            "loss_scale": engine.loss_scale.value,
            "loss_scale_good_steps": engine.loss_scale.good_steps,
            "skipped": engine.skipped,
        },
        buffers=tuple(name for name, _ in persistent_buffers(engine.model)),
        model=about.model,
        data_state=about.data_state,
        extra=about.extra or None,
        written_at=time.time(),
    )


def publish(engine: ZeroEngine, target: Path, manifest: Manifest, about: About, shard: ShardFile | None) -> None:
    """Makes a checkpoint of shards that are all durable: every rank calls it, the manifest comes last."""
    row = {"shard": to_plain(shard), "time": manifest.written_at, "data_state": manifest.data_state}
    gathered = gather_bytes(engine.ranks.world, json.dumps(row).encode(), "checkpoint digests", engine.device)
    if not _writes_manifest(engine, about):
        return
    rows = [json.loads(r) for r in gathered]
    shards = tuple(from_plain(ShardFile, r["shard"]) for r in rows if r["shard"] is not None)
    here = {s.file for s in shards if about.shared or s.node == about.node}
    for file in target.iterdir():
        # Of an attempt that had other ranks, or was killed while it wrote.
        if file.name not in here and (rank_of(file.name.lstrip(".")) is not None or is_note(file.name)):
            file.unlink(missing_ok=True)
    # One time and one state of the data for all who write a manifest: ranks compare them.
    manifest = replace(manifest, shards=shards, data_state=rows[0]["data_state"], written_at=rows[0]["time"])
    write_atomically(target / "manifest.json", manifest.to_bytes(), durable=True)


def entries_of(engine: ZeroEngine) -> list[shardfile.Entry]:
    """What this rank's shard holds, as views of what it owns: nothing is copied here."""
    entries = []
    for flat in engine.units:
        if not flat.unit.split and engine.ranks.tensor.rank:
            continue  # equal on all tensor ranks: the first one saves it
        numel = (flat.unit.shard_numel,)
        # Frozen 16-bit parameters have no master: what is stored is what a master would be, made while it is written.
        own = tuple(flat.own_parameters())
        entries.append(shardfile.Entry(f"{flat.unit.name}/{PARAMETERS}", own, numel, flat.state_dtype))
        for index, name in enumerate(engine.optimizer.moments if flat.moments else ()):
            entries.append(shardfile.Entry(f"{flat.unit.name}/{name}", tuple(flat.own_moments(index)), numel))
    if engine.ranks.world.rank == 0:
        for name, buffer in persistent_buffers(engine.model):
            entries.append(shardfile.Entry(f"buffer/{name}", (buffer,), tuple(buffer.shape)))
    return entries


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that a state dict would hold."""
    persistent = set(model.state_dict(keep_vars=True))
    return [(name, b) for name, b in model.named_buffers() if name in persistent]


# --- loading --------------------------------------------------------------------------------------------


def newest(folder: Path) -> int | None:
    """The step of the newest checkpoint below ``folder`` that has a manifest, on the line that the run is on."""
    steps = with_manifest(folder)
    return max(steps[0] or steps[1], default=None)


def with_manifest(folder: Path) -> tuple[list[int], list[int]]:
    """The steps of checkpoints below ``folder``, rising: those on the line, and those that a resume left behind."""
    if not folder.is_dir():
        return [], []
    found = [step_of(p.name) for p in folder.iterdir() if (p / "manifest.json").is_file()]
    steps = sorted(s for s in found if s is not None)
    resumed = resumed_from(str(folder.parent))
    if len(resumed) < 2:
        return steps, []
    writers = {}
    for step in steps:
        try:
            writers[step] = read_shards(str(step_folder(folder, step) / "manifest.json"), step)[0]
        except (OSError, ValueError):
            continue  # whoever loads it says what is wrong
    behind = left_behind(writers, resumed)
    return [s for s in steps if s not in behind], sorted(behind)


def read_manifest(folder: Path, step: int | None) -> tuple[Path, Manifest, bytes]:
    """The checkpoint's folder, manifest, and the manifest's bytes."""
    if (folder / "manifest.json").is_file():
        target = folder
    else:
        chosen = newest(folder) if step is None else step
        if chosen is None:
            raise UsageError(f"{folder} holds no whole checkpoint", hint="a checkpoint is whole once it has a manifest")
        target = step_folder(folder, chosen)
    try:
        data = read_file(target / "manifest.json")
        return target, Manifest.from_bytes(data), data
    except FileNotFoundError as error:
        raise UsageError(f"{target} has no manifest, so it is no checkpoint") from error
    except (PlainError, ValueError) as error:
        raise VerificationFailed(f"{target / 'manifest.json'} cannot be read: {error}") from error


@torch.no_grad()
def load(engine: ZeroEngine, folder: Path, step: int | None) -> Manifest:
    """Fills the engine's state from a checkpoint of any world size and stage; every rank calls it.

    Raises :class:`VerificationFailed` naming rank, file and block when bytes are not what the manifest
    says, :class:`UsageError` when the model is another.
    """
    engine.finish_gathering()
    target, manifest, data = read_manifest(folder, step)
    digests = gather_bytes(engine.ranks.world, hashlib.sha256(data).digest(), "comparing manifests", engine.device)
    if len(set(digests)) > 1:
        other = next(i for i, d in enumerate(digests) if d != digests[0])
        raise VerificationFailed(f"rank {other} reads another manifest in {target} than rank 0")
    saved, ours = manifest.scalars.get("optimizer"), engine.optimizer.name
    if saved and ours and saved != ours:
        raise UsageError(
            f"{target} was saved with the optimizer {saved}, not {ours}", hint="state of one is none of another"
        )
    _read_shards(engine, target, manifest)
    engine.optimizer.updates = int(manifest.scalars.get("optimizer_updates", 0))
    engine.optimizer.restore(manifest.scalars.get("optimizer_scalars", {}))
    if engine.loss_scale.adapts and manifest.scalars.get("loss_scale", 1.0) != 1.0:
        engine.loss_scale.value = float(manifest.scalars["loss_scale"])
        engine.loss_scale.good_steps = int(manifest.scalars["loss_scale_good_steps"])
    engine.skipped = int(manifest.scalars.get("skipped", 0))
    settle(engine)
    barrier(engine.ranks.world, "checkpoint loaded", engine.device)
    return manifest


def settle(engine: ZeroEngine) -> None:
    """After what this rank owns was filled from outside: the working parameters follow, on all ranks."""
    for flat in engine.units:
        flat.master_to_parameters()
    if engine.stage.shards_optimizer and not engine.stage.shards_parameters:
        for flat in engine.units:
            flat.gather_updated()
        for flat in engine.units:
            flat.wait()
    if engine.gathering is not None:
        engine.gathering.release_all()


def _read_shards(engine: ZeroEngine, target: Path, manifest: Manifest) -> None:
    """Reads file by file, in rising order of bytes."""
    old = manifest.layout
    comm = engine.shard
    held = [comm.rank] if engine.stage.shards_optimizer else list(range(comm.size))
    wanted: dict[int, list[tuple[str, int, Tensor]]] = {}
    for rank in held:
        try:
            copies = reshard_tensor(old, engine.layout, rank, engine.ranks.tensor.rank)
        except ValueError as error:
            raise UsageError(f"{target}: {error}", hint="the checkpoint is of another model") from error
        for copy in copies:
            flat = engine.units[copy.unit]
            name = old.units[copy.source_unit].name
            kinds = [(PARAMETERS, flat.parameters_of(rank))]
            if flat.moments:
                kinds += [(m, flat.moments_of(i, rank)) for i, m in enumerate(engine.optimizer.moments)]
            for kind, runs in kinds:
                for offset, tensor in _slices(runs, copy):
                    wanted.setdefault(copy.source_rank, []).append((f"{name}/{kind}", offset, tensor))
    shards = {s.rank: s for s in manifest.shards}
    buffers = dict(persistent_buffers(engine.model))
    for rank in sorted({*wanted, *([0] if buffers else [])}):
        if rank not in shards:
            raise VerificationFailed(f"{target}: the manifest names no shard of rank {rank}")
        try:
            _read_shard(target, manifest, shards[rank], wanted.get(rank, []), buffers if rank == 0 else {})
        except shardfile.DamagedBlock as error:
            note_damage(str(target), rank, shards[rank].file, error.found)
            raise


def _read_shard(
    target: Path, manifest: Manifest, shard: ShardFile, wanted: Sequence[tuple[str, int, Tensor]], buffers: Any
) -> None:
    with shardfile.Reader(target, shard) as reader:
        for name, at, tensor in sorted(wanted, key=lambda row: (reader.offset(row[0]), row[1])):
            reader.into(name, at, tensor)
        for name, buffer in buffers.items():
            if name not in manifest.buffers:
                raise UsageError(f"{target}: buffer {name} is not in the checkpoint")
            reader.into(f"buffer/{name}", 0, buffer)


def _slices(runs: Sequence[Tensor], copy: Copy) -> Iterator[tuple[int, Tensor]]:
    """The elements of ``copy`` among ``runs`` (a shard in pieces): (source offset, target)."""
    begin = 0
    for run in runs:
        start, stop = max(copy.offset, begin), min(copy.offset + copy.numel, begin + run.numel())
        if start < stop:
            yield copy.source_offset + start - copy.offset, run[start - begin : stop - begin]
        begin += run.numel()


def prune(folder: Path, keep: int) -> list[int]:
    """Deletes all but the newest ``keep`` whole checkpoints below ``folder``; returns their steps. Those that a resume
    left behind neither count nor go.
    """
    steps, _ = with_manifest(folder)
    gone = steps[: max(0, len(steps) - keep)]
    for step in gone:
        remove_checkpoint(str(step_folder(folder, step)))
    return gone
