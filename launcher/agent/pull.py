"""The verbs ``serve`` and ``pull``: a checkpoint's shards from the node that has them to one that will read them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict

from ..contract.errors import NoSpace, UsageError
from ..contract.plain import sync_folder
from .shardstream import Server, addresses, check, fetch
from .space import free_bytes

SPARE_BYTES = 64 * 2**20
_BEAT_S = 2.0


def serve(request: Dict[str, Any], out: BinaryIO) -> int:
    """``{run_dir, token, node, address, others, ports}`` → one line ``{addresses, port}``, then serves for as long as
    somebody reads: a line every two seconds tells."""
    ports = tuple(int(p) for p in request["ports"]) if request.get("ports") else None
    server = Server(os.path.join(str(request["run_dir"]), "checkpoints"), str(request["token"]), ports)
    others = [str(o) for o in request["others"]]
    told: Dict[str, Any] = {"addresses": addresses(str(request["node"]), str(request["address"]), others)}
    told["port"] = server.port
    with contextlib.suppress(OSError):
        while True:
            out.write(json.dumps(told).encode("ascii") + b"\n")
            out.flush()
            told = {"event": "beat"}
            time.sleep(_BEAT_S)
    server.close()
    return 0


def pull(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, step, token, python, sources: [{addresses, port, shards: [rows of the manifest]}]}`` →
    ``{files, bytes, verified_by}``.

    Room is asked for first. A shard takes its place once every block of it is proven; what an interrupted pull
    leaves is no checkpoint's. Raises NoSpace, Unreachable, VerificationFailed, UsageError.
    """
    step, folder = int(request["step"]), Path(str(request["run_dir"])) / "checkpoints"
    name = f"step-{step:08d}"
    sources = list(request["sources"])
    shards = [shard for source in sources for shard in source["shards"]]
    num_bytes = sum(int(shard["bytes"]) for shard in shards)
    folder.mkdir(parents=True, exist_ok=True)
    free = free_bytes(str(folder))
    if free is not None and num_bytes + SPARE_BYTES > free:
        raise NoSpace(f"{num_bytes} bytes are to come, {free} are free at {folder}")
    incoming = folder / f".incoming-{step:08d}"
    shutil.rmtree(incoming, ignore_errors=True)  # of a pull that was killed: one at a time makes an attempt
    verified_by = ""
    try:
        incoming.mkdir()
        for source in sources:
            places = [(str(a), int(source["port"])) for a in source["addresses"]]
            for shard in source["shards"]:
                beside = str(incoming / _file(shard))
                fetch(places, str(request["token"]), shard, f"{name}/{_file(shard)}", beside)
                verified_by = check(beside, shard, request.get("python"))
        (folder / name).mkdir(exist_ok=True)
        for shard in shards:
            os.replace(incoming / _file(shard), folder / name / _file(shard))
        sync_folder(folder / name)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {"files": len(shards), "bytes": num_bytes, "verified_by": verified_by}


def _file(shard: Dict[str, Any]) -> str:
    """A rank's own file name and nothing else, whatever the manifest says."""
    expected = f"rank-{int(shard['rank']):05d}.safetensors"
    if shard["file"] != expected:
        raise UsageError(f"the manifest names {shard['file']!r} for rank {shard['rank']}")
    return expected
