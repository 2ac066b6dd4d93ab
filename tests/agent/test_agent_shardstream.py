"""Shards between nodes: real sockets, real files; who may ask, what is proven, and what an interruption leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from agent_job import until

from launcher.agent import digests, replicas, shardstream
from launcher.agent.pull import pull
from launcher.agent.shardstream import Server
from launcher.contract.errors import NoSpace, Unreachable, UsageError, VerificationFailed
from launcher.contract.holdings import checkpoints_here
from launcher.contract.launch import LaunchSpec, Node
from launcher.contract.manifest import BLOCK_BYTES
from launcher.contract.ranges import Ranges
from launcher.contract.train import AdamW, Batch, Data, TrainConfig, Zero

TOKEN = "known-to-the-run"


def write_checkpoint(runs: Path, step: int, nodes: list[str], here: str, *, size: int = 1000) -> dict[str, Any]:
    """A checkpoint of one rank a node as ``here`` would hold it: all rows in the manifest, its own shard's bytes."""
    folder = runs / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for rank, node in enumerate(nodes):
        data = bytes((step + rank + i) % 251 for i in range(997)) * (size // 997 + 1)
        data = data[:size]
        blocks = [xxhash.xxh3_128_hexdigest(data[i : i + BLOCK_BYTES]) for i in range(0, size, BLOCK_BYTES)]
        file = f"rank-{rank:05d}.safetensors"
        rows.append({"rank": rank, "node": node, "file": file, "bytes": size, "digest": "", "blocks": blocks})
        if node == here:
            (folder / file).write_bytes(data)
    manifest = {"format": 1, "step": step, "attempt": 1, "shards": rows}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


@pytest.fixture
def source(tmp_path: Path) -> Iterator[tuple[Path, Server]]:
    server = Server(str(tmp_path / "n1" / "checkpoints"), TOKEN, None)
    yield tmp_path / "n1", server
    server.close()


def request(run_dir: Path, server: Server, shards: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    from_ = {"addresses": ["127.0.0.1"], "port": server.port, "shards": shards}
    return {"run_dir": str(run_dir), "step": 10, "token": TOKEN, "python": sys.executable, "sources": [from_], **more}


def test_a_shard_arrives_whole_or_not_at_all(source: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = source
    size = BLOCK_BYTES + 12345
    rows = write_checkpoint(folder, 10, ["n1", "n2"], "n1", size=size)["shards"]
    target = tmp_path / "n2"
    assert pull(request(target, server, rows[:1]))["bytes"] == size
    name = f"checkpoints/step-00000010/{rows[0]['file']}"
    assert (target / name).read_bytes() == (folder / name).read_bytes()

    # A flipped bit is found in its block; a file that lacks, another token and another name are refused.
    data = bytearray((folder / name).read_bytes())
    data[BLOCK_BYTES + 7] ^= 1
    (folder / name).write_bytes(data)
    cases = [
        (request(tmp_path / "n3", server, rows[:1]), VerificationFailed, "rank 0's shard of n1: block 1 is damaged"),
        (request(tmp_path / "n3", server, rows[1:]), VerificationFailed, "rank-00001.safetensors: No such file"),
        (request(tmp_path / "n3", server, rows[:1], token="guessed"), Unreachable, "hung up"),
        (request(tmp_path / "n3", server, [{**rows[0], "file": "../../x"}]), UsageError, "names '../../x' for rank 0"),
        (request(tmp_path / "n3", server, [{**rows[0], "bytes": 2**60}]), NoSpace, "are to come"),
    ]
    for asked, kind, said in cases:
        with pytest.raises(kind, match=said):
            pull(asked)
        assert [p.name for p in (tmp_path / "n3" / "checkpoints").rglob("*") if p.is_file()] == []


def test_nothing_but_shards_of_the_run_is_served(source: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = source
    row = write_checkpoint(folder, 10, ["n1"], "n1")["shards"][0]
    (folder / "secret").write_text("secret")
    (folder / "checkpoints" / "step-00000010" / "rank-00007.safetensors").symlink_to(folder / "secret")
    for name in ("../secret", "step-00000010/manifest.json", "step-00000010/rank-00007.safetensors", "/etc/passwd"):
        with pytest.raises(VerificationFailed):
            shardstream.fetch([("127.0.0.1", server.port)], TOKEN, {**row, "bytes": 6}, name, str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()


def test_ranges_are_asked_for_and_proven_as_shards_are(
    source: tuple[Path, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, server = source
    row = write_checkpoint(folder, 10, ["n1"], "n1", size=BLOCK_BYTES + 500)["shards"][0]
    wanted = [{"shard": row, "ranges": [[3, 70_000], [BLOCK_BYTES - 5, BLOCK_BYTES + 9]]}]
    target = tmp_path / "n2"
    asked = request(target, server, [])
    asked["sources"][0]["ranges"] = wanted
    assert pull(asked) == {"files": 1, "bytes": 70_011, "verified_by": ""}
    with Ranges(str(target / "checkpoints/step-00000010/rank-00000.ranges")) as found:
        assert found.ranges == ((3, 70_000), (BLOCK_BYTES - 5, BLOCK_BYTES + 9))
        right = (folder / "checkpoints/step-00000010" / row["file"]).read_bytes()
        assert all(found.bytes_of(p) == right[p.start : p.stop] for p in found.pieces)
    about = {c["step"]: c for c in checkpoints_here(str(target))}
    assert about[10]["sizes"] == {} and not about[10]["whole"]

    def refused(kind: type[Exception], said: str, **more: Any) -> None:
        before = sorted(target.rglob("*"))
        with pytest.raises(kind, match=said):
            pull({**asked, **more})
        assert sorted(target.rglob("*")) == before

    gone = "hung up|reset by peer|Broken pipe"  # what it had not read when it hung up is lost
    refused(Unreachable, gone, token="guessed")
    monkeypatch.setattr(digests, "_inside", lambda: ())
    refused(UsageError, "nothing here computes the manifest's digests on 127.0.0.1")
    monkeypatch.undo()
    monkeypatch.setattr(shardstream, "_BODY_BYTES", 20)
    refused(Unreachable, gone)
    monkeypatch.undo()
    path = folder / "checkpoints/step-00000010" / row["file"]
    data = bytearray(path.read_bytes())
    data[BLOCK_BYTES + 300] ^= 1  # beside what is asked for, in the same block
    path.write_bytes(data)
    refused(VerificationFailed, "rank 0's shard of n1: block 1 is damaged")


def test_a_source_that_goes_away(tmp_path: Path) -> None:
    row = write_checkpoint(tmp_path / "n1", 10, ["n1"], "n1")["shards"][0]
    with socket.create_server(("127.0.0.1", 0)) as half:

        def serve() -> None:
            connection, _ = half.accept()
            with connection:
                connection.sendall(b'{"nonce": "1"}\n')
                connection.recv(4096)
                connection.sendall(b'{"bytes": 1000}\n' + b"x" * 500)

        thread = threading.Thread(target=serve)
        thread.start()
        asked = {"addresses": ["127.0.0.1"], "port": half.getsockname()[1], "shards": [row]}
        base = {"run_dir": str(tmp_path / "n2"), "step": 10, "token": TOKEN, "python": None}
        with pytest.raises(Unreachable, match="cut after 500 of 1000 bytes"):
            pull({**base, "sources": [asked]})
        thread.join()
    with pytest.raises(Unreachable, match="Connection refused"):
        pull({**base, "sources": [asked]})
    assert [p.name for p in (tmp_path / "n2" / "checkpoints").rglob("*")] == []


def endless(connection: socket.socket) -> None:
    connection.sendall(b'{"ranges": true}\n')
    for _ in range(4096):
        connection.sendall(bytes(2**20))


def unheard_of(connection: socket.socket) -> None:
    described = b'{"rank":0,"file":"f","bytes":Infinity,"digest":"x","pieces":[]}'
    connection.sendall(b'{"ranges": true}\n' + described + len(described).to_bytes(8, "little") + b"zeranges")


@pytest.mark.parametrize(
    ("nonce", "answer", "kind", "said"),
    [
        (b"[" * 4000 + b"\n", None, Unreachable, "nested too deeply"),
        (b'{"nonce": "1"', None, Unreachable, "timed out|no whole line"),
        (b'{"nonce": "1"}\n', endless, VerificationFailed, "sends more than was asked for"),
        (b'{"nonce": "1"}\n', unheard_of, VerificationFailed, "is damaged"),
    ],
)
def test_whatever_a_stranger_on_the_port_answers_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nonce: bytes, answer: Any, kind: type[Exception], said: str
) -> None:
    """The server is gone and another process has its port."""
    monkeypatch.setattr(shardstream, "_SILENCE_S", 1.0)
    row = write_checkpoint(tmp_path / "n1", 10, ["n1"], "n1")["shards"][0]
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve() -> None:
            connection, _ = stranger.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(nonce)
                if answer is not None:
                    connection.recv(4096)
                    answer(connection)
                while not answer and not over.wait(0.3):  # a byte now and then
                    connection.sendall(b" ")

        thread = threading.Thread(target=serve)
        thread.start()
        source = {"addresses": ["127.0.0.1"], "port": stranger.getsockname()[1], "shards": []}
        source["ranges"] = [{"shard": row, "ranges": [[0, 10]]}]
        begun = time.monotonic()
        with pytest.raises(kind, match=said):
            pull({"run_dir": str(tmp_path / "n2"), "step": 10, "token": TOKEN, "python": None, "sources": [source]})
        assert time.monotonic() - begun < 15
        over.set()
        thread.join()
    assert [p.name for p in (tmp_path / "n2" / "checkpoints").rglob("*")] == []


def test_whatever_a_stranger_asks_ends_its_connection_alone(source: tuple[Path, Server], tmp_path: Path) -> None:
    folder, server = source
    row = write_checkpoint(folder, 10, ["n1"], "n1")["shards"][0]
    for asked in (b"[" * 4000 + b"\n", b"[]\n", b'{"mac": "\\u00e9"}\n', b'{"file": [], "mac": {}}\n'):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.recv(4096)
            connection.sendall(asked)
            assert connection.recv(4096) == b""
    pull(request(tmp_path / "n2", server, [row]))


def test_serving_ends_with_whoever_listens(tmp_path: Path) -> None:
    package = Path(shardstream.__file__).parents[2]
    program = "import sys; from launcher.agent.main import main; sys.exit(main(['serve']))"
    serving = subprocess.Popen(
        [sys.executable, "-c", program], cwd=package, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert serving.stdin is not None and serving.stdout is not None
    asked = {"run_dir": str(tmp_path), "token": TOKEN, "node": "localhost", "address": "", "others": [], "ports": None}
    serving.stdin.write(json.dumps(asked).encode())
    serving.stdin.close()
    told = json.loads(serving.stdout.readline())
    with socket.create_connection(("127.0.0.1", told["port"])):
        pass
    serving.stdout.close()
    assert serving.wait(40) == 0


def test_every_way_to_the_digests_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(BLOCK_BYTES) + b"rest")
    data = path.read_bytes()
    right = [xxhash.xxh3_128_hexdigest(data[:BLOCK_BYTES]), xxhash.xxh3_128_hexdigest(data[BLOCK_BYTES:])]
    wrong = [right[0], right[0]]
    used = []
    for drop in ("", "_by_package", "_by_library"):
        if drop:
            monkeypatch.setattr(digests, drop, lambda: None)
        number, by = digests.wrong_block(str(path), right, sys.executable)
        assert number is None and digests.wrong_block(str(path), wrong, sys.executable)[0] == 1
        used.append(by)
        with digests.digester(sys.executable) as digest:
            assert [digest(data[:BLOCK_BYTES]), digest(data[BLOCK_BYTES:])] == right
    assert used[0] == "xxhash" and used[-1] == sys.executable
    with pytest.raises(UsageError, match="nothing here computes"):
        digests.wrong_block(str(path), right, "python3")
    for nothing in ("python3", "/nowhere/python", "/bin/false"):
        with pytest.raises(UsageError, match="nothing here computes"), digests.digester(nothing) as digest:
            digest(b"x")


# --- copies in the background ---------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    train = TrainConfig(
        zero=Zero(2), optimizer=AdamW(lr=1e-3), batch=Batch(1, 1), steps=1, data=Data(text="python-stdlib")
    )
    nodes = tuple(Node(name, 1, "127.0.0.1") for name in ("n1", "n2"))
    return LaunchSpec(
        run="r", attempt=1, run_dir=str(tmp_path / "n2"), runtime="", nodes=nodes, shared=False, token=TOKEN,
        python=sys.executable, agent_python=sys.executable, train=train, replicas=1,
    )  # fmt: skip


def test_copies_follow_the_newest_checkpoint_and_end_with_the_last(
    source: tuple[Path, Server], spec: LaunchSpec, tmp_path: Path
) -> None:
    first, server = source
    mine = tmp_path / "n2"
    said: list[str] = []
    copies = replicas.of_node(spec, 1, "n2", said.append)
    assert copies is not None
    for step in (10, 20):  # both are there when it begins: the older is not copied any more
        write_checkpoint(first, step, ["n1", "n2"], "n1")
        write_checkpoint(mine, step, ["n1", "n2"], "n2")
    copies.begin({0: {"addresses": ["127.0.0.1"], "port": server.port}, 1: copies.where})
    shard = "rank-00000.safetensors"
    until(lambda: (mine / "checkpoints/step-00000020/replicas.json").exists())
    assert (mine / f"checkpoints/step-00000020/{shard}").read_bytes() == (
        first / f"checkpoints/step-00000020/{shard}"
    ).read_bytes()
    assert not (mine / f"checkpoints/step-00000010/{shard}").exists()
    about = {c["step"]: c for c in checkpoints_here(str(mine))}
    assert about[20]["replicas"] == {"0": "n2"} and about[10]["replicas"] == {}

    # A checkpoint that is pruned while it is copied leaves nothing; one without a source is told of.
    write_checkpoint(mine, 30, ["n1", "n2"], "n2")
    until(lambda: any("step 30 has no replica on n2" in line for line in said))
    shutil.rmtree(mine / "checkpoints/step-00000030")
    until(lambda: any("pruned before it was copied" in line for line in said))
    write_checkpoint(first, 40, ["n1", "n2"], "n1")
    write_checkpoint(mine, 40, ["n1", "n2"], "n2")
    ended = threading.Event()
    copies.finish(ended.set)  # whatever was written before is copied before it is over
    assert ended.wait(40) and (mine / f"checkpoints/step-00000040/{shard}").exists()
    assert sorted(p.name for p in (mine / "checkpoints").iterdir()) == [
        "step-00000010", "step-00000020", "step-00000040"
    ]  # fmt: skip
    assert copies.problems == []


def test_a_run_that_shares_its_disk_makes_no_copies(spec: LaunchSpec) -> None:
    assert replicas.of_node(dataclasses.replace(spec, shared=True), 0, "n1", print) is None
    assert replicas.of_node(dataclasses.replace(spec, replicas=0), 0, "n1", print) is None


def test_what_another_agent_tells_is_looked_at() -> None:
    good = {"addresses": ["10.0.0.1"], "port": 5}
    told = {"servers": {"0": good, "x": good, "2": {"port": "5"}, "3": None, "4": {"addresses": [1], "port": 5}}}
    assert replicas.read_servers(told) == {0: good}
    assert replicas.read_servers({"servers": [good]}) == {} and replicas.read_servers({}) == {}
