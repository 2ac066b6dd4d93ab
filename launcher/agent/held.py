"""What a move of ranges has to know of a checkpoint's folder: where tensors lie in shards, which ranges are here."""

from __future__ import annotations

import os
from typing import Any, Dict, List

from ..contract.folder import rank_of
from ..contract.holdings import is_checkpoint_file, names_in
from ..contract.ranges import Ranges, is_ranges, read_header


def held_in(folder: str) -> Dict[str, Any]:
    """``{"headers": {rank: {"header", "base"}}, "ranges": [{"rank", "bytes", "digest", "ranges"}]}``. Ranges that
    cannot be read are ``{"rank", "unfit"}``; a header that cannot is left out."""
    headers: Dict[str, Any] = {}
    held: List[Dict[str, Any]] = []
    for name in names_in(folder):
        rank, path = rank_of(name), os.path.join(folder, name)
        try:
            if rank is not None and is_checkpoint_file(name) and not os.path.islink(path):
                header, base = read_header(path)
                headers[str(rank)] = {"header": header, "base": base}
            elif is_ranges(name):
                with Ranges(path) as found:
                    held.append({**found.shard, "ranges": [list(r) for r in found.ranges]})
        except (OSError, ValueError):
            held += [{"rank": rank, "unfit": True}] if is_ranges(name) else []
    return {"headers": headers, "ranges": held}
