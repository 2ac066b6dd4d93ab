"""What an engine keeps from step to step on one rank, by kind: what ``memory()`` counts and the ledger of a step
(``engine.watching.track``) is told.

============  ===================================================================================
parameters    stages 0 to 2 whole, stage 3 this rank's shards; frozen ones too
gradients     accumulated ones
optimizer     moments, and the fp32 master of 16-bit parameters
gathered      stage 3: whole parameters while they are needed
buckets       communication buffers for gradients
norm          indices and sums of the gradient norm; padding rows and scalars of the optimizer
buffers       the model's own: statistics of a BatchNorm, masks
messages      the last small message of each group, which is let go of with the next
stored        inputs of recomputed blocks, partitioned (``activations: partitioned``)
host          the same in host memory (``activations: host``)
saving        the copy of what a save in the background writes
============  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .zero import ZeroEngine


def kept(engine: ZeroEngine) -> dict[str, list[Tensor]]:
    """Tensors by kind, as they are now; each stands for its storage. A buffer that is a view of a parameter is none."""
    units, store = engine.units, engine.store
    rows = [] if store is None else store.rows.storages()
    host = store is not None and store.host
    whole = {flat.full.untyped_storage()._cdata for flat in units}
    return {
        "parameters": [flat.full if flat.shard is None else flat.shard for flat in units],
        "gradients": [flat.gradient for flat in units if flat.gradient is not None],
        "optimizer": [t for flat in units for t in (*flat.moments, flat.master) if t is not None],
        "gathered": [flat.full for flat in units if flat.shard is not None],
        "buckets": engine.flow.storages(),
        "norm": [*engine.norm.storages(), *engine.optimizer.storages()],
        "buffers": [b for b in engine.model.buffers() if b.untyped_storage()._cdata not in whole],
        "messages": [t for comm in engine.ranks.groups() for t in comm.kept()],
        "stored": [] if host else rows,
        "host": rows if host else [],
        "saving": [] if engine.background is None else engine.background.storages(),
    }


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())
