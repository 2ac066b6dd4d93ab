"""Which way to communicate suits a group of ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .base import Base, Comm, gather_bytes
from .host import HostComm
from .native import NativeComm
from .neighbours import meet
from .peers import PeerComm

READ, SEND = "read", "send"


def connect(group: dist.ProcessGroup | None = None, *, passing: bool = False, same_host: str = READ) -> Comm:
    """All ranks of ``group`` (default: every one) call it together.

    ``same_host``: where all of them are on one host, they ``read`` each other's memory if that is allowed, or ``send``
    through sockets. ``passing``: what is sent are activations, not buffers that last.
    """
    if dist.get_backend(group) != "gloo":
        return NativeComm(group)
    sockets = PeerComm(group, passing=passing)
    if same_host == SEND or sockets.size == 1:
        return sockets
    neighbours = meet(sockets.rank, sockets.size, lambda said: gather_bytes(sockets, said, "who is on this host"))
    return sockets if neighbours is None else HostComm(group, neighbours, _timeout_s(sockets))


def _timeout_s(comm: Base) -> float:
    """How long a message of this group may take; torch has no public name for it."""
    group = comm.group or dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return float(backend.options._timeout.total_seconds())
