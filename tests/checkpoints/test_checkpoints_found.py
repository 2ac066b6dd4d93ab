from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from local_places import LocalBackend, Log, attempt_at, local_backend, own_process, write_record
from written import flip, launch, write_checkpoint, write_run

from launcher.app.ends import Ends
from launcher.app.starts import refuse_what_trains_nothing
from launcher.checkpoints import candidates, choose, explain, local_steps, newest_whole, send_back, verify
from launcher.checkpoints.found import Candidate
from launcher.checkpoints.prune import decide
from launcher.contract.errors import UsageError, VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.manifest import BLOCK_BYTES
from launcher.contract.plain import write_atomically
from launcher.contract.records import RankRecord
from launcher.runs import RunState
from launcher.specs.models import Job

NODES = ["node01", "node02"]


@pytest.fixture
def two(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path, NODES)
    write_run(backend.places(), NODES)
    return backend


def state(backend: LocalBackend) -> list[dict[str, Any]]:
    answers = []
    for place in backend.places():
        folder = str(RunFolder.at(place.runs, "job-1").root)
        answers.append(backend.call(place, "state", {"run_dirs": [folder], "attempt": None})["runs"][folder])
    return answers


@pytest.mark.parametrize(
    ("step", "state", "told", "refused"),
    [
        (80, "cancelled", False, "of step 80, past the job's 50 steps"),
        (50, "done", False, "of step 50, the job's last step"),
        (50, "failed", True, "of step 50, the job's last step"),
        (50, "failed", False, None),  # cut between its last checkpoint and its end: that is still to do
        (49, "done", True, None),
    ],
)
def test_a_resume_that_would_train_nothing_is_refused(step: int, state: str, told: bool, refused: str | None) -> None:
    job = Job.model_construct(steps=50)
    of_run: Any = RunState("job-1", "job", "c", state, 1)  # type: ignore[arg-type]
    if refused is None:
        refuse_what_trains_nothing(of_run, job, Candidate(step, True), told=told)
        return
    with pytest.raises(UsageError, match=refused) as problem:
        refuse_what_trains_nothing(of_run, job, Candidate(step, True), told=told)
    assert f"N above {step}" in str(problem.value.hint)
    refuse_what_trains_nothing(of_run, job, Candidate(step, True, name="code/out/step-80"), told=told)


def listed(backend: LocalBackend, home: Path) -> list[Candidate]:
    """What ``ckpt ls`` gets, with the cluster's answers in place of a run's own cluster."""
    attempts = SimpleNamespace(open_for=lambda _: SimpleNamespace(close=lambda: None))
    app: Any = SimpleNamespace(
        store=SimpleNamespace(load=lambda _: SimpleNamespace(folder=home)),
        resolve=lambda given: given,
        attempts=attempts,
        _about=lambda *_: state(backend),
    )
    return Ends.checkpoints(app, "job-1")


def shard(backend: LocalBackend, node: int, step: int, rank: int) -> Path:
    return Path(RunFolder.at(backend.places()[node].runs, "job-1").checkpoint(step).shard(rank))


def test_the_newest_whole_one_is_taken_and_the_others_are_explained(two: LocalBackend) -> None:
    for step in (200, 250, 300, 350):
        write_checkpoint(two.places(), NODES, step)
    shard(two, 1, 300, 3).unlink()
    for node in (0, 1):
        (shard(two, node, 350, 0).parent / "manifest.json").unlink()
    found = candidates(state(two))
    assert [(c.step, c.whole) for c in found] == [(200, True), (250, True), (300, False), (350, False)]
    taken = choose(found)
    assert taken == newest_whole(found) and taken.step == 250 and taken.where == ("node01", "node02")
    assert taken.bytes == sum(70_000 + r for r in range(4)) and taken.ranks == 4
    assert explain(found, taken) == [
        "step 350: no manifest: it was never finished",
        "step 300: rank 3's shard is missing on node02",
        "step 250: whole, taken",
    ]
    assert explain(found, choose(found, 200))[2:] == [
        "step 250: whole, but step 200 was asked for",
        "step 200: whole, taken",
    ]
    with pytest.raises(VerificationFailed, match="rank 3's shard is missing on node02"):
        choose(found, 300)
    with pytest.raises(UsageError, match="no checkpoint of step 7"):
        choose(found, 7)
    with pytest.raises(UsageError, match="no checkpoint yet"):
        choose([])


def test_a_short_shard_and_a_manifest_on_one_node_only(two: LocalBackend) -> None:
    write_checkpoint(two.places(), NODES, 100)
    (shard(two, 1, 100, 2).parent / "manifest.json").unlink()
    assert candidates(state(two))[0].whole, "the manifest is enough on any node"
    with shard(two, 1, 100, 2).open("r+b") as file:
        file.truncate(5)
    assert candidates(state(two))[0].problem == "rank 2's shard on node02 has 5 bytes of 70002"


def test_a_node_sees_only_its_own_part_as_missing(two: LocalBackend) -> None:
    write_checkpoint(two.places(), NODES, 100)
    first, second = (answer["checkpoints"][0] for answer in state(two))
    assert first["whole"] and second["whole"]
    assert first["shards_here"] == [0, 1] and second["shards_here"] == [2, 3]
    shard(two, 0, 100, 1).unlink()
    first, second = (answer["checkpoints"][0] for answer in state(two))
    assert first["problem"] == "rank 1's shard is missing on node01" and second["whole"]


def test_shards_at_home_count_when_a_node_has_left(two: LocalBackend, tmp_path: Path) -> None:
    write_checkpoint(two.places(), NODES, 100)
    home = tmp_path / "home" / "job-1"
    shutil.copytree(shard(two, 1, 100, 2).parent, home / "checkpoints" / "step-00000100")
    answers = state(two)[:1]
    assert not candidates(answers)[0].whole
    assert candidates(answers, home)[0].whole
    assert local_steps(home) == [100] and local_steps(tmp_path) == []


def test_a_step_written_again_by_a_later_attempt(two: LocalBackend) -> None:
    write_checkpoint(two.places(), NODES, 100, attempt=1)
    write_checkpoint(two.places()[:1], NODES[:1], 100, size=999, attempt=2)
    found = candidates(state(two))[0]
    assert found.whole and found.attempt == 2 and found.ranks == 2
    shard(two, 0, 100, 1).unlink()
    assert not candidates(state(two))[0].whole


def test_damaged_manifests_are_told_not_raised(two: LocalBackend) -> None:
    write_checkpoint(two.places()[:1], NODES[:1], 100)
    path = shard(two, 0, 100, 0).parent / "manifest.json"
    for damage in (
        b"",
        b"{",
        b"[]",
        b"[" * 200_000,
        b'{"step":100,"shards":[{}],"attempt":1}',
        b'{"step":100,"shards":[{"rank":1e999}],"attempt":1}',
        path.read_bytes().replace(b"100", b"101"),
    ):
        path.write_bytes(damage)
        assert "manifest" in candidates(state(two))[0].problem
        # At home it is still the newest: what is damaged is told of, and no older one is verified in its place.
        assert local_steps(path.parents[2]) == [100]
        assert not verify(path.parent).ok


def test_state_tells_failed_ranks_last_lines_and_who_lives(two: LocalBackend) -> None:
    place = two.places()[0]
    folder = attempt_at(place, "job-1", 2)
    ranks = [
        RankRecord(0, 0, 1, 1.0, 2.0, 1.0, exit_code=1),
        RankRecord(1, 1, 2, 1.0, 2.0, 1.0, signal=15, stopped_by_us=True),
    ]
    write_record(folder, "node01", ranks, "running")
    traceback = [
        b"Traceback (most recent call last):",
        *(b"  frame %d" % n for n in range(40)),
        b"ValueError: \xff bad",
    ]
    Log(folder, 0).write(b"\n".join([b"early"] * 5000 + [b"1%\r99%"] * 5 + traceback) + b"\n")
    Log(folder, 1).write(b"stopped\n")
    answer = state(two)[0]["attempts"]["2"]
    assert list(answer["last_lines"]) == ["0"]
    assert answer["last_lines"]["0"][0] == "Traceback (most recent call last):"
    assert answer["last_lines"]["0"][-1] == "ValueError: \ufffd bad"
    assert answer["records"][0]["alive"] is True and answer["outcome"] is None and answer["claimed"] is False

    # A pid that was used again, another machine, another boot, no process any more.
    path = Path(folder.node_record("node01"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    cases: list[tuple[dict[str, Any], str, bool | None]] = [
        ({"started_ticks": 1}, os.uname().nodename, False),
        ({}, "elsewhere", None),
        ({"boot": "another"}, os.uname().nodename, False),
        ({"pid": gone.pid}, os.uname().nodename, False),
    ]
    for change, host, expected in cases:
        record = json.loads(path.read_text())
        record["agent"] = {**vars(own_process()), **change}
        record["host"] = host
        write_atomically(path, json.dumps(record).encode())
        assert state(two)[0]["attempts"]["2"]["records"][0]["alive"] is expected
    path.write_text("{")
    assert state(two)[0]["attempts"]["2"]["problems"]


def test_verify_names_rank_file_and_block(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, [None])
    write_run(backend.places(), ["node01"])
    manifest = write_checkpoint(backend.places(), ["node01"], 50, size=2 * BLOCK_BYTES + 1000)
    folder = shard(backend, 0, 50, 0).parent
    report = verify(folder)
    assert report.ok and report.step == 50 and report.num_shards == 2 and report.bytes == manifest.bytes
    flip(folder / "rank-00001.safetensors", BLOCK_BYTES + 7)
    report = verify(folder)
    assert [(p.rank, p.file, p.blocks) for p in report.shards] == [(1, "rank-00001.safetensors", (1,))]
    with pytest.raises(VerificationFailed, match=r"rank 1's shard rank-00001\.safetensors .*block 1 of 3"):
        report.require()
    (folder / "rank-00000.safetensors").unlink()
    (folder / "rank-00000.safetensors").symlink_to(folder / "rank-00001.safetensors")
    assert "no plain file" in verify(folder).problems[0]
    (folder / "rank-00000.safetensors").unlink()
    assert "is missing" in verify(folder).problems[0]


def test_manifests_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    backend = local_backend(tmp_path, [None])
    manifest = write_checkpoint(backend.places(), ["node01"], 50)
    folder = shard(backend, 0, 50, 0).parent
    one, two = manifest.shards
    for wrong, said in [
        (replace(manifest, step=51), "of step 51"),
        (replace(manifest, shards=(one,)), "each of 2 ranks"),
        (replace(manifest, layout=replace(manifest.layout, ranks=10**15)), "each of 1000000000000000 ranks"),
        (replace(manifest, shards=(one, replace(two, file="../../../etc/passwd"))), "passwd"),
        (replace(manifest, shards=(one, replace(two, blocks=()))), "0 digests"),
        (replace(manifest, format=2), "format 2"),
    ]:
        (folder / "manifest.json").write_bytes(wrong.to_bytes())
        report = verify(folder)
        assert not report.ok and said in report.problems[0]
    (folder / "manifest.json").unlink()
    assert "no manifest" in verify(folder).problems[0]


def test_many_that_were_passed_over_are_counted_and_not_listed() -> None:
    found = [Candidate(step, True) for step in range(20, 2020, 20)]
    assert explain(found, choose(found, 20)) == [
        "99 whole ones between step 40 and 2000, but step 20 was asked for",
        "step 20: whole, taken",
    ]
    with pytest.raises(UsageError) as told:
        choose(found, 21)
    assert told.value.hint == "whole ones: 90 older ones, " + ", ".join(str(s) for s in range(1820, 2020, 20))


def test_what_only_nodes_have_that_were_left_out_was_let_go_and_is_not_damaged(two: LocalBackend) -> None:
    """After a resume on fewer nodes ``keep`` deletes where the attempt runs, and nowhere else."""
    write_checkpoint(two.places(), NODES, 100)
    write_checkpoint(two.places(), NODES, 150)
    attempt_at(two.places()[0], "job-1", 2)
    assert [c.state for c in candidates(state(two))] == ["whole", "whole"]
    shutil.rmtree(shard(two, 0, 100, 0).parent)
    shard(two, 0, 150, 0).unlink()
    write_checkpoint(two.places()[:1], NODES[:1], 200, attempt=2)
    first, second, third = candidates(state(two))
    assert (first.state, second.state, third.state) == ("let go", "damaged", "whole")
    assert first.problem.startswith("only nodes that attempt 2 left out still have parts of it; zerun ckpt prune")
    gone = decide("job-1", "", [first, second, third], keep=1, pinned=frozenset(), alive=False).gone
    assert first in gone


def test_what_a_shared_disk_has_lost_is_sent_back_from_home(tmp_path: Path) -> None:
    backend = local_backend(tmp_path / "cluster", [None])
    write_run(backend.places(), NODES)
    write_checkpoint(backend.places(), NODES, 100)
    manifest = write_checkpoint(backend.places(), NODES, 200)
    there, home = shard(backend, 0, 200, 0).parent, tmp_path / "home" / "job-1"
    shutil.copytree(there, home / "checkpoints" / there.name)
    shutil.copytree(there.parents[1] / "attempts", home / "attempts")
    assert choose(candidates(state(backend), home, sends_back=True)) == choose(candidates(state(backend)))

    shard(backend, 0, 200, 3).unlink()
    assert choose(candidates(state(backend), home)).step == 100, "what is at home is none of the ranks'"
    chosen = choose(candidates(state(backend), home, sends_back=True))
    assert chosen.step == 200 and chosen.at_home and chosen.sentence() == "step 200: whole at home"
    assert [(c.step, c.at_home) for c in listed(backend, home)] == [(100, False), (200, True)], "as the resume says"
    spec, told = launch("/x", NODES, 2, shared=True), list[str]()
    said = send_back(backend, "job-1", home, chosen, spec, told.append)  # type: ignore[arg-type]
    assert told == ["step 200, which is whole here and not on the cluster: 1 shard (68.4 KiB) go to shared"]
    assert said == "step 200 was sent back from here: 1 shard (68.4 KiB)"
    assert verify(there).ok and choose(candidates(state(backend))).step == 200

    # All of it is gone, and the run's folder with it; at home a bit has flipped: nothing is sent.
    shutil.rmtree(there.parents[1])
    (chosen,) = candidates(state(backend), home, sends_back=True)
    assert chosen.at_home and chosen.bytes == manifest.bytes
    flip(home / "checkpoints" / there.name / "rank-00002.safetensors", 9)
    with pytest.raises(VerificationFailed, match="rank 2's shard"):
        send_back(backend, "job-1", home, chosen, spec, told.append)  # type: ignore[arg-type]
    assert not there.exists()
    flip(home / "checkpoints" / there.name / "rank-00002.safetensors", 9)
    assert send_back(backend, "job-1", home, chosen, spec, told.append)  # type: ignore[arg-type]
    assert verify(there).ok
