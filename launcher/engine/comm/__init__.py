"""The one room where collectives live.

:class:`Comm` is what the engine needs of a group of ranks: gather a flat range in place, sum one over
ranks, and a few small messages. Three implementations, chosen by :func:`connect`:

- :class:`HostComm` (gloo, all ranks on one host): each copies what it needs out of the others' memory;
- :class:`PeerComm` (gloo): messages from rank to rank, through sockets;
- :class:`NativeComm` (NCCL and others): the library's collectives.

The first two add **in rank order**, with equal bits.
"""

from .base import Alone, Comm, CommError, Pending, Traffic, barrier, gather_bytes, largest, sum_rows
from .choose import connect
from .host import HostComm
from .native import NativeComm
from .peers import PeerComm

__all__ = [
    "Alone",
    "Comm",
    "CommError",
    "HostComm",
    "NativeComm",
    "PeerComm",
    "Pending",
    "Traffic",
    "barrier",
    "connect",
    "gather_bytes",
    "largest",
    "sum_rows",
]
