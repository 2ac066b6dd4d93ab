"""Saving and loading a partitioned state: a shard a rank, then a manifest that makes it a checkpoint.

What a rank owns is saved once, whatever the stage: the same shards come out of stages 0 to 3. A load
computes from the manifest's partition which bytes of which shards make up its own, at any number of
ranks, and reads no others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...contract.damage import is_note
from ...contract.errors import UsageError, VerificationFailed
from ...contract.folder import CheckpointFolder, rank_of, step_of
from ...contract.holdings import identity, read_shards
from ...contract.lineage import left_behind, resumed_from
from ...contract.manifest import FORMAT, Manifest, ShardFile
from ...contract.partition import Layout
from ...contract.plain import PlainError, from_plain, read_file, to_plain, write_atomically
from ...contract.pruning import remove_checkpoint
from ..comm import barrier
from ..together import by_all
from . import shardfile
from .agreed import agree_on_place, check_extra, check_place
from .filling import CHECKPOINT, PARAMETERS, fill, overwriting, persistent_buffers, settle

if TYPE_CHECKING:
    from ..zero import ZeroEngine

_log = logging.getLogger(__name__)


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
    """Writes ``folder/step-N`` by all ranks together; returns its absolute path once its manifest is there.

    Raises :class:`UsageError` on all ranks, before anything is written, where they would not write one checkpoint,
    where ``about.extra`` is no JSON, and where the engine holds no state between two steps.
    """
    target = begin(engine, folder, step, about)

    def written() -> ShardFile | None:
        return write_shard(engine, target, entries_of(engine), about) if writes_shard(engine) else None

    gathered = gather_shards(engine, target, draft(engine, step, about), written)
    with by_all(engine.ranks.world, "checkpoint written", engine.device):
        publish(engine, target, gathered, about)
    return target


def begin(engine: ZeroEngine, folder: Path, step: int, about: About) -> Path:
    """The folder for the shards. A checkpoint of this step that another attempt left there is none from now on: what
    is half of one and half of the other must not look whole."""
    engine.finish_gathering()
    world, device = engine.ranks.world, engine.device
    with by_all(world, "comparing what is saved", device) as told:
        engine.check_between_steps()
        check_extra(about.extra)
        _check_dtypes(engine)
        agree_on_place(told, folder, step, "" if about.shared else _node(about))
    check_place(told)
    target = step_folder(Path(os.path.abspath(folder)), step)
    with by_all(world, "checkpoint begun", device), shardfile.told_of(world.rank, target):
        target.mkdir(parents=True, exist_ok=True)
        if _writes_manifest(engine, about):
            (target / "manifest.json").unlink(missing_ok=True)
    return target


def _check_dtypes(engine: ZeroEngine) -> None:
    for name, buffer in persistent_buffers(engine.model):
        if shardfile.tag_of(buffer.dtype) is None:
            raise UsageError(
                f"buffer {name} is of {buffer.dtype}, which no checkpoint can hold",
                hint="register_buffer(…, persistent=False), where it can be made anew",
            )


def _node(about: About) -> str:
    return about.node or socket.gethostname()


def writes_shard(engine: ZeroEngine) -> bool:
    """Replicas hold the same: the first of them saves it."""
    return engine.ranks.replica.rank == 0


def _writes_manifest(engine: ZeroEngine, about: About) -> bool:
    return engine.ranks.world.rank == 0 if about.writes_manifest is None else about.writes_manifest


def write_shard(engine: ZeroEngine, target: Path, entries: Sequence[shardfile.Entry], about: About) -> ShardFile:
    rank = engine.ranks.world.rank
    path = Path(CheckpointFolder(PurePosixPath(target)).shard(rank))
    return shardfile.write(path, entries, rank=rank, node=_node(about))


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


class Gathered(NamedTuple):
    """A manifest with all shards, and the files that ranks on this boot of this machine have written."""

    manifest: Manifest
    host: set[str]


def gather_shards(
    engine: ZeroEngine, target: Path, manifest: Manifest, written: Callable[[], ShardFile | None]
) -> Gathered:
    """Every rank's shard as ``written`` returns it once it is durable, with what a manifest needs of the others."""
    with by_all(engine.ranks.world, "checkpoint digests", engine.device) as told:
        shard = written()
        boot = (identity(str(target)) or [""])[0]
        told.own = [to_plain(shard), boot, manifest.written_at, manifest.data_state]
    rows = told.everyone
    found = [(from_plain(ShardFile, shard), boot) for shard, boot, _, _ in rows if shard is not None]
    host = {shard.file for shard, boot in found if boot == told.own[1]}
    shards = tuple(shard for shard, _ in found)
    # One time and one state of the data for all who write a manifest: ranks compare them.
    return Gathered(replace(manifest, shards=shards, written_at=rows[0][2], data_state=rows[0][3]), host)


def publish(engine: ZeroEngine, target: Path, gathered: Gathered, about: About) -> None:
    """Makes a checkpoint of shards that are all durable: the manifest comes last. Nothing is sent.

    Raises :class:`VerificationFailed` where a shard that a rank of this host has written is not in the folder.
    """
    if not _writes_manifest(engine, about):
        return
    shards, node = gathered.manifest.shards, _node(about)
    here = {s.file for s in shards if about.shared or s.node == node}
    _look_for(target, [s for s in shards if s.file in here], {s.file for s in shards if s.node == node} & gathered.host)
    with shardfile.told_of(engine.ranks.world.rank, target):
        for file in target.iterdir():
            # Of an attempt that had other ranks, or was killed while it wrote.
            half = file.name.startswith(".manifest.json.") or rank_of(file.name.lstrip(".")) is not None
            if file.name not in here and (half or is_note(file.name)):
                file.unlink(missing_ok=True)
        write_atomically(target / "manifest.json", gathered.manifest.to_bytes(), durable=True)


def _look_for(target: Path, shards: Sequence[ShardFile], ours: set[str]) -> None:
    """That the shards are in the folder: those of this host's ranks (``ours``) have to be, others may lie on disks of
    their own."""
    elsewhere = []
    for shard in shards:
        try:
            size = os.stat(target / shard.file).st_size
        except OSError:
            size = -1
        if size == shard.bytes:
            continue
        if shard.file in ours:
            found = "is not there" if size < 0 else f"has {size} bytes, not {shard.bytes}"
            raise VerificationFailed(
                f"{target / shard.file}, which rank {shard.rank} wrote on this host, {found}: no checkpoint is made",
                hint="give all ranks one folder that each of them sees, and let nothing else write there",
            )
        elsewhere.append(shard)
    if elsewhere:
        first, nodes = elsewhere[0], sorted({s.node for s in elsewhere})
        _log.warning(
            "%s: shards of other hosts (%s) are not to be seen from here: %d, the first is rank %d's. If hosts share "
            "no disk, bring shards and manifest together before a load",
            target, ", ".join(nodes[:4]), len(elsewhere), first.rank,
        )  # fmt: skip


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
    world, device = engine.ranks.world, engine.device
    with by_all(world, "comparing manifests", device) as told:
        target, manifest, data = read_manifest(folder, step)
        told.own = hashlib.sha256(data).hexdigest()
    if len(set(told.everyone)) > 1:
        other = next(i for i, d in enumerate(told.everyone) if d != told.everyone[0])
        raise VerificationFailed(f"rank {other} reads another manifest in {target} than rank 0")
    saved, ours = manifest.scalars.get("optimizer"), engine.optimizer.name
    if saved and ours and saved != ours:
        raise UsageError(
            f"{target} was saved with the optimizer {saved}, not {ours}", hint="state of one is none of another"
        )
    with overwriting(engine, f"{CHECKPOINT}{target}", moments=True) as wrote:
        with by_all(world, "reading the checkpoint", device, wrote):
            lacking = fill(engine, target, manifest, wrote)
        fresh = _newly_trained(engine, target, manifest.layout, lacking)
        engine.optimizer.updates = int(manifest.scalars.get("optimizer_updates", 0))
        engine.optimizer.restore(manifest.scalars.get("optimizer_scalars", {}), fresh)
        if engine.loss_scale.adapts and manifest.scalars.get("loss_scale", 1.0) != 1.0:
            engine.loss_scale.value = float(manifest.scalars["loss_scale"])
            engine.loss_scale.good_steps = int(manifest.scalars["loss_scale_good_steps"])
        engine.skipped = int(manifest.scalars.get("skipped", 0))
        settle(engine)
        barrier(world, "checkpoint loaded", device)
    return manifest


def _newly_trained(engine: ZeroEngine, target: Path, old: Layout, lacking: set[str]) -> list[str]:
    """The parameters that were frozen in the checkpoint: the optimizer begins anew with them, as torch's does with new
    ones. Rank 0's log says so, and which of its tensors are not there of others."""
    trained = [p.name for unit in engine.layout.units if unit.trainable for p in unit.parameters]
    fresh = [name for name in trained if not old.by_name[name].trainable]
    rows = [name.rpartition("/") for name in lacking]
    moments = {moment for unit, _, moment in rows if unit in {u.name for u in old.units if u.trainable}}
    more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
    new = [", ".join(fresh[:3]) + more] if fresh else []
    for what in [*new, *sorted(moments)]:
        if engine.ranks.world.rank == 0:
            _log.warning("%s has no optimizer state of %s: it begins anew", target, what)
    return fresh


def prune(folder: Path, keep: int) -> list[int]:
    """Deletes all but the newest ``keep`` whole checkpoints below ``folder``; returns their steps. Those that a resume
    left behind neither count nor go.
    """
    steps, _ = with_manifest(folder)
    gone = steps[: max(0, len(steps) - keep)]
    for step in gone:
        remove_checkpoint(str(step_folder(folder, step)))
    return gone
