"""Filling an engine from shards of whatever world size and stage: what is read of which file, and what it becomes.

Until its first byte is written nothing has changed; from then on nobody trains on a load that fails
(``ZeroEngine.half_loaded``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...contract.damage import note_damage
from ...contract.errors import UsageError, VerificationFailed
from ...contract.manifest import Manifest, ShardFile
from ...contract.partition import Copy, stored_dtype
from ...contract.slices import reshard_tensor
from ..together import Told
from . import shardfile

if TYPE_CHECKING:
    from ..zero import ZeroEngine

PARAMETERS = "parameters"
CHECKPOINT = "checkpoint "


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that a state dict would hold."""
    persistent = set(model.state_dict(keep_vars=True))
    return [(name, b) for name, b in model.named_buffers() if name in persistent]


@contextmanager
def overwriting(engine: ZeroEngine, what: str, *, moments: bool) -> Iterator[Told]:
    """What is inside fills the engine by ``what``. ``own`` is set before a byte is written: where it then fails, on
    whatever rank, no rank trains on. Without ``moments``, what an earlier load has left half of them stays so."""
    told, before = Told(), engine.half_loaded
    mixed = before if before.startswith(CHECKPOINT) and not moments else ""
    try:
        yield told
    except BaseException:
        if told.own or any(told.everyone):
            engine.half_loaded = mixed or what
        raise
    engine.half_loaded = mixed


def settle(engine: ZeroEngine) -> None:
    """After what this rank owns was filled from outside: the working parameters follow, on all ranks, and a step that
    had begun is none."""
    engine.micro_step = 0  # its first backward overwrites what there is of a gradient
    engine.losses.forget()
    for flat in engine.units:
        flat.master_to_parameters()
    if engine.stage.shards_optimizer and not engine.stage.shards_parameters:
        for flat in engine.units:
            flat.gather_updated()
        for flat in engine.units:
            flat.wait()
    if engine.gathering is not None:
        engine.gathering.changed()


class _Wanted(NamedTuple):
    """Elements of a tensor of a shard's file, from number ``offset`` on, and where they go."""

    name: str
    offset: int
    target: Tensor


def fill(engine: ZeroEngine, target: Path, manifest: Manifest, told: Told) -> set[str]:
    """Reads file by file, in rising order of bytes, and says in ``told`` when it begins to write: once buffers, which
    are in rank 0's file, are known to be the model's. Returns the names of moments that are in no file and are zero."""
    old = manifest.layout
    comm = engine.shard
    held = [comm.rank] if engine.stage.shards_optimizer else list(range(comm.size))
    wanted: dict[int, list[_Wanted]] = {}
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
                    wanted.setdefault(copy.source_rank, []).append(_Wanted(f"{name}/{kind}", offset, tensor))
    lacking: set[str] = set()
    shards = {s.rank: s for s in manifest.shards}
    buffers = dict(persistent_buffers(engine.model))
    for rank in sorted({*wanted, *([0] if buffers else [])}):
        if rank not in shards:
            raise VerificationFailed(f"{target}: the manifest names no shard of rank {rank}")
        try:
            found = _read_shard(target, manifest, shards[rank], wanted.get(rank, []), buffers if not rank else {}, told)
            lacking.update(found)
        except shardfile.DamagedBlock as error:
            note_damage(str(target), rank, shards[rank].file, error.found)
            raise
    return lacking


def _read_shard(
    target: Path,
    manifest: Manifest,
    shard: ShardFile,
    wanted: Sequence[_Wanted],
    buffers: Mapping[str, Tensor],
    told: Told,
) -> set[str]:
    with shardfile.Reader(target, shard) as reader:
        for name, buffer in buffers.items():
            _check_buffer(target, manifest, reader, name, buffer)
        told.own = True  # from here on what was there is not whole
        # A moment that is not in the file was none: its parameter was frozen, or the optimizer did without it.
        lacking = {w.name for w in wanted if not (reader.has(w.name) or w.name.endswith(f"/{PARAMETERS}"))}
        for row in wanted:
            if row.name in lacking:
                row.target.zero_()
        given = [row for row in wanted if row.name not in lacking]
        for row in sorted(given, key=lambda w: (reader.offset(w.name), w.offset)):
            reader.into(*row)
        for name, buffer in buffers.items():
            reader.into(f"buffer/{name}", 0, buffer)
    return lacking


def _check_buffer(target: Path, manifest: Manifest, reader: shardfile.Reader, name: str, buffer: Tensor) -> None:
    """Raises :class:`UsageError` where the checkpoint's is another; 16 and 32 bits are one, as for parameters."""
    if name not in manifest.buffers:
        raise UsageError(f"{target}: buffer {name} is not in the checkpoint", hint="the checkpoint is of another model")
    shape, dtype = reader.kind(f"buffer/{name}")
    same = stored_dtype(_named(dtype)) == stored_dtype(_named(buffer.dtype))
    if shape != tuple(buffer.shape) or not same:
        there, here = f"{list(shape)} of {_named(dtype)}", f"{list(buffer.shape)} of {_named(buffer.dtype)}"
        raise UsageError(
            f"{target}: buffer {name} is {there} in the checkpoint, {here} in the model",
            hint="the checkpoint is of another model",
        )


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _slices(runs: Sequence[Tensor], copy: Copy) -> Iterator[tuple[int, Tensor]]:
    """The elements of ``copy`` among ``runs`` (a shard in pieces): (source offset, target)."""
    begin = 0
    for run in runs:
        start, stop = max(copy.offset, begin), min(copy.offset + copy.numel, begin + run.numel())
        if start < stop:
            yield copy.source_offset + start - copy.offset, run[start - begin : stop - begin]
        begin += run.numel()
