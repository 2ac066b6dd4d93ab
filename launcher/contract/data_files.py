"""The files of a job's data, as they were looked at before it was submitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """``role``: tokens · heldout; of several data sets pile.tokens · pile.heldout. ``path`` as the launch specification
    has it: absolute on the cluster, or inside the code.

    ``digest`` names its algorithm: ``xxh3:…`` (128 bits), or ``sha256:…`` where the nodes' Python has no xxhash.
    """

    role: str
    path: str
    bytes: int
    digest: str
