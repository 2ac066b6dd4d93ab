"""Checkpoint files from node to node, over the cluster's network: one server a node, one connection a file.

Who asks proves that it knows the run's token (HMAC-SHA256 over the server's nonce and the name), and can ask for
nothing but shards of this run. ::

    server  {"nonce": …}
    client  {"file": "step-00000100/rank-00003.safetensors", "mac": …}
    server  {"bytes": n} and n bytes, or {"error": …}

With ``"body": n, "sha": …`` in the question, n bytes of JSON follow it: which ranges of the shard, and its row of the
manifest (``{"ranges": [[start, stop], …], "shard": {…}}``). The answer is then ``{"ranges": true}`` and a file of
ranges (:mod:`..contract.ranges`), until the connection ends.

What arrives is written beside its place, held against the manifest's digests, then renamed by the caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import stat
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ..contract.errors import NoSpace, Unreachable, UsageError, VerificationFailed, ZerunError
from ..contract.launch import LaunchSpec
from ..contract.plain import loads
from ..contract.ranges import Range, cut, most_bytes, prove
from . import rendezvous
from .digests import digester, wrong_block

_NAME = re.compile(r"step-[0-9]{8,12}/rank-[0-9]{5,9}\.safetensors")
_LINE_BYTES = 4096
_BODY_BYTES = 2**28
_CONNECT_S = 5.0
_SILENCE_S = 30.0
_CHUNK = 2**20
_AT_ONCE = 16

Address = Tuple[str, int]


class Server:
    """Serves the shards below ``folder`` (RUN/checkpoints) from threads until :meth:`close`, or the process's end."""

    opens: Callable[[str, str], int]
    """``opens(folder, name)`` opens a file that may be asked for, and raises OSError for any other."""

    def __init__(self, folder: str, token: str, ports: Any, python: Optional[str] = None) -> None:
        self._folder, self._token, self._python = folder, token, python
        self.opens = _open
        self._listener = _listen(ports)
        self._room = threading.Semaphore(_AT_ONCE)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Whoever reaches the port may say anything: what is no question ends the connection and nothing else.
        with self._room, connection, contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            connection.settimeout(_SILENCE_S)
            nonce = secrets.token_hex(16)
            _say(connection, {"nonce": nonce})
            asked = _hear(connection)
            name, sha = str(asked.get("file")), str(asked.get("sha", ""))
            if not _is_same(_mac(self._token, nonce, name, sha), str(asked.get("mac"))):
                return
            body = _hear_body(connection, asked.get("body", 0), sha)
            try:
                handle = self.opens(self._folder, name)
            except OSError as problem:
                _say(connection, {"error": problem.strerror or str(problem)})
                return
            with os.fdopen(handle, "rb") as file:
                if body:
                    self._serve_ranges(connection, file, body)
                    return
                _say(connection, {"bytes": os.fstat(handle).st_size})
                connection.sendfile(file)

    def _serve_ranges(self, connection: socket.socket, file: Any, body: bytes) -> None:
        asked = loads(body)
        try:
            with digester(self._python) as digest:
                _say(connection, {"ranges": True})
                for data in cut(file, asked["shard"], asked["ranges"], digest):
                    connection.sendall(data)
        except UsageError as problem:
            _say(connection, {"error": problem.message, "hint": problem.hint})


def server_of(spec: LaunchSpec) -> Server:
    return Server(os.path.join(spec.run_dir, "checkpoints"), spec.token, spec.ports, spec.python)


def fetch(sources: Sequence[Address], token: str, shard: Dict[str, Any], name: str, beside: str) -> None:
    """Copies the shard ``name`` (``step-N/FILE``) to the file ``beside``, durably. ``shard``: its row of a manifest.

    The first of ``sources`` that answers is used. Raises Unreachable, NoSpace, VerificationFailed; ``beside`` is then
    gone again.
    """
    with _arriving(sources, name, beside) as (connection, file):
        told = _ask(connection, token, name, b"")
        if told.get("bytes") != shard["bytes"]:
            raise VerificationFailed(f"{name}: {told.get('error') or 'another size'} on {sources[0][0]}")
        _receive(connection, file, int(shard["bytes"]), name)


def fetch_ranges(
    sources: Sequence[Address], token: str, shard: Dict[str, Any], ranges: Sequence[Range], beside: str, *, name: str
) -> None:
    """As :func:`fetch`, of a file of these ranges of the shard; every piece is proven when this returns. Raises
    UsageError too, where nothing on the other side computes the manifest's digests."""
    body = json.dumps({"ranges": ranges, "shard": shard}).encode("ascii")
    with _arriving(sources, name, beside) as (connection, file):
        told = _ask(connection, token, name, body)
        if "ranges" not in told:
            said = f"{name}: {told.get('error')} on {sources[0][0]}"
            raise UsageError(said, hint=told["hint"]) if told.get("hint") else VerificationFailed(said)
        left = most_bytes(ranges)
        while data := connection.recv(_CHUNK):
            left -= len(data)
            if left < 0:  # it need not be a server of ours that answers
                raise VerificationFailed(f"{name}: {sources[0][0]} sends more than was asked for")
            file.write(data)
        file.flush()
        prove(beside, shard, ranges)


@contextlib.contextmanager
def _arriving(sources: Sequence[Address], name: str, beside: str) -> Iterator[Tuple[socket.socket, Any]]:
    """A connection, and the file that what comes is written to: durable at the end, gone where it fails."""
    try:
        with _connect(sources) as connection, open(beside, "wb") as file:
            yield connection, file
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        _forget(beside)
        if problem.errno in (28, 122):  # ENOSPC, EDQUOT
            raise NoSpace(f"{name}: no space for it") from problem
        raise Unreachable(f"{name} from {sources[0][0]}: {problem.strerror or problem}") from problem
    except (ZerunError, ValueError) as problem:
        _forget(beside)
        raise problem if isinstance(problem, ZerunError) else Unreachable(f"{name}: {problem}") from problem


def _ask(connection: socket.socket, token: str, name: str, body: bytes) -> Dict[str, Any]:
    nonce = str(_hear(connection).get("nonce"))
    sha = hashlib.sha256(body).hexdigest() if body else ""
    more = {"body": len(body), "sha": sha} if body else {}
    _say(connection, {"file": name, "mac": _mac(token, nonce, name, sha), **more})
    connection.sendall(body)
    return _hear(connection)


def check(beside: str, shard: Dict[str, Any], python: Optional[str]) -> str:
    """Holds the file against the manifest's row, block by block; says by what. Raises VerificationFailed (the file is
    removed) and UsageError when nothing here computes the digests."""
    number, by = wrong_block(beside, [str(b) for b in shard["blocks"]], python)
    if number is not None:
        _forget(beside)
        raise VerificationFailed(f"rank {shard['rank']}'s shard of {shard['node']}: block {number} is damaged")
    return by


def addresses(node: str, address: str, others: Sequence[str]) -> List[str]:
    """Where other nodes may reach this one, the likeliest first."""
    found: List[str] = []
    with contextlib.suppress(ZerunError):
        found.append(rendezvous.own_address(node, address, others, alone=False))
    found += [own for _, own in rendezvous.interfaces() if not own.startswith("127.")]
    return list(dict.fromkeys(found))


# --- pieces ---------------------------------------------------------------------------------------


def _listen(ports: Any) -> socket.socket:
    """A port of the allowed range, tried from a random one on; any free port where all are allowed."""
    low, high = ports or (0, 0)
    start = secrets.randbelow(high - low + 1)
    for number in range(high - low + 1):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", low + (start + number) % (high - low + 1)))
            listener.listen(64)
            return listener
        except OSError:
            listener.close()
    raise ZerunError(f"none of the ports {low}-{high} is free", hint="give more `network.ports` in the cluster")


def _connect(sources: Sequence[Address]) -> socket.socket:
    problem: Optional[OSError] = None
    for source in sources:
        try:
            connection = socket.create_connection(source, _CONNECT_S)
            connection.settimeout(_SILENCE_S)
            return connection
        except OSError as found:
            problem = problem or found
    raise problem or OSError("it told no address")


def _receive(connection: socket.socket, file: Any, size: int, name: str) -> None:
    left = size
    while left:
        data = connection.recv(min(_CHUNK, left))
        if not data:
            raise Unreachable(f"{name}: cut after {size - left} of {size} bytes")
        file.write(data)
        left -= len(data)


def _mac(token: str, nonce: str, name: str, sha: str) -> str:
    """``sha``: of the body that follows the question, empty where none does."""
    said = "\n".join([nonce, name, *([sha] if sha else [])])
    return hmac.new(token.encode("utf-8"), said.encode("utf-8"), hashlib.sha256).hexdigest()


def _is_same(right: str, said: str) -> bool:
    return hmac.compare_digest(right.encode("ascii"), said.encode("utf-8", "replace"))


def _open(folder: str, name: str) -> int:
    if not _NAME.fullmatch(name):
        raise FileNotFoundError(2, "it is no shard")
    handle = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(2, "it is no plain file")
    return handle


def _say(connection: socket.socket, message: Dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode("ascii") + b"\n")


def _hear(connection: socket.socket) -> Dict[str, Any]:
    """One line; byte by byte, because what follows it is not ours to read here."""
    line, end = b"", time.monotonic() + _SILENCE_S
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(line) > _LINE_BYTES:
            raise ValueError("the other side hung up")
        if time.monotonic() > end:  # a byte now and then is no answer
            raise ValueError(f"no whole line in {_SILENCE_S:.0f} s")
        line += data
    message = loads(line)
    if not isinstance(message, dict):
        raise ValueError("a JSON object was expected")
    return message


def _hear_body(connection: socket.socket, size: Any, sha: str) -> bytes:
    if not isinstance(size, int) or not 0 <= size <= _BODY_BYTES:
        raise ValueError("a question of a size that is not ours")
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(_CHUNK, size - len(data)))
        if not more:
            raise ValueError("the other side hung up")
        data += more
    if size and hashlib.sha256(data).hexdigest() != sha:
        raise ValueError("another question than the one that was signed")
    return bytes(data)


def _forget(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
