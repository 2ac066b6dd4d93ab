"""What a rank saves, in closed form: the size of its shard's tensors, and of the copy that saves in the background."""

from __future__ import annotations

from .partition import ITEM_BYTES, Layout, stored_dtype


def saved_bytes(layout: Layout, *, moments: int, tensor_rank: int = 0) -> int:
    """Bytes of the tensors in a rank's shard, buffers of the module left out (they are in rank 0's).

    What all tensor ranks hold alike the first of them saves; frozen parameters have no optimizer state.
    """
    total = 0
    for unit in layout.units:
        if unit.split or tensor_rank == 0:
            total += unit.shard_numel * ITEM_BYTES[stored_dtype(unit.dtype)] * (1 + (moments if unit.trainable else 0))
    return total
