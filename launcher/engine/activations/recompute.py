"""Activation recomputation: a block keeps its input alone, and backward computes the rest again.

The block's ``forward`` is wrapped, not its hooks: at stage 3 the unit is gathered by the gradient of the
block's output before recomputation starts. The random state is restored, so dropout is the same, and
buffers (running statistics) are what they were, so that they are updated once. Where the inputs wait is
``engine.activations.stored``'s: P_a and P_a+cpu; without those, where they are (a row of a buffer would cost a copy
and, at the peak, one input more).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Union

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...contract.errors import UsageError
from ..comm import Comm
from ..config import EngineConfig
from ..model.units import blocks
from .stored import Store

_OWN = "_zero_own_forward"


def recompute(module: nn.Module, which: Union[str, Sequence[int]], store: Store | None = None) -> None:
    """Makes blocks of ``module`` recompute: all of them (``block``), or those of these numbers.

    Their inputs wait in ``store``; without one, whole and where they are.

    Raises :class:`UsageError` where there is no such block.
    """
    if which == "none":
        return
    found = [child for _, child in blocks(module)]
    if not found:
        raise UsageError("recompute: the model has no list of blocks (an nn.ModuleList or nn.Sequential)")
    numbers = range(len(found)) if isinstance(which, str) else which
    for number in numbers:
        if not 0 <= number < len(found):
            raise UsageError(f"recompute: there is no block {number}; the model has {len(found)}, counted from 0")
        child = found[number]
        child.forward = _again(child, store)


def make_store(module: nn.Module, config: EngineConfig, tensor: Comm, device: torch.device) -> Store | None:
    """Where ``config.activations`` keeps what ``config.recompute`` stores; None: whole, as it is.

    Raises :class:`UsageError` where nothing is recomputed, or there is nobody to share with.
    """
    if config.activations == "whole":
        return None
    if config.recompute == "none":
        raise UsageError(f"activations: {config.activations} needs recompute: it moves what recompute stores")
    if config.activations == "partitioned" and tensor.size == 1:
        raise UsageError("activations: partitioned needs parallel.tensor above 1: its ranks share them")
    count = len(blocks(module)) if isinstance(config.recompute, str) else len(config.recompute)
    return Store(tensor, blocks=max(1, count), device=device, host=config.activations == "host")


def _again(block: nn.Module, store: Store | None) -> Callable[..., Any]:
    forward = block.forward

    def regions() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _BuffersKept(block)

    @functools.wraps(forward)
    def wrapped(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **named)
        if store is not None:
            return store.run(forward, inputs, named, context_fn=regions)
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=regions, **named)

    setattr(wrapped, _OWN, (wrapped, vars(block).get("forward")))
    return wrapped


def forward_without(state: dict[str, Any]) -> None:
    """Gives a module's ``__dict__``, or a copy of it, back what :func:`recompute` has put something in the place of."""
    forward = state.get("forward")
    wrapped, own = getattr(forward, _OWN, (None, None))
    if forward is not None and wrapped is forward:  # not what someone has wrapped it in
        del state["forward"]
        if own is not None:
            state["forward"] = own


class _BuffersKept:
    """Inside, a forward runs for the second time: what it does to buffers is undone. May be entered again."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self.before = [(buffer, buffer.clone()) for buffer in self.block.buffers()]

    def __exit__(self, *_: Any) -> None:
        with torch.no_grad():
            for buffer, value in self.before:
                buffer.copy_(value)
        self.before = []
