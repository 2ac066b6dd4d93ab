"""Whether nodes reach each other: each opens a real port where a rendezvous would, and connects to all the others.

Two ways to agree on who listens where. Without a scheduler the launcher hears it from each node (the verbs
``listen`` and ``reach``). Inside a Slurm job, where nobody can speak to a node, a folder of the run is the board
(:func:`among`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any, Dict, List, Mapping, NamedTuple, Optional

from ..contract.errors import UsageError
from ..contract.folder import RunFolder
from ..contract.launch import LaunchSpec, Node
from ..contract.plain import write_atomically
from . import rendezvous

_CONNECT_S = 5.0
_BOARD_S = 40.0  # until every node's agent has begun: Slurm starts them within seconds
_AT_ONCE = 64
_BEAT_S = 1.0


class Door(NamedTuple):
    """A listening socket that answers whoever says the token with the node's name."""

    node: str
    address: str
    port: int
    listener: socket.socket

    def about(self) -> Dict[str, Any]:
        return {"node": self.node, "address": self.address, "port": self.port}


def open_door(spec: LaunchSpec, name: str, address: str) -> Door:
    """Binds as node rank 0 would for a rendezvous. Raises as :func:`rendezvous.open_meeting` does."""
    if spec.interface and not address and len(spec.nodes) > 1:
        address = rendezvous.address_of(spec.interface, name)
    others = [n.address or n.name for n in spec.nodes]
    own = rendezvous.own_address(name, address, others, alone=len(spec.nodes) == 1)
    ports = rendezvous.candidates(spec.run, spec.attempt, spec.ports, rendezvous.ephemeral_range())
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    listener = rendezvous.listen_at(family, "127.0.0.1" if own.startswith("127.") else "", ports)
    door = Door(name, own, listener.getsockname()[1], listener)
    threading.Thread(target=_answer, args=(door, spec.token), daemon=True).start()
    return door


def _answer(door: Door, token: str) -> None:
    asked, name = token.encode(), door.node.encode()
    while True:
        try:
            peer, _ = door.listener.accept()
        except OSError:
            return
        with peer, contextlib.suppress(OSError):
            peer.settimeout(_CONNECT_S)
            if _read(peer, len(asked)) == asked:
                peer.sendall(name)


def _read(peer: socket.socket, num_bytes: int) -> bytes:
    got = b""
    while len(got) < num_bytes:
        chunk = peer.recv(num_bytes - len(got))
        if not chunk:
            break
        got += chunk
    return got


def try_all(targets: List[Dict[str, Any]], token: str) -> List[Dict[str, Any]]:
    """The targets that could not be reached, each with ``why``."""

    def one(target: Dict[str, Any]) -> Optional[str]:
        return _try(str(target["node"]), str(target["address"]), int(target["port"]), token)

    if not targets:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(targets))) as pool:
        found = list(pool.map(one, targets))
    return [{**target, "why": why} for target, why in zip(targets, found) if why is not None]


def _try(node: str, address: str, port: int, token: str) -> Optional[str]:
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as peer:
            peer.sendall(token.encode())
            said = _read(peer, len(node.encode()))
    except socket.timeout:
        return "timed out"
    except OSError as problem:
        return (problem.strerror or str(problem)).lower()
    return None if said == node.encode() else "something else answers there"


# --- without a scheduler: two verbs ---------------------------------------------------------------


def listen(request: Mapping[str, Any], out: IO[bytes]) -> int:
    """``{run, token, node, address, nodes: [[name, address]…], interface, ports, limit_s}`` → one JSON line
    ``{node, address, port}``, then a beat a second until nobody reads on, or the limit."""
    nodes = tuple(Node(str(name), 1, str(address)) for name, address in request["nodes"])
    ports = request.get("ports")
    spec = LaunchSpec(
        str(request["run"]), 1, "/", "", nodes, False, str(request["token"]), "", "",
        interface=request.get("interface"), ports=(int(ports[0]), int(ports[1])) if ports else None,
    )  # fmt: skip
    door = open_door(spec, str(request["node"]), str(request["address"]))
    end = time.monotonic() + float(request["limit_s"])
    with contextlib.suppress(OSError):
        out.write(json.dumps(door.about()).encode("ascii") + b"\n")
        while time.monotonic() < end:
            out.flush()
            time.sleep(_BEAT_S)
            out.write(b"\n")
    return 0


def reach(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{targets: [{node, address, port}…], token}`` → ``{failed: [{node, address, port, why}…]}``."""
    return {"failed": try_all(list(request["targets"]), str(request["token"]))}


# --- inside a Slurm job: the board ----------------------------------------------------------------


def among(spec: LaunchSpec, node_rank: int, name: str) -> bool:
    """Tries all pairs together with the agents of the other nodes, and writes what this one found.

    Returns whether every node wrote that it reaches every other: then ranks may start.
    """
    board = Path(RunFolder(PurePosixPath(spec.run_dir)).attempt(spec.attempt).reach)
    board.mkdir(parents=True, exist_ok=True)
    found: Dict[str, Any] = {"node": name, "failed": [], "absent": [], "problem": None}
    door = None
    try:
        door = open_door(spec, name, spec.nodes[node_rank].address)
        _post(board / f"door-{node_rank}", door.about())
    except (OSError, UsageError) as problem:
        found["problem"] = str(problem)
        _post(board / f"door-{node_rank}", {"node": name, "address": "", "port": 0})
    doors = _collect(board, "door", len(spec.nodes))
    others = [about for rank, about in doors.items() if rank != node_rank and about["port"]]
    found["failed"] = try_all(others, spec.token)
    found["absent"] = sorted(set(range(len(spec.nodes))) - set(doors))
    found["doors"] = len(doors)
    _post(board / f"found-{node_rank}", found)
    seen = _collect(board, "found", len(doors))
    if door is not None:
        door.listener.close()
    whole = len(seen) == len(spec.nodes)
    return whole and not any(f["failed"] or f["absent"] or f["problem"] for f in seen.values())


def _post(path: Path, plain: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(plain).encode("ascii"))


def _collect(board: Path, kind: str, wanted: int) -> Dict[int, Dict[str, Any]]:
    end = time.monotonic() + _BOARD_S
    found: Dict[int, Dict[str, Any]] = {}
    while True:
        for entry in os.listdir(board):
            what, _, rank = entry.partition("-")
            if what == kind and rank.isdigit() and int(rank) not in found:
                with contextlib.suppress(OSError, ValueError):
                    found[int(rank)] = json.loads((board / entry).read_bytes())
        if len(found) >= wanted or time.monotonic() > end:
            return found
        time.sleep(0.1)


def findings(spec_dir: str, attempt: int) -> List[Dict[str, Any]]:
    """What the nodes of an attempt wrote on the board, by node rank."""
    board = Path(RunFolder(PurePosixPath(spec_dir)).attempt(attempt).reach)
    found = {}
    for path in board.glob("found-*") if board.is_dir() else ():
        with contextlib.suppress(OSError, ValueError):
            found[int(path.name.partition("-")[2])] = json.loads(path.read_bytes())
    return [found[rank] for rank in sorted(found)]


def reached(request: Dict[str, Any]) -> Dict[str, Any]:
    """The verb that reads the board: ``{run_dir, attempt}`` → ``{found: […]}``."""
    return {"found": findings(str(request["run_dir"]), int(request["attempt"]))}
