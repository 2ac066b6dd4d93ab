"""Saving while training goes on: a copy in host memory is the only pause, a thread writes it.

One copy is allocated once and used again. A checkpoint exists when its manifest does, as ever: at a step boundary
where the small message of the loop says that every rank's shard is durable, the manifest is written. Nobody
waits for a disk inside a step; at the end, at a stop and before the next save the one under way is waited for.
"""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...contract.manifest import Manifest, ShardFile
from ..together import by_all
from . import checkpoint
from .shardfile import Entry

if TYPE_CHECKING:
    from ..zero import ZeroEngine


@dataclass
class _UnderWay:
    step: int
    target: Path
    about: checkpoint.About
    manifest: Manifest
    shard: Future[ShardFile] | None  # None: this rank has none to write


class Background:
    """The copy, the thread and the checkpoint under way of one engine. Every rank calls the same in the same order."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._of = weakref.ref(engine)  # an engine that nobody else holds goes at once
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: _UnderWay | None = None
        self._copies: dict[str, Tensor] = {}
        self._gpu = engine.device.type == "cuda"
        for entry in checkpoint.entries_of(engine) if checkpoint.writes_shard(engine) else ():
            numel = sum(run.numel() for run in entry.runs)
            self._copies[entry.name] = torch.empty(numel, dtype=entry.dtype, pin_memory=self._gpu)

    @property
    def _engine(self) -> ZeroEngine:
        engine = self._of()
        assert engine is not None, "whoever asks holds it"
        return engine

    def storages(self) -> list[Tensor]:
        """The copy, of everything that this rank saves."""
        return list(self._copies.values())

    @property
    def step(self) -> int | None:
        """Of the checkpoint under way; None when there is none."""
        return None if self._under_way is None else self._under_way.step

    def begin(self, folder: Path, step: int, about: checkpoint.About) -> Path:
        """Takes the state; returns when training may go on. Waits for the save before it, which uses the copy."""
        self.finish()
        engine = self._engine
        target = checkpoint.begin(engine, folder, step, about)
        shard = None
        if checkpoint.writes_shard(engine):
            entries = self._copy()
            shard = self._pool.submit(checkpoint.write_shard, engine, target, entries, about)
        self._under_way = _UnderWay(step, target, about, checkpoint.draft(engine, step, about), shard)
        return target

    @torch.no_grad()
    def _copy(self) -> list[Entry]:
        copied = []
        for entry in checkpoint.entries_of(self._engine):
            copy, at = self._copies[entry.name], 0
            for run in entry.runs:
                copy[at : at + run.numel()].copy_(run.reshape(-1), non_blocking=self._gpu)
                at += run.numel()
            copied.append(Entry(entry.name, (copy,), entry.shape))
        if self._gpu:
            torch.cuda.synchronize(self._engine.device)
        return copied

    def durable_here(self) -> bool:
        """Whether this rank's shard of the checkpoint under way is, or will never be: :meth:`publish` tells all why."""
        now = self._under_way
        return now is not None and (now.shard is None or now.shard.done())

    def publish(self) -> int:
        """Writes the manifest; all ranks, once it is agreed that all are durable. Returns the step, where another rank
        writes it maybe before it is there: nobody waits for a disk inside a step. Raises on all what failed on one."""
        now, gathered = self._gathered()
        checkpoint.publish(self._engine, now.target, gathered, now.about)
        return now.step

    def _gathered(self) -> tuple[_UnderWay, checkpoint.Gathered]:
        now, self._under_way = self._under_way, None
        assert now is not None

        def written() -> ShardFile | None:
            return None if now.shard is None else now.shard.result()

        return now, checkpoint.gather_shards(self._engine, now.target, now.manifest, written)

    def finish(self) -> int | None:
        """Waits for the checkpoint under way, if there is one, until its manifest is there, on every rank; returns its
        step."""
        if self._under_way is None:
            return None
        now, gathered = self._gathered()
        with by_all(self._engine.ranks.world, "checkpoint written", self._engine.device):
            checkpoint.publish(self._engine, now.target, gathered, now.about)
        return now.step
