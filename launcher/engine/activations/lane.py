"""A lane for copies between device and host memory: they pass beside what is computed.

Copies are made in the order in which they were asked for. Three rules keep them right:

1. A copy begins after all that was to be computed when it was asked for: its source is complete, its target read.
2. What is computed after :meth:`arrived` begins after all copies that were asked for before.
3. Memory of the device that a copy uses goes to nobody else before it was made, whoever lets go of it.

Host memory may therefore be written anew at once, by a later copy on the same lane: the older one is in front of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lane:
    """A stream of one GPU. What it does to the device is in the four methods below; the order is in these two."""

    pinned = True  # host memory that a copy of a GPU's may go to without the processor

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = self._made()

    def copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> None:
        """``target`` becomes ``source``, later; ``on_device`` is that one of them which lies there."""
        self._wait_for_computation()
        self._start(target, source)
        self._hold(on_device)

    def arrived(self) -> None:
        """What is computed from here on may use what was copied."""
        self._computation_waits()

    # --- what CUDA does ------------------------------------------------------------------------------

    def _made(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def _wait_for_computation(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _start(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def _hold(self, on_device: Tensor) -> None:
        on_device.record_stream(self._stream)

    def _computation_waits(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
