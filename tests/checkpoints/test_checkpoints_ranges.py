"""Ranges of shards: what moves where a resume has other ranks, what is read of it, and what it is never taken for."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
from dataclasses import replace
from itertools import groupby, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from local_places import AGENT_PYTHON, ROOT, LocalBackend, local_backend
from written import flip, launch, write_run

from launcher.agent.held import held_in
from launcher.agent.pull import join
from launcher.checkpoints import Candidate, candidates, collect, stage, verify
from launcher.checkpoints.verify import digests
from launcher.contract import partition, ranges
from launcher.contract.errors import VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.manifest import FORMAT, Manifest, ShardFile
from launcher.contract.plain import to_plain
from launcher.contract.pruning import remove_checkpoint
from launcher.contract.slices import reshard_tensor
from launcher.contract.train import Zero
from launcher.engine.saving import shardfile

NODES = ["node01", "node02", "node03"]
RUN = "job-1"
KINDS = ("parameters", "exp_avg", "exp_avg_sq")
BUCKET = 3_000_000
STEP = 100


def layout(ranks: int) -> partition.Layout:
    return partition.build(partition.gpt_parameters(2, 240, 64, 256), ranks=ranks, bucket_bytes=BUCKET)


def spec(nodes: list[str], *, attempt: int = 2, zero: Zero | None = None, slots: int = 1) -> Any:
    made = launch("/x", nodes, slots, shared=False, attempt=attempt)
    assert made.train is not None
    return replace(made, train=replace(made.train, zero=zero or Zero(3, bucket_bytes=BUCKET)))


def write_shards(backend: LocalBackend, nodes: list[str]) -> Manifest:
    """A checkpoint as three ranks of the engine write it, a shard a node; random tensors."""
    old = layout(len(nodes))
    shards = []
    places = {place.node: place for place in backend.places()}
    generator = torch.Generator().manual_seed(7)
    for rank, node in enumerate(nodes):
        path = Path(RunFolder.at(places[node].runs, RUN).checkpoint(STEP).shard(rank))
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = [
            shardfile.Entry(
                f"{unit.name}/{kind}", (torch.rand(unit.shard_numel, generator=generator),), (unit.shard_numel,)
            )
            for unit in old.units
            for kind in KINDS
        ]
        shards.append(shardfile.write(path, entries, rank=rank, node=node))
    manifest = Manifest(FORMAT, RUN, 1, STEP, 100, 8, 1, old, tuple(shards), scalars={})
    for node in nodes:
        path = Path(RunFolder.at(places[node].runs, RUN).checkpoint(STEP).manifest)
        path.write_bytes(manifest.to_bytes())
        launched = Path(RunFolder.at(places[node].runs, RUN).attempt(1).launch)
        made = replace(spec(nodes, attempt=1), run_dir=str(path.parents[2]))
        launched.write_text(json.dumps(to_plain(made)))
    return manifest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / RUN
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def rack(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "rack", [*NODES, "node04"])
    write_run(backend.places()[:3], NODES, 1)
    return backend


def folder(backend: LocalBackend, node: int) -> Path:
    return Path(RunFolder.at(backend.places()[node].runs, RUN).checkpoint(STEP).root)


def names(backend: LocalBackend, node: int) -> list[str]:
    return sorted(p.name for p in folder(backend, node).iterdir())


def found(backend: LocalBackend, home: Path) -> Candidate:
    answers = []
    for place in backend.places():
        root = str(RunFolder.at(place.runs, RUN).root)
        answers.append(backend.call(place, "state", {"run_dirs": [root], "attempt": None})["runs"][root])
    return candidates(answers, home)[-1]


def put(backend: LocalBackend, home: Path, nodes: list[str], **more: Any) -> tuple[str | None, list[str]]:
    notices: list[str] = []
    said = stage(backend, RUN, home, found(backend, home), spec(nodes, **more), notices.append)  # type: ignore[arg-type]
    return said, notices


def reads_right(backend: LocalBackend, manifest: Manifest, nodes: list[int], kept: Path) -> None:
    """Every rank of the new world reads on its node, as the engine does, what lies in the whole shards of ``kept``."""
    new = layout(len(nodes))
    for rank, node in enumerate(nodes):
        copies = sorted(reshard_tensor(manifest.layout, new, rank))
        for source, some in groupby(copies, lambda copy: copy.source_rank):
            shard = manifest.shards[source]
            with shardfile.Reader(folder(backend, node), shard) as mine, shardfile.Reader(kept, shard) as right:
                for copy, kind in product(list(some), KINDS):
                    name = f"{manifest.layout.units[copy.source_unit].name}/{kind}"
                    here, there = torch.empty(copy.numel), torch.empty(copy.numel)
                    mine.into(name, copy.source_offset, here)
                    right.into(name, copy.source_offset, there)
                    assert torch.equal(here, there)


def keep_all(backend: LocalBackend, tmp_path: Path) -> Path:
    kept = tmp_path / "kept"
    kept.mkdir()
    for node in range(3):
        for file in folder(backend, node).glob("rank-*.safetensors"):
            shutil.copy(file, kept)
    return kept


# --- arithmetic and the file ----------------------------------------------------------------------


def test_ranges_are_sets_of_bytes() -> None:
    chance = random.Random(3)
    for _ in range(300):
        sets = []
        for _ in range(2):
            some = [(start, start + chance.randrange(9)) for start in (chance.randrange(60) for _ in range(5))]
            sets.append((some, {i for start, stop in some for i in range(start, stop)}))
        (wanted, wants), (have, has) = sets
        for few, right in ((ranges.joined(wanted), wants), (ranges.without(wanted, have), wants - has)):
            assert [i for start, stop in few for i in range(start, stop)] == sorted(right)
            assert ranges.count(few) == len(right)
        near = ranges.joined(wanted, 3)
        assert all(b[0] - a[1] > 3 for a, b in pairwise(near))


def cut_to(path: Path, source: Path, shard: ShardFile, some: list[tuple[int, int]]) -> Path:
    with source.open("rb") as file:
        path.write_bytes(b"".join(ranges.cut(file, to_plain(shard), some, xxhash.xxh3_128_hexdigest)))
    return path


def test_a_file_of_ranges_is_whole_or_none(tmp_path: Path) -> None:
    source = tmp_path / "rank-00003.safetensors"
    source.write_bytes(random.Random(1).randbytes(18 * 2**20))
    whole, blocks = digests(source)
    shard = ShardFile(3, "n", source.name, 18 * 2**20, whole, blocks)
    some = [(5, 9), (2**20 - 3, 3 * 2**20 + 1), (16 * 2**20 - 8, 18 * 2**20)]
    path = cut_to(tmp_path / "rank-00003.ranges", source, shard, some)
    assert path.stat().st_size - ranges.count(some) < 2000
    ranges.prove(str(path), to_plain(shard), some)
    with pytest.raises(VerificationFailed, match="bytes 9 to 10 are not among them"):
        ranges.prove(str(path), to_plain(shard), [(5, 10)])
    with pytest.raises(VerificationFailed, match="of another shard"):
        ranges.prove(str(path), to_plain(replace(shard, digest="0" * 32)), some)
    other = cut_to(tmp_path / "other.ranges", source, shard, [(9, 30), (7, 20)])
    join(path, other, to_plain(shard))
    ranges.prove(str(other), to_plain(shard), [(5, 30), *some[1:]])
    assert not list(tmp_path.glob(".*"))

    data = path.read_bytes()
    for short in (0, 1, 100, len(data) - 1, len(data) - 50):
        path.write_bytes(data[:short])
        with pytest.raises(ranges.NoRanges, match="cut short"):
            ranges.Ranges(str(path))
    for wrong in (data[1:], data[:-9] + b"\xff" + data[-8:], data.replace(b'"pieces"', b'"peaces"')):
        path.write_bytes(wrong)
        with pytest.raises(ranges.NoRanges):
            ranges.Ranges(str(path))
    assert held_in(str(tmp_path))["ranges"] == [{"rank": 3, "unfit": True}]
    path.write_bytes(data)
    flip(path, 6)
    with pytest.raises(VerificationFailed, match=r"bytes 1048573 to 1048576"):
        ranges.prove(str(path), to_plain(shard), some)
    # The other block of the source is damaged: the bytes that were asked for are right, and are not given.
    flip(source, 17 * 2**20)
    with pytest.raises(VerificationFailed, match="rank 3's shard of n: block 1 is damaged"):
        ranges.prove(str(cut_to(path, source, shard, [(16 * 2**20, 16 * 2**20 + 5)])), to_plain(shard), some)


# --- moves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "apart",
    [pytest.param(False, id="by themselves"), pytest.param(True, id="by way of home", marks=pytest.mark.full)],
)
def test_only_what_is_read_moves_and_the_shards_stay_whole_among_those_who_go_on(
    rack: LocalBackend, home: Path, tmp_path: Path, apart: bool
) -> None:
    manifest = write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    rack.apart = apart
    if apart:  # what killed moves left, here and there
        for left in (home / "checkpoints/.cut-00000100/0", folder(rack, 0).parent / ".incoming-00000100"):
            left.mkdir(parents=True)
            (left / "rank-00002.ranges").write_bytes(b"half")
    said, notices = put(rack, home, NODES[:2])
    assert names(rack, 0) == ["manifest.json", "rank-00000.safetensors", "rank-00001.ranges"]
    # Nobody of those who go on had rank 2's shard: one of them has all of it now.
    assert names(rack, 1) == ["manifest.json", "rank-00001.safetensors", "rank-00002.safetensors"]
    size = manifest.shards[1].bytes
    moved = folder(rack, 0).joinpath("rank-00001.ranges").stat().st_size
    assert 0.45 * size < moved < 0.56 * size
    told = "".join(notices)
    assert "ranges of 1 shard (" in told and ("come here first" in told) is apart
    assert said is not None and "node01 (ranges of 1 shard, " in said and "node02 (1 shard, " in said
    (row,) = held_in(str(folder(rack, 0)))["ranges"]
    assert f"({ranges.count(row['ranges']) / 2**20:.1f} MiB of {size / 2**20:.1f} MiB)" in told
    reads_right(rack, manifest, [0, 1], kept)
    assert list(home.rglob("*.ranges")) == [] and not list(home.glob("checkpoints/.*"))
    for node in range(2):
        assert [p.name for p in folder(rack, node).parent.iterdir()] == ["step-00000100"]
    assert put(rack, home, NODES[:2]) == (None, [])

    # Others, and more of them: node03 has its shard, node04 nothing; what node01 has of rank 1's shard is not enough.
    said, notices = put(rack, home, ["node04", "node01", "node02", "node03"], attempt=3)
    assert said is not None and names(rack, 3) == ["manifest.json", "rank-00000.ranges"]
    reads_right(rack, manifest, [3, 0, 1, 2], kept)
    # And the other way round: what is lacking comes beside what is there, in one file.
    before = held_in(str(folder(rack, 0)))["ranges"][0]["ranges"]
    put(rack, home, ["node02", "node01"], attempt=4)
    reads_right(rack, manifest, [1, 0], kept)
    after = {row["rank"]: row["ranges"] for row in held_in(str(folder(rack, 0)))["ranges"]}
    assert 1 not in after or ranges.without(before, after[1]) == ()


@pytest.mark.full
def test_a_damaged_manifest_on_one_node_and_what_a_kill_left_at_home_stop_nobody(
    rack: LocalBackend, home: Path
) -> None:
    manifest = write_shards(rack, NODES)
    path = folder(rack, 0) / "manifest.json"
    path.write_bytes(manifest.to_bytes()[:50])
    left = home / "checkpoints" / f".staging-{STEP:08d}"
    left.mkdir(parents=True)
    (left / ".manifest.json.Xy12").write_text("half")
    assert found(rack, home).whole
    said, _ = put(rack, home, NODES[:2])
    assert said is not None and path.read_bytes() == manifest.to_bytes() and not left.exists()
    for node in range(3):
        (folder(rack, node) / "manifest.json").write_bytes(b"{")
    with pytest.raises(VerificationFailed, match=r"node01: .*the manifest cannot be read"):
        stage(rack, RUN, home, Candidate(STEP, True, None, 1, attempt=1), spec(NODES[:2]), print)  # type: ignore[arg-type]


def test_ranges_are_no_shard_to_anybody(rack: LocalBackend, home: Path, tmp_path: Path) -> None:
    write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    put(rack, home, NODES[:2])
    shutil.rmtree(folder(rack, 2))
    assert found(rack, home).whole, "node02 has all of node03's"
    (folder(rack, 1) / "rank-00001.safetensors").unlink()
    lost = found(rack, home)
    assert lost.state == "damaged" and lost.problem == "rank 1's shard is missing on node02"
    with pytest.raises(VerificationFailed, match="rank 1's shard is missing"):
        collect(rack, RUN, home, str(STEP), None)  # type: ignore[arg-type]
    asked = {"run_dir": str(folder(rack, 0).parents[1]), "checkpoint": STEP}
    offered = rack.call(rack.places()[0], "inventory", asked)["checkpoint"]
    assert [row["path"] for row in offered["files"]] == ["manifest.json", "rank-00000.safetensors"]
    # At home, where somebody copied the folders: what is there in ranges is missing.
    at_home = home / "checkpoints" / f"step-{STEP:08d}"
    shutil.copytree(folder(rack, 0), at_home)
    shutil.copy(folder(rack, 1) / "rank-00002.safetensors", at_home)
    assert [p.what for p in verify(at_home).shards] == ["is missing"]
    # A whole shard that comes makes ranges of it needless, and a checkpoint that is deleted goes with all it has.
    shutil.copy(kept / "rank-00001.safetensors", folder(rack, 1))
    put(rack, home, ["node01"], attempt=3)
    assert names(rack, 0) == ["manifest.json", *(f"rank-{r:05d}.safetensors" for r in range(3))]
    put(rack, home, ["node01", "node02", "node03", "node04"], attempt=4)
    assert "rank-00000.ranges" in names(rack, 1)
    assert remove_checkpoint(str(folder(rack, 1)))[1] == [] and not folder(rack, 1).exists()


@pytest.mark.full
def test_what_is_uncertain_moves_whole(rack: LocalBackend, home: Path, tmp_path: Path) -> None:
    """At stage 0 everybody reads all; with other units, or where nobody says what was trained, who knows."""
    write_shards(rack, NODES)
    said, _ = put(rack, home, NODES[:2], zero=Zero(0, bucket_bytes=BUCKET))
    assert said is not None and "ranges" not in said
    for node in (0, 1):
        for file in folder(rack, node).glob("rank-*"):
            if file.name != f"rank-{node:05d}.safetensors":
                file.unlink()
    for node in range(3):
        Path(RunFolder.at(rack.places()[node].runs, RUN).attempt(1).launch).write_text("{}")
    said, _ = put(rack, home, NODES[:2])
    assert said is not None and "ranges" not in said


@pytest.mark.full
def test_a_reader_that_finds_ranges_wrong_says_so_and_the_next_resume_mends_it(
    rack: LocalBackend, home: Path, tmp_path: Path
) -> None:
    manifest = write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    put(rack, home, NODES[:2])
    path = folder(rack, 0) / "rank-00001.ranges"
    (row,) = held_in(str(path.parent))["ranges"]
    outside = next(stop for _, stop in row["ranges"])
    flip(path, 50)
    with pytest.raises(VerificationFailed, match=r"ranges of it are no use.*is damaged"):
        shardfile.Reader(path.parent, manifest.shards[1])
    assert not path.exists()
    put(rack, home, NODES[:2])
    reads_right(rack, manifest, [0, 1], kept)
    with (
        shardfile.Reader(path.parent, manifest.shards[1]) as reader,
        pytest.raises(VerificationFailed, match=f"has not byte {outside} of rank 1's shard, which this rank reads"),
    ):
        reader.read(outside - 1, outside + 1)
    said, _ = put(rack, home, NODES[:2])
    assert said is not None and "node01 (1 shard, " in said
    assert names(rack, 0) == ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


@pytest.mark.full
def test_a_node_that_cannot_cut_sends_the_shard_home(
    rack: LocalBackend, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    rack.apart = True
    real = rack.serve

    def serve(place: Any, request: Any) -> Any:
        return real(place, {**request, "shard": {"file": "nothing"}} if "ranges" in request else request)

    monkeypatch.setattr(rack, "serve", serve)
    said, notices = put(rack, home, NODES[:2])
    assert said is not None and "node01 (ranges of 1 shard, " in said
    (told,) = [line for line in notices if "no ranges from node02" in line]
    assert told.endswith("1 shard (5.6 MiB) come here first")
    assert names(rack, 0) == ["manifest.json", "rank-00000.safetensors", "rank-00001.ranges"]
    reads_right(rack, manifest, [0, 1], kept)


@pytest.mark.full
def test_every_disk_is_lost_and_home_has_it(rack: LocalBackend, home: Path, tmp_path: Path) -> None:
    manifest = write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    collect(rack, RUN, home, "newest", None)  # type: ignore[arg-type]
    for node in range(3):
        shutil.rmtree(folder(rack, node).parents[1])
    answers = [{"checkpoints": [], "attempts": {}}]
    assert candidates(answers, home) == []
    (chosen,) = candidates(answers, home, sends_back=True)
    assert chosen.at_home and chosen.sentence() == "step 100: whole at home"
    notices: list[str] = []
    said = stage(rack, RUN, home, chosen, spec(NODES[:2]), notices.append)  # type: ignore[arg-type]
    assert said is not None and "node01 (1 shard, 5.6 MiB and ranges of 1 shard, " in said
    assert "node02 (2 shards, 11.2 MiB, from here)" in said
    assert not any("come here first" in line for line in notices)
    reads_right(rack, manifest, [0, 1], kept)


_SLOW_PULL = """
import json, sys, time
from launcher.agent import pull
def stuck(*_):
    print("arrived", flush=True)
    time.sleep(60)
pull.join = stuck
pull.pull(json.load(sys.stdin))
"""


@pytest.mark.full
def test_a_killed_move_leaves_nothing_that_counts(rack: LocalBackend, home: Path, tmp_path: Path) -> None:
    manifest = write_shards(rack, NODES)
    kept = keep_all(rack, tmp_path)
    server: dict[str, Any] = {"run_dir": str(folder(rack, 1).parents[1]), "token": "token", "node": "localhost"}
    server.update(address="127.0.0.1", others=[], ports=None, python=None)
    with rack.serve(rack.places()[1], server) as stream:
        said = json.loads(next(iter(stream)).split(b"\n")[0])
        shard = to_plain(manifest.shards[1])
        source = {"addresses": ["127.0.0.1"], "port": said["port"], "shards": [], "ranges": [
            {"shard": shard, "ranges": [[0, 2_000_000]]}]}  # fmt: skip
        asked = {"run_dir": str(folder(rack, 0).parents[1]), "step": STEP, "token": "token", "python": None}
        pulling = subprocess.Popen(
            [AGENT_PYTHON, "-c", _SLOW_PULL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        assert pulling.stdin is not None and pulling.stdout is not None
        pulling.stdin.write(json.dumps({**asked, "sources": [source]}).encode())
        pulling.stdin.close()
        assert pulling.stdout.readline() == b"arrived\n"
        pulling.send_signal(signal.SIGKILL)
        pulling.wait()
        pulling.stdout.close()
    assert (folder(rack, 0).parent / ".incoming-00000100" / "rank-00001.ranges").exists()
    assert names(rack, 0) == ["manifest.json", "rank-00000.safetensors"]
    assert found(rack, home).whole
    put(rack, home, NODES[:2])
    assert names(rack, 0) == ["manifest.json", "rank-00000.safetensors", "rank-00001.ranges"]
    assert [p.name for p in folder(rack, 0).parent.iterdir()] == ["step-00000100"]
    reads_right(rack, manifest, [0, 1], kept)
