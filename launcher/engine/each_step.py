"""What all ranks tell each other before every update, in one small message."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from ..contract.errors import UsageError
from .ranks import Ranks
from .reduce.flow import GradientFlow

_SAID = struct.Struct("<di")  # the rate, the order of blocks


def unused_by_all(
    ranks: Ranks, flow: GradientFlow, lr: float, order: int, device: torch.device
) -> list[tuple[int, int]]:
    """The parameters (unit, index) that no rank used in this step, which are not updated at all, as in an
    undistributed run. ``order`` is a digest of the blocks that were used, 0 below stage 3.

    Raises :class:`UsageError` on all ranks where ``lr`` or ``order`` is not the same on all.
    """
    # Whether any rank lacks anything is agreed first, and with it whether buckets had to wait for their turn on the
    # rank whose order it is, the rate, and the order. By itself: the norm's messages stay among the ranks of one
    # replica. Tensor ranks of one batch must agree too, or some would update and others not.
    every = ranks.data if ranks.degree == 1 else ranks.world
    said = _SAID.pack(lr, order)
    lines = [[int(not flow.all_used), int(flow.disturbed), *said], [0, 0, *said]]
    here, usual = torch.tensor(lines, dtype=torch.uint8, device=device)
    told = every.gather_small(here, "unused parameters")
    if not bool(told.ne(usual).any()):
        return []
    rows = told.tolist()
    rates, orders = zip(*(_SAID.unpack(bytes(row[2:])) for row in rows))  # noqa: B905 (Python 3.9 on the nodes)
    _refuse_rates(rates)
    _refuse_orders(orders, ranks)
    if any(disturbed for _, disturbed, *_ in rows):
        flow.settle_anew()
    if not any(lacking for lacking, *_ in rows):
        return []
    flags = torch.tensor(flow.used(), dtype=torch.uint8, device=device)
    used = ranks.data.gather_small(flags, "unused parameters").amax(0).tolist()
    names = [(number, index) for number, row in enumerate(flow.places) for index in range(len(row))]
    return [name for name, by_any in zip(names, used) if not by_any]  # noqa: B905 (Python 3.9 on the nodes)


def _refuse_rates(rates: Sequence[float]) -> None:
    other = next((rank for rank, rate in enumerate(rates) if rate != rates[0]), None)
    if other is not None:
        raise UsageError(
            f"zero.lr is {rates[other]:g} on rank {other}, {rates[0]:g} on rank 0: nothing was updated",
            hint="every rank must set the same rate; check what depends on the rank, or on its own losses",
        )


def _refuse_orders(orders: Sequence[int], ranks: Ranks) -> None:
    """Those of one replica gather together; where ranks send, none of them has noticed if sizes are equal."""
    width = ranks.shard.size * ranks.degree  # ranks of one replica, with all their tensor ranks
    firsts = [rank - rank % width + rank % ranks.degree for rank in range(len(orders))]
    other = next((rank for rank, first in enumerate(firsts) if orders[rank] != orders[first]), None)
    if other is not None:
        raise UsageError(
            f"rank {other} used other blocks than rank {firsts[other]} in this step, or in another order: they have "
            "answered each other's messages crosswise; nothing was updated",
            hint="stage 3: all ranks use the same blocks in the same order; what is random must be so on all alike",
        )
