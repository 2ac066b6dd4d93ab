"""Starting from weights that exist: a folder of safetensors, read by byte range, each rank its part.

Names are the module's. A tied weight may stand under any of its names (under several, if they are equal);
buffers that a state dict holds are taken where they are given. What is missing, what nobody knows and what has
another shape is listed, all of it, before anything is read. Elements arrive in the dtype of the optimizer's
master, so weights in 16 bits lose nothing and weights in fp32 are not rounded before they have to be.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch
from torch import Tensor

from ...contract.errors import UsageError, VerificationFailed
from ...contract.partition import Parameter
from ...contract.plain import open_file
from ...contract.slices import slices
from ...contract.weights import TAG_BYTES, Misfit, Stored, misfits, read_weights
from ..comm import barrier
from ..together import by_all
from .filling import overwriting, persistent_buffers, settle
from .shardfile import dtype_of, tag_of

if TYPE_CHECKING:
    from ..zero import ZeroEngine

CHUNK_BYTES = 16 * 2**20


@torch.no_grad()
def load_weights(engine: ZeroEngine, path: Path) -> int:
    """Fills the engine's parameters (not the optimizer's tensors) from ``path``; every rank calls it.

    Returns the bytes that this rank read of tensors. Raises :class:`UsageError` on every rank for names and
    shapes that are not the model's, and where ranks see different files.
    """
    engine.finish_gathering()
    world, device = engine.ranks.world, engine.device
    buffers = dict(persistent_buffers(engine.model))
    with by_all(world, "comparing weights", device) as digests:
        stored = read_weights(path)
        digests.own = _digest(stored)
    if len(set(digests.everyone)) > 1:  # machines without a shared disk may hold different files under one name
        other = next(i for i, d in enumerate(digests.everyone) if d != digests.everyone[0])
        raise UsageError(
            f"rank {other} sees other weights in {path} than rank 0", hint="copy the same files everywhere"
        )
    wrong = misfits(engine.layout.by_name.values(), {n: tuple(b.shape) for n, b in buffers.items()}, stored)
    wrong += _unlike(buffers, stored)
    others = {name for name, _ in engine.model.named_buffers()}
    wrong = [w for w in wrong if not (w.kind == "unexpected" and w.name in others)]  # made anew, saved by old versions
    if wrong:
        told = "\n".join(f"  {w.sentence()}" for w in wrong[:40])
        more = f"\n  … and {len(wrong) - 40} more" if len(wrong) > 40 else ""
        raise UsageError(f"weights {path} are not this model's:\n{told}{more}", hint="names are those of its modules")
    with overwriting(engine, f"weights {path}", moments=False) as wrote:
        with by_all(world, "reading weights", device, wrote), _Files(stored) as files:
            wrote.own = True
            for number in range(len(engine.units)):
                for rank in [engine.shard.rank] if engine.stage.shards_optimizer else range(engine.shard.size):
                    for name, first, target in _wanted(engine, number, rank):
                        files.fill(names_of(engine.layout.by_name[name], stored), first, target)
            for name, buffer in buffers.items():
                if name in stored:
                    flat_buffer = buffer.new_empty(buffer.numel())
                    files.fill([name], 0, flat_buffer)
                    buffer.copy_(flat_buffer.view(buffer.shape))
        settle(engine)
        barrier(world, "weights loaded", device)
    return files.bytes


def _unlike(buffers: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> list[Misfit]:
    """Buffers that are floating point on one side alone: to convert them would be silent."""
    both = [(name, buffer.dtype, stored[name].tag) for name, buffer in buffers.items() if name in stored]
    return [
        Misfit("buffer", name, tag=f"{tag} there, {tag_of(dtype) or dtype} in the model")
        for name, dtype, tag in both
        if dtype.is_floating_point != dtype_of(tag).is_floating_point
    ]


def names_of(parameter: Parameter, stored: Mapping[str, Stored]) -> list[str]:
    """The names under which a parameter stands there: one, or several of a tied one."""
    return [name for name in (parameter.name, *parameter.tied) if name in stored]


def _wanted(engine: ZeroEngine, number: int, rank: int) -> Iterator[tuple[str, int, Tensor]]:
    """What a shard of unit ``number`` is made of: (parameter, first element of the whole, where it goes)."""
    flat, layout = engine.units[number], engine.layout
    runs, begins, at = flat.parameters_of(rank), [], 0
    for run in runs:
        begins.append(at)
        at += run.numel()
    for piece in flat.unit.pieces(rank):
        for part in slices(piece.parameter, layout.tensor, engine.ranks.tensor.rank, piece.start, piece.stop):
            offset = piece.offset + part.local - piece.start
            for begin, run in zip(begins, runs):  # noqa: B905 (Python 3.9 on the nodes)
                start, stop = max(offset, begin), min(offset + part.numel, begin + run.numel())
                if start < stop:
                    yield piece.parameter.name, part.whole + start - offset, run[start - begin : stop - begin]


def _digest(stored: Mapping[str, Stored]) -> str:
    text = "\n".join(f"{n} {s.tag} {s.shape} {s.file.name} {s.start}" for n, s in sorted(stored.items()))
    return hashlib.sha256(text.encode()).hexdigest()


class _Files:
    """The files, opened once; counts what is read of them."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored
        self.bytes = 0
        self._opened: dict[Path, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, names: list[str], first: int, target: Tensor) -> None:
        """``target`` becomes the elements from ``first`` on; those of all ``names`` have to be the same."""
        for start in range(0, target.numel(), CHUNK_BYTES // 8):
            part = target[start : start + CHUNK_BYTES // 8]
            value = self._read(names[0], first + start, part.numel())
            for other in names[1:]:
                if not torch.equal(value, self._read(other, first + start, part.numel())):
                    raise UsageError(f"weights: {names[0]} and {other} are one tied weight of the model, and differ")
            part.copy_(value)

    def _read(self, name: str, first: int, numel: int) -> Tensor:
        about = self.stored[name]
        if about.file not in self._opened:
            opened: BinaryIO = open_file(about.file)
            self._opened[about.file] = self._stack.enter_context(opened)
        width = TAG_BYTES[about.tag]
        data = bytearray(numel * width)
        view, at = memoryview(data), about.start + first * width
        while view:
            count = os.preadv(self._opened[about.file].fileno(), [view], at)
            if count == 0:
                raise VerificationFailed(f"weights {about.file} end before byte {at + len(view)} of {name}")
            view, at = view[count:], at + count
        self.bytes += len(data)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype_of(about.tag)) if data else torch.empty(0)
