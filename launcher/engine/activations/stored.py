"""P_a and P_a+cpu: where the inputs of recomputed blocks wait for their backward.

Recomputation stores each block's input, which every rank of a tensor group holds whole and equal.
**Partitioned**, each keeps its own T-th and they are gathered again when backward reaches the block: one
all-gather a block, 1/T of the bytes. **Host**: that part moves to host memory, pinned where the device is
a GPU, on a stream of its own, and comes back while the block behind it is computed again.

The parts live in rows of one buffer that is allocated once (M_D): what lives from forward to backward never
lies between what comes and goes within a block. A row is given back as soon as it was read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...contract.errors import UsageError
from ..comm import Comm
from .lane import Lane


class Rows:
    """``count`` rows of equal width, allocated with the first one; what does not fit gets a tensor of its own."""

    def __init__(self, count: int, *, pinned: bool) -> None:
        self.count = count
        self.pinned = pinned
        self.allocations = 0
        self._buffer: Tensor | None = None
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A row of at least ``numel`` elements, cut to it."""
        idle = self._buffer is None or len(self._free) == self.count
        if idle and (self._buffer is None or self._buffer.shape[1] < numel or self._buffer.dtype != dtype):
            self.allocations += 1
            self._free = []
            self._buffer = None  # the old one goes before the new one comes
            self._buffer = torch.empty(self.count, numel, dtype=dtype, device=device, pin_memory=self.pinned)
            self._free = list(self._buffer.unbind(0))
        if self._buffer is None or not self._free or self._buffer.shape[1] < numel or self._buffer.dtype != dtype:
            return torch.empty(numel, dtype=dtype, device=device, pin_memory=self.pinned)
        return self._free.pop()[:numel]

    def give(self, row: Tensor) -> None:
        if self._buffer is not None and row.untyped_storage()._cdata == self._buffer.untyped_storage()._cdata:
            number = row.storage_offset() // self._buffer.shape[1]
            self._free.append(self._buffer[number])

    def storages(self) -> list[Tensor]:
        return [] if self._buffer is None else [self._buffer]

    @property
    def bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.untyped_storage().nbytes()


class Kept:
    """One tensor that waits: this rank's part of it."""

    def __init__(self, store: Store, value: Tensor) -> None:
        self.store = store
        self.shape, self.dtype, self.device = value.shape, value.dtype, value.device
        self.numel = value.numel()
        self.arriving: Tensor | None = None
        size, rank = store.comm.size, store.comm.rank
        width = -(-self.numel // size)
        part = value.detach().reshape(-1)[rank * width : (rank + 1) * width]
        self.row: Tensor | None = store.rows.take(width, value.dtype, store.home(value.device))
        store.to_row(part, self.row[: part.numel()])
        # A block that never has a backward (its loss was dropped) gives its row back with itself.
        self._returned = weakref.finalize(self, store.rows.give, self.row)
        self._returned.atexit = False

    def load(self) -> Tensor:
        """The whole tensor again, as a leaf; once."""
        if self.row is None:
            raise UsageError(
                "a recomputed block ran backward twice over the same forward",
                hint="activations: partitioned and host give a block's input back after one backward",
            )
        size, rank = self.store.comm.size, self.store.comm.rank
        width = self.row.numel()
        mine = self.store.from_row(self)
        flat = mine
        if size > 1:
            flat = torch.empty(size * width, dtype=self.dtype, device=self.device)
            flat[rank * width : (rank + 1) * width].copy_(mine)
            self.store.comm.gather(flat, "gather of a stored activation").wait()
        elif flat.data_ptr() == self.row.data_ptr():
            flat = flat.clone()  # the row is another block's from now on
        self.row = None
        self._returned()
        return flat[: self.numel].view(self.shape).requires_grad_()


class Store:
    """Keeps what ``blocks`` recomputed blocks store, partitioned over ``comm``; in host memory if ``host``."""

    def __init__(
        self, comm: Comm, *, blocks: int, device: torch.device, host: bool = False, lane: Lane | None = None
    ) -> None:
        self.comm = comm
        self.host = host
        self._lane = lane or (Lane(device) if host and device.type == "cuda" else None)  # None: copies are made at once
        self.rows = Rows(blocks, pinned=self._lane is not None and self._lane.pinned)
        self._waiting: list[weakref.ref[Kept]] = []  # in the order of forward

    def home(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.host else device

    def run(self, forward: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], **how: Any) -> Any:
        """``forward(*inputs, **named)`` under recomputation. What needs a gradient waits here, the rest as it is."""
        like = next((x for x in (*inputs, *named.values()) if isinstance(x, Tensor)), torch.empty(0))
        kept = tuple(self._keep(x) for x in inputs)
        kept_named = {key: self._keep(x) for key, x in named.items()}
        fresh = [(inputs, named)]
        del inputs, named  # from here on nothing but ``fresh`` holds them, and that is empty after forward

        def call(_like: Tensor) -> Any:
            if fresh:
                first, second = fresh.pop()
                return forward(*first, **second)
            return forward(*(_loaded(x) for x in kept), **{key: _loaded(x) for key, x in kept_named.items()})

        # ``like`` tells which device's random state is to be restored.
        return checkpoint(call, like.detach().new_empty(0), use_reentrant=False, **how)

    def _keep(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.requires_grad):
            return value
        kept = Kept(self, value)
        self._waiting = [k for k in self._waiting if k() is not None]
        self._waiting.append(weakref.ref(kept))
        return kept

    # --- to host memory and back -----------------------------------------------------------------------

    def to_row(self, part: Tensor, row: Tensor) -> None:
        if self._lane is None:
            row.copy_(part)
        else:
            self._lane.copy(row, part, on_device=part)

    def from_row(self, kept: Kept) -> Tensor:
        """The part on the device. The one that backward needs next sets out meanwhile: two are there at a time."""
        assert kept.row is not None
        self._waiting = [k for k in self._waiting if k() not in (None, kept)]
        if self._lane is None:
            return kept.row.to(kept.device)
        self._set_out(kept, self._lane)
        part, kept.arriving = kept.arriving, None
        assert part is not None
        self._lane.arrived()  # before the next one sets out, which need not be waited for
        behind = self._waiting[-1]() if self._waiting else None
        if behind is not None:
            self._set_out(behind, self._lane)
        return part

    def _set_out(self, kept: Kept, lane: Lane) -> None:
        if kept.arriving is None and kept.row is not None:
            kept.arriving = torch.empty(kept.row.numel(), dtype=kept.dtype, device=kept.device)
            lane.copy(kept.arriving, kept.row, on_device=kept.arriving)


def _loaded(value: Any) -> Any:
    return value.load() if isinstance(value, Kept) else value
