"""Bringing runs home from real folders by real verbs: damage, cuts, hostile names, no space, reruns."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from local_places import LocalBackend, LocalTransport, local_backend
from written import flip, launch, write_checkpoint, write_run

from launcher.backends.protocol import Place
from launcher.checkpoints import Candidate, Collected, candidates, collect, needed_shards, relayout, stage, verify
from launcher.contract.errors import NoSpace, PartialAnswer, Refused, Unreachable, UsageError, VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.manifest import BLOCK_BYTES
from launcher.runs.locks import hold

NODES = ["node01", "node02"]
RUN = "job-1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / RUN
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "events.jsonl").write_text("")
    return folder


@pytest.fixture
def two(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "cluster", NODES)
    write_run(backend.places(), NODES)
    return backend


@pytest.fixture
def shared(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "cluster", [None])
    write_run(backend.places(), NODES)
    return backend


def transport(backend: LocalBackend, index: int = 0) -> LocalTransport:
    found = backend.places()[index].transport
    assert isinstance(found, LocalTransport)
    return found


def bring(backend: LocalBackend, home: Path, checkpoint: str = "newest", progress: Any = None) -> Collected:
    return collect(backend, RUN, home, checkpoint, progress)  # type: ignore[arg-type]


def checkpoint_of(backend: LocalBackend, step: int, index: int = 0) -> Path:
    return Path(RunFolder.at(backend.places()[index].runs, RUN).checkpoint(step).root)


@pytest.mark.parametrize("nodes", [[None], NODES])
def test_everything_comes_home_once(tmp_path: Path, home: Path, nodes: list[str | None]) -> None:
    backend = local_backend(tmp_path / "cluster", nodes)
    write_run(backend.places(), NODES)
    write_checkpoint(backend.places(), NODES, 100)
    write_checkpoint(backend.places(), NODES, 200)
    seen: list[tuple[int, int]] = []
    got = bring(backend, home, progress=lambda done, total: seen.append((done, total)))
    assert got.step == 200 and got.verified_shards == 4 and not got.note
    assert verify(home / "checkpoints" / "step-00000200").ok
    assert sorted(p.name for p in (home / "checkpoints").iterdir()) == ["step-00000200"]
    for rank in range(4):
        assert (home / f"attempts/1/logs/rank-{rank:05d}.log").read_text() == f"line of rank {rank}\n" * 100
        assert (home / f"attempts/1/metrics/rank-{rank:05d}.jsonl").exists()
    assert {p.name for p in (home / "attempts/1/nodes").iterdir()} == {"node01.json", "node02.json"}
    assert seen[0] == (0, got.moved_bytes) and seen[-1][0] >= got.moved_bytes
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    # Again: nothing; a record is known by its digest, whatever its time.
    moved = {p.transport.name: len(p.transport.fetched) for p in backend.places()}  # type: ignore[attr-defined]
    again = bring(backend, home)
    assert (again.moved_files, again.moved_bytes) == (0, 0) and again.here_files >= 15
    fetched = [f for p in backend.places() for f in p.transport.fetched[moved[p.transport.name] :]]  # type: ignore[attr-defined]
    assert set(fetched) == {"manifest.json"}, "looked at, to know that it is the same"
    record = Path(RunFolder.at(backend.places()[0].runs, RUN).attempt(1).node_record("node01"))
    record.write_bytes(record.read_bytes().replace(b"node01", b"node99"))  # rewritten at the same size
    assert bring(backend, home, "none").moved_files == 1
    # A log that grew comes again.
    place = backend.places()[0]
    with Path(RunFolder.at(place.runs, RUN).attempt(1).log(0)).open("a") as file:
        file.write("more\n")
    assert bring(backend, home, "none").step is None
    assert (home / "attempts/1/logs/rank-00000.log").read_text().endswith("more\n")


def test_a_flipped_bit_on_the_way_is_brought_again(shared: LocalBackend, home: Path, monkeypatch: Any) -> None:
    write_checkpoint(shared.places(), NODES, 100)
    whole = LocalTransport.fetch
    times = 0

    def damaged(self: LocalTransport, files: Any, source: str, target: Path, *, progress: Any = None) -> None:
        nonlocal times
        whole(self, files, source, target, progress=progress)
        if "rank-00002.safetensors" in files:
            times += 1
            if times == 1:
                flip(target / "rank-00002.safetensors", 12_345)

    monkeypatch.setattr(LocalTransport, "fetch", damaged)
    assert bring(shared, home).verified_shards == 4 and times == 2
    assert verify(home / "checkpoints" / "step-00000100").ok


def test_a_flipped_bit_on_the_node_is_named_by_rank_file_and_block(shared: LocalBackend, home: Path) -> None:
    write_checkpoint(shared.places(), NODES[:1], 100, size=BLOCK_BYTES + 5)
    flip(checkpoint_of(shared, 100) / "rank-00001.safetensors", BLOCK_BYTES + 1)
    with pytest.raises(
        VerificationFailed, match=r"rank 1's shard rank-00001\.safetensors \(from node01\): block 1 of 2"
    ):
        bring(shared, home)
    folder = home / "checkpoints" / "step-00000100"
    assert not (folder / "manifest.json").exists(), "what is not proven is no checkpoint"
    assert (folder / "rank-00000.safetensors").exists() and not (folder / "rank-00001.safetensors").exists()
    assert (home / "attempts/1/logs/rank-00000.log").exists()


def test_two_collects_at_once_do_not_meet(shared: LocalBackend, home: Path) -> None:
    with hold(home / ".collecting"), pytest.raises(UsageError, match="by another command"):
        bring(shared, home)
    assert bring(shared, home, "none").moved_files


def test_an_interrupted_collect_goes_on(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    transport(two, 1).cut_after = 90_000
    with pytest.raises(Unreachable, match="connection lost"):
        bring(two, home)
    assert not (home / "checkpoints/step-00000100/manifest.json").exists()
    arrived = set(transport(two, 1).fetched)
    assert "rank-00002.safetensors" in arrived and "rank-00003.safetensors" not in arrived
    before = [len(transport(two, i).fetched) for i in (0, 1)]
    assert bring(two, home).step == 100
    again = [f for i in (0, 1) for f in transport(two, i).fetched[before[i] :] if f.endswith(".safetensors")]
    assert again == ["rank-00003.safetensors"]


def test_damage_at_home_is_mended_and_until_then_is_no_checkpoint(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    bring(two, home)
    folder = home / "checkpoints/step-00000100"
    flip(folder / "rank-00003.safetensors", 3)
    transport(two, 1).cut_after = 0
    with pytest.raises(Unreachable):
        bring(two, home)
    assert not (folder / "manifest.json").exists()
    assert bring(two, home).moved_bytes < 80_000
    assert verify(folder).ok


def test_which_checkpoint(two: LocalBackend, home: Path) -> None:
    assert bring(two, home).note == "no checkpoint yet"
    write_checkpoint(two.places(), NODES, 100)
    write_checkpoint(two.places(), NODES, 200)
    (checkpoint_of(two, 200, 1) / "rank-00003.safetensors").unlink()
    assert bring(two, home).step == 100
    assert bring(two, home, "100").step == 100
    with pytest.raises(VerificationFailed, match="rank 3's shard is missing on node02"):
        bring(two, home, "200")
    with pytest.raises(UsageError, match="no checkpoint of step 300"):
        bring(two, home, "300")
    with pytest.raises(UsageError, match="newest, none, or a step"):
        bring(two, home, "latest")


def test_a_node_that_does_not_answer(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    two.down.add("node02")
    with pytest.raises(PartialAnswer, match=r"without a checkpoint: no whole .*node02 did not answer") as told:
        bring(two, home)
    assert told.value.hint is not None and f"zerun collect {RUN} again" in told.value.hint
    assert (home / "attempts/1/logs/rank-00000.log").exists()
    write_checkpoint(two.places()[:1], NODES[:1], 200, attempt=2)  # a later attempt did without it
    with pytest.raises(
        PartialAnswer, match=r"checkpoint of step 200 whole \(2 shards verified\); node02 did not answer"
    ):
        bring(two, home)
    assert verify(home / "checkpoints/step-00000200").ok
    with pytest.raises(PartialAnswer, match=r"missing on node02.*did not answer"):
        bring(two, home, "100")
    two.down.add("node01")
    with pytest.raises(Unreachable, match="no route"):
        bring(two, home)


def test_sizes_are_looked_at_before_anything_moves(shared: LocalBackend, home: Path, monkeypatch: Any) -> None:
    write_checkpoint(shared.places(), NODES, 100)
    real = shutil.disk_usage(home)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=64 * 2**20 + 200_000))
    with pytest.raises(NoSpace, match="are to come"):
        bring(shared, home)
    assert transport(shared).fetched == ["manifest.json"]
    assert bring(shared, home, "none").step is None


@pytest.mark.parametrize(
    "name",
    [
        "../../../.ssh/authorized_keys",
        "/etc/passwd",
        "attempts/1/logs/../../../x",
        "events.jsonl",
        "run.json",
        "attempts/1/logs/-rf",
        "attempts/1/logs/a\nb",
        "attempts/1/deep/er/x",
        "attempts/0/launch.json",
        "",
    ],
)
def test_hostile_names_are_refused(shared: LocalBackend, home: Path, monkeypatch: Any, name: str) -> None:
    real = shared.call

    def hostile(place: Place, verb: str, request: Mapping[str, Any], *, timeout_s: float = 60.0) -> Mapping[str, Any]:
        answer = json.loads(json.dumps(real(place, verb, request)))
        if verb == "inventory":
            answer["files"].append({"path": name, "bytes": 3})
        return dict(answer)

    monkeypatch.setattr(shared, "call", hostile)
    with pytest.raises(Refused, match="no file of a run"):
        bring(shared, home)
    assert transport(shared).fetched == []


def test_a_step_rewritten_by_fewer_ranks_is_exactly_that(shared: LocalBackend, home: Path) -> None:
    write_checkpoint(shared.places(), NODES, 100)
    bring(shared, home)
    folder = home / "checkpoints/step-00000100"
    assert len(list(folder.iterdir())) == 5
    shutil.rmtree(checkpoint_of(shared, 100))
    write_checkpoint(shared.places(), NODES[:1], 100, attempt=2)
    assert bring(shared, home).verified_shards == 2
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", *(f"rank-{r:05d}.safetensors" for r in (0, 1))]
    assert verify(folder).ok


def test_links_and_hostile_shards(shared: LocalBackend, home: Path, tmp_path: Path) -> None:
    # The inventory itself offers neither links nor foreign files.
    folder = Path(RunFolder.at(shared.places()[0].runs, RUN).attempt(1).logs)
    os.symlink("/etc/passwd", folder / "rank-00009.log")
    (folder / ".rank-00000.log.1.part").write_text("half")
    (folder / "two words").write_text("x")
    bring(shared, home)
    names = {p.name for p in (home / "attempts/1/logs").iterdir()}
    assert names == {f"rank-{r:05d}.log" for r in range(4)}
    # A link at home that leads out is not followed.
    shutil.rmtree(home / "attempts/1/logs")
    outside = tmp_path / "outside"
    outside.mkdir()
    os.symlink(outside, home / "attempts/1/logs")
    with pytest.raises(Refused, match="symbolic link"):
        bring(shared, home)
    assert list(outside.iterdir()) == []


def test_the_laptop_cluster_only_verifies(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, [None])
    write_run(backend.places(), ["node01"])
    write_checkpoint(backend.places(), ["node01"], 100)
    home = Path(RunFolder.at(backend.places()[0].runs, RUN).root)
    got = bring(backend, home)
    assert got.moved_files == 0 and got.verified_shards == 2 and "nothing had to move" in got.note
    assert transport(backend).fetched == []
    flip(checkpoint_of(backend, 100) / "rank-00001.safetensors", 9)
    with pytest.raises(VerificationFailed, match="rank 1"):
        bring(backend, home)


# --- staging ------------------------------------------------------------------------------------------


def found(backend: LocalBackend, home: Path) -> Candidate:
    answers = []
    for place in backend.places():
        if place.transport.name not in backend.down:
            folder = str(RunFolder.at(place.runs, RUN).root)
            answers.append(backend.call(place, "state", {"run_dirs": [folder], "attempt": None})["runs"][folder])
    return candidates(answers, home)[-1]


def put(backend: LocalBackend, home: Path, nodes: list[str], slots: int = 2) -> tuple[str | None, list[str]]:
    notices: list[str] = []
    spec = launch("/x", nodes, slots, shared=False, attempt=2)
    said = stage(backend, RUN, home, found(backend, home), spec, notices.append)  # type: ignore[arg-type]
    return said, notices


def test_which_shards_new_ranks_need() -> None:
    from written import layout

    old = layout(4)
    assert needed_shards(old, relayout(old, 4), [2]) == {2}
    assert needed_shards(old, relayout(old, 4), [2], buffers=True) == {0, 2}
    assert needed_shards(old, relayout(old, 4), [2], stage=0) == {0, 1, 2, 3}
    assert needed_shards(old, relayout(old, 1), [0]) == {0, 1, 2, 3}
    assert relayout(old, 2, 4000) == layout(2)


def test_the_same_nodes_need_nothing(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    assert put(two, home, NODES) == (None, [])


@pytest.mark.parametrize("apart", [False, True], ids=["by themselves", "by way of home"])
def test_another_node_gets_what_it_needs(tmp_path: Path, home: Path, apart: bool) -> None:
    backend = local_backend(tmp_path / "cluster", ["node01", "node02", "node03"])
    write_run(backend.places()[:2], NODES)
    write_checkpoint(backend.places()[:2], NODES, 100)
    backend.apart = apart
    said, notices = put(backend, home, ["node01", "node03"])
    assert said is not None and "node03 (2 shards" in said and "node01" not in said
    assert notices[0].startswith("step 100, from node to node: 2 shards (") and "node02 → node03" in notices[0]
    assert any("come here first" in n for n in notices) is apart and ("from here" in said) is apart
    if not apart:
        assert not (home / "checkpoints").exists() or not list((home / "checkpoints").rglob("*.safetensors"))
    new = checkpoint_of(backend, 100, 2)
    assert sorted(p.name for p in new.iterdir()) == [
        "manifest.json",
        "rank-00002.safetensors",
        "rank-00003.safetensors",
    ]
    assert (new / "manifest.json").read_bytes() == (checkpoint_of(backend, 100) / "manifest.json").read_bytes()
    assert not (home / "checkpoints/step-00000100/manifest.json").exists(), "parts at home are no checkpoint"
    assert put(backend, home, ["node01", "node03"]) == (None, [])
    # Fewer ranks read more: node03 alone needs all.
    said, _ = put(backend, home, ["node03"], slots=1)
    assert said is not None and verify(new).ok


def test_home_serves_when_the_node_has_left(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    bring(two, home)
    two.down.add("node02")
    said, notices = put(two, home, ["node01"])
    assert said is not None and "node01 (2 shards" in said and not any("come here first" in n for n in notices)
    assert verify(checkpoint_of(two, 100)).ok


def test_what_is_nowhere_is_named(two: LocalBackend, home: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    chosen = found(two, home)
    spec = launch("/x", ["node01"], 2, shared=False)
    two.down.add("node02")
    with pytest.raises(PartialAnswer, match=r"rank 2's shard of node02.*node02 did not answer"):
        stage(two, RUN, home, chosen, spec, print)  # type: ignore[arg-type]
    two.down.clear()
    (checkpoint_of(two, 100, 1) / "rank-00003.safetensors").unlink()
    with pytest.raises(VerificationFailed, match="rank 3's shard"):
        stage(two, RUN, home, chosen, spec, print)  # type: ignore[arg-type]
    with pytest.raises(Unreachable, match="node09"):
        stage(two, RUN, home, chosen, launch("/x", ["node09"], 2, shared=False), print)  # type: ignore[arg-type]
