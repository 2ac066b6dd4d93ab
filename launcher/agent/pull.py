"""The verbs ``serve`` and ``pull``: a checkpoint's shards, or ranges of them, from a node that has them to one that
will read them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO, Dict, List

from ..contract.errors import NoSpace, UsageError
from ..contract.folder import rank_of
from ..contract.plain import open_file, sync_folder
from ..contract.ranges import NoRanges, Ranges, both, cut, file_of, is_ranges, prove
from ..contract.ranges import count as count_bytes
from .digests import digester
from .own_files import open_own
from .shardstream import Address, Server, addresses, check, fetch, fetch_ranges
from .space import free_bytes

SPARE_BYTES = 64 * 2**20
_BEAT_S = 2.0


def serve(request: Dict[str, Any], out: BinaryIO) -> int:
    """``{run_dir, token, node, address, others, ports, python}`` → one line ``{addresses, port}``, then serves for as
    long as somebody reads: a line every two seconds tells.

    ``{run_dir, step, shard, ranges, python}`` → a file of these ranges of one shard, and no more.
    """
    if "ranges" in request:
        return _give(request, out)
    ports = tuple(int(p) for p in request["ports"]) if request.get("ports") else None
    run_dir, python = str(request["run_dir"]), request.get("python")
    if request.get("own"):  # files of the job's own instead of shards
        server = Server(run_dir, str(request["token"]), ports, python)
        server.opens = open_own
    else:
        server = Server(os.path.join(run_dir, "checkpoints"), str(request["token"]), ports, python)
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


def _give(request: Dict[str, Any], out: BinaryIO) -> int:
    shard = request["shard"]
    path = _folder(request) / f"step-{int(request['step']):08d}" / _file(shard)
    with digester(request.get("python")) as digest, open_file(path) as file:
        for data in cut(file, shard, request["ranges"], digest):
            out.write(data)
    out.flush()
    return 0


def pull(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, step, token, python, sources: [{addresses, port, shards: [rows of the manifest], ranges: [{shard,
    ranges}]}]}`` → ``{files, bytes, verified_by}``.

    Room is asked for first. What is pulled takes its place once every block or piece of all of it is proven; what an
    interrupted pull leaves is no checkpoint's. ``{run_dir, step, arrived: [{shard, ranges}]}``: ranges that somebody
    has put beside their place are proven and take it. Raises NoSpace, Unreachable, VerificationFailed, UsageError.
    """
    if "arrived" in request:
        return _arrived(request)
    step, folder = int(request["step"]), _folder(request)
    name = f"step-{step:08d}"
    sources = list(request["sources"])
    num_bytes = sum(_bytes_of(source) for source in sources)
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
            for row in source.get("ranges", ()):
                _pull_ranges(places, str(request["token"]), row, folder / name, incoming)
        count = put(incoming, folder / name)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {"files": count, "bytes": num_bytes, "verified_by": verified_by}


def _arrived(request: Dict[str, Any]) -> Dict[str, Any]:
    step, folder = int(request["step"]), _folder(request)
    incoming, target = folder / f".incoming-{step:08d}", folder / f"step-{step:08d}"
    rows = {file_of(int(row["shard"]["rank"])): row for row in request["arrived"]}
    try:
        for other in incoming.iterdir():
            if other.name not in rows:  # a transport's own, or of a move that was killed
                (shutil.rmtree if other.is_dir() else os.unlink)(other)
        for name, row in rows.items():
            prove(str(incoming / name), row["shard"], row["ranges"])
            join(target / name, incoming / name, row["shard"])
        count = put(incoming, target)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {"files": count, "bytes": 0, "verified_by": "blake2b"}


def put(incoming: Path, target: Path) -> int:
    """All that lies in ``incoming``, which is proven, into the checkpoint's folder. A whole shard makes ranges of it
    needless; they go after it has come."""
    target.mkdir(exist_ok=True)
    names = sorted(file.name for file in incoming.iterdir())
    for name in names:
        os.replace(incoming / name, target / name)
    for name in names:
        rank = rank_of(name)
        if rank is not None and not is_ranges(name):
            with contextlib.suppress(FileNotFoundError):
                (target / file_of(rank)).unlink()
    sync_folder(target)
    return len(names)


def _pull_ranges(places: List[Address], token: str, row: Dict[str, Any], target: Path, incoming: Path) -> None:
    """Ranges that come beside others of the same shard make one file with them."""
    shard = row["shard"]
    path, name = incoming / file_of(int(shard["rank"])), f"{target.name}/{_file(shard)}"
    fetch_ranges(places, token, shard, row["ranges"], str(path), name=name)
    join(target / path.name, path, shard)


def join(old: Path, new: Path, shard: Dict[str, Any]) -> None:
    """Makes of ``new`` a file of the ranges of both, where ``old`` has some of that very shard that are still right."""
    try:
        with Ranges(str(old)) as before, Ranges(str(new)) as came:
            if not before.is_of(shard):
                return
            beside = new.with_name(f".{new.name}.part")
            with open(beside, "wb") as file:
                file.writelines(both(before, came))
                file.flush()
                os.fsync(file.fileno())
    except (FileNotFoundError, NoRanges):
        with contextlib.suppress(FileNotFoundError):
            new.with_name(f".{new.name}.part").unlink()
        return
    os.replace(beside, new)


def _folder(request: Dict[str, Any]) -> Path:
    return Path(str(request["run_dir"])) / "checkpoints"


def _bytes_of(source: Dict[str, Any]) -> int:
    whole = sum(int(shard["bytes"]) for shard in source["shards"])
    return whole + sum(count_bytes([(int(a), int(b)) for a, b in row["ranges"]]) for row in source.get("ranges", ()))


def _file(shard: Dict[str, Any]) -> str:
    """A rank's own file name and nothing else, whatever the manifest says."""
    expected = f"rank-{int(shard['rank']):05d}.safetensors"
    if shard["file"] != expected:
        raise UsageError(f"the manifest names {shard['file']!r} for rank {shard['rank']}")
    return expected
