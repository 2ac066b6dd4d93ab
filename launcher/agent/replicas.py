"""Second copies of shards, so that one lost disk loses no checkpoint: each node keeps those of the nodes before it.

For clusters without a shared filesystem (``checkpoint.replicas``). A thread of the agent waits for manifests, which
come when a checkpoint is whole, and pulls the shards of the nodes before it (:mod:`.shardstream`); ranks never wait
for it. While it copies one checkpoint, others may be written: it goes on with the newest, and never has more than
one in hand. An attempt that ended well ends when its last checkpoint has its copies.

A copy lies where the shard itself would lie, so whoever looks for a rank's shard finds either. Beside the manifest
``replicas.json`` tells which are copies: ``{"node", "attempt", "of": {node: [ranks]}, "verified_by"}``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..contract.errors import NoSpace, UsageError, ZerunError
from ..contract.folder import step_of
from ..contract.holdings import REPLICAS, names_in, read_json
from ..contract.launch import LaunchSpec
from ..contract.plain import dumps, sync_folder, write_atomically
from . import shardstream
from .pull import SPARE_BYTES
from .space import free_bytes

_LOOK_S = 1.0
_TRIES = 3
_PAUSE_S = 2.0
_NICENESS = 10

Where = Dict[str, Any]  # {"addresses": [...], "port": n}


def of_node(spec: LaunchSpec, node_rank: int, node: str, log: Callable[[str], None]) -> Optional[Replicas]:
    """None where no copies are asked for. Raises ZerunError or OSError when no port can be had."""
    if spec.shared or spec.train is None or not spec.replicas or len(spec.nodes) < 2:
        return None
    return Replicas(spec, node_rank, node, log)


class Replicas:
    """One node's part: it serves its own shards, and from :meth:`begin` on copies those of the nodes before it."""

    def __init__(self, spec: LaunchSpec, node_rank: int, node: str, log: Callable[[str], None]) -> None:
        self._spec, self._node, self._log = spec, node, log
        self._folder = Path(spec.run_dir) / "checkpoints"
        count = len(spec.nodes)
        self._before = [(node_rank - 1 - i) % count for i in range(min(spec.replicas, count - 1))]
        server = shardstream.server_of(spec)
        others = [n.address or n.name for n in spec.nodes if n.name != node]
        addresses = shardstream.addresses(node, spec.nodes[node_rank].address, others)
        self.where: Where = {"addresses": addresses, "port": server.port}
        self._servers: Mapping[int, Where] = {}
        self._done: Dict[int, int] = {}  # step → tries that it took; all is said of it
        self._ending = threading.Event()
        self._then: Callable[[], None] = lambda: None
        self._thread: Optional[threading.Thread] = None
        self.problems: List[str] = []

    def begin(self, servers: Mapping[int, Where]) -> None:
        """``servers``: where each node serves, by its rank."""
        if self._thread is None:
            self._servers = servers
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def finish(self, then: Callable[[], None]) -> None:
        """No further checkpoint comes: calls ``then`` (from the thread) once the newest has its copies, or cannot."""
        self._then = then
        self._ending.set()
        if self._thread is None:
            then()

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread alone
        while True:
            ending = self._ending.is_set()  # asked first: what is written before it is seen below
            step = self._due()
            if step is not None:
                self._try(step)
            elif ending:
                self._then()
                return
            else:
                self._ending.wait(_LOOK_S)

    def _due(self) -> Optional[int]:
        """The newest checkpoint of this attempt, unless it is done."""
        steps = [step_of(name) for name in names_in(str(self._folder))]
        for step in sorted((s for s in steps if s is not None), reverse=True):
            if step in self._done:
                return None
            manifest = self._manifest(step)
            if manifest is not None:
                if manifest.get("attempt") == self._spec.attempt:
                    return step
                self._done[step] = 0
        return None

    def _manifest(self, step: int) -> Optional[Dict[str, Any]]:
        value = read_json(str(self._step_folder(step) / "manifest.json"))
        return value if isinstance(value, dict) else None

    def _step_folder(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _try(self, step: int) -> None:
        for number in range(1, _TRIES + 1):
            try:
                began = time.monotonic()
                told = self._copy(step)
                self._log(f"step {step}: {told} in {time.monotonic() - began:.1f} s")
                break
            except (ZerunError, OSError, ValueError, KeyError, TypeError) as problem:
                why = f"step {step} has no replica on {self._node}: {problem}"
                self._log(why)
                if number == _TRIES or isinstance(problem, (NoSpace, UsageError)):
                    self.problems.append(why)
                    break
                self._ending.wait(_PAUSE_S)
        self._done[step] = number

    def _copy(self, step: int) -> str:
        manifest = self._manifest(step)
        if manifest is None:
            return "pruned before it was copied"
        beside = self._folder / f".replica-{step:08d}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            return self._fill(step, manifest, beside)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    def _fill(self, step: int, manifest: Dict[str, Any], beside: Path) -> str:
        taken: Dict[str, List[int]] = {}
        verified_by, num_bytes = "", 0
        for node_rank in self._before:
            name = self._spec.nodes[node_rank].name
            where = self._servers[node_rank]
            sources = [(str(address), int(where["port"])) for address in where["addresses"]]
            shards = [shard for shard in manifest["shards"] if shard["node"] == name]
            self._ask_for_room(sum(int(shard["bytes"]) for shard in shards))
            for shard in shards:
                path = str(beside / f"rank-{int(shard['rank']):05d}.safetensors")
                name_there = f"step-{step:08d}/{os.path.basename(path)}"
                shardstream.fetch(sources, self._spec.token, shard, name_there, path)
                verified_by = shardstream.check(path, shard, self._spec.python)
                num_bytes += int(shard["bytes"])
                taken.setdefault(name, []).append(int(shard["rank"]))
        self._put(
            step, beside, {"node": self._node, "attempt": self._spec.attempt, "of": taken, "verified_by": verified_by}
        )
        return f"replicas of {', '.join(taken) or 'nothing'} ({num_bytes} bytes, verified by {verified_by})"

    def _ask_for_room(self, num_bytes: int) -> None:
        free = free_bytes(str(self._folder))
        if free is not None and num_bytes + SPARE_BYTES > free:
            raise NoSpace(f"{num_bytes} bytes are to come, {free} are free")

    def _put(self, step: int, beside: Path, about: Dict[str, Any]) -> None:
        """All at once, unless the checkpoint was pruned meanwhile: then nothing of it stays."""
        target = self._step_folder(step)
        files = sorted(beside.iterdir())
        try:
            for file in files:
                os.replace(file, target / file.name)
            write_atomically(target / REPLICAS, dumps(about), durable=True)
            sync_folder(target)
        finally:
            if not (target / "manifest.json").exists():
                for name in [*(file.name for file in files), REPLICAS]:
                    with contextlib.suppress(OSError):
                        (target / name).unlink()
                with contextlib.suppress(OSError):
                    target.rmdir()


def read_servers(message: Mapping[str, Any]) -> Dict[int, Where]:
    """What the first node's agent told of all nodes' servers; what has not the right shape is left out."""
    found: Dict[int, Where] = {}
    servers = message.get("servers")
    for number, where in servers.items() if isinstance(servers, dict) else ():
        checked = read_where(where)
        if checked is not None and str(number).isdigit():
            found[int(number)] = checked
    return found


def read_where(where: Any) -> Optional[Where]:
    if not isinstance(where, dict) or not isinstance(where.get("port"), int):
        return None
    addresses = where.get("addresses")
    if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
        return None
    return {"addresses": addresses, "port": where["port"]}
