"""Floor 5: a description of a cluster from what the cluster itself tells (``zerun cluster discover``)."""

from __future__ import annotations

from .make import by_hand, discover, of_host

__all__ = ["by_hand", "discover", "of_host"]
