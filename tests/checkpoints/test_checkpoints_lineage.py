"""What is newest: the line that a run is on, what was found damaged, what a cleaner has purged."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from local_places import LocalBackend, attempt_at, local_backend, write_record
from written import flip, launch, write_checkpoint, write_run

from launcher.agent.claim import newest_whole as claimed
from launcher.agent.inventory import inventory
from launcher.checkpoints import Candidate, candidates, choose, explain, newest_whole, verify
from launcher.contract.errors import VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.lineage import left_behind, resumed_from, why_left
from launcher.contract.plain import dumps, write_atomically

NODES = ["node01", "node02"]


@pytest.mark.parametrize(
    ("writers", "resumed", "behind"),
    [
        ({50: 1, 100: 1, 200: 1}, {1: None}, set()),
        ({50: 1, 100: 1, 200: 1}, {1: None, 2: 200}, set()),
        ({50: 1, 100: 1, 200: 1}, {1: None, 2: 50}, {100, 200}),
        ({50: 1, 60: 2, 100: 1, 200: 1}, {1: None, 2: 50}, {100, 200}),
        ({50: 1, 60: 2, 100: 2, 200: 1}, {1: None, 2: 50}, {200}),  # written again
        # Gone back, then on again from what was left behind: that is the line now.
        ({50: 1, 60: 2, 100: 1, 200: 1}, {1: None, 2: 50, 3: 200}, {60}),
        ({50: 1, 60: 2, 100: 1, 200: 1, 250: 3}, {1: None, 2: 50, 3: 200}, {60}),
        ({60: 2, 200: 1}, {1: None, 2: 50}, {200}),  # the source was deleted since
        ({60: 2, 70: 3, 200: 1}, {1: None, 2: 50, 3: 65}, {200}),
        ({50: 1, 60: 2}, {1: None, 2: None}, {50}),  # begun anew
        ({50: 1, 60: 4}, {2: 50}, set()),  # of attempts that nobody knows nothing is left behind
        ({50: 0, 100: 0}, {}, set()),
    ],
)
def test_the_line_is_followed_back_from_the_newest_attempt(
    writers: dict[int, int], resumed: dict[int, int | None], behind: set[int]
) -> None:
    assert left_behind(writers, resumed) == behind


@pytest.fixture
def shared(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "cluster", [None])
    write_run(backend.places(), NODES)
    return backend


def folder_of(backend: LocalBackend) -> Path:
    return Path(RunFolder.at(backend.places()[0].runs, "job-1").root)


def step_of(backend: LocalBackend, step: int) -> Path:
    return folder_of(backend) / "checkpoints" / f"step-{step:08d}"


def found(backend: LocalBackend, home: Path | None = None) -> list[Candidate]:
    folder = str(folder_of(backend))
    answers = [backend.call(p, "state", {"run_dirs": [folder], "attempt": None}) for p in backend.places()]
    return candidates([a["runs"][folder] for a in answers], home)


def resume(backend: LocalBackend, attempt: int, step: int | None, *, begun: bool = True) -> None:
    place = backend.places()[0]
    folder = attempt_at(place, "job-1", attempt)
    spec = launch(str(folder_of(backend)), NODES, 2, shared=True, attempt=attempt)
    write_atomically(str(folder.launch), dumps(replace(spec, resume_step=step)))
    if begun:
        write_record(folder, NODES[0], [0, 1])


def test_a_resume_from_an_earlier_step_leaves_later_ones_behind(shared: LocalBackend) -> None:
    for step in (50, 100, 150):
        write_checkpoint(shared.places(), NODES, step)
    resume(shared, 2, 50, begun=False)
    assert choose(found(shared)).step == 150, "refused before it began: nothing was left behind"
    resume(shared, 2, 50)
    taken = choose(found(shared))
    assert taken.step == 50, "before it has saved anything of its own"
    write_checkpoint(shared.places(), NODES, 60, attempt=2)
    looked = found(shared)
    assert [(c.step, bool(c.left), c.whole) for c in looked] == [
        (50, False, True),
        (60, False, True),
        (100, True, True),
        (150, True, True),
    ]
    assert choose(looked).step == 60 and choose(looked, 150).step == 150
    assert explain(looked, choose(looked)) == [
        "step 150: whole, but left behind: attempt 2 went on from step 50",
        "step 100: whole, but left behind: attempt 2 went on from step 50",
        "step 60: whole, taken",
    ]
    folder = RunFolder.at(shared.places()[0].runs, "job-1")
    assert claimed(folder) == 60, "a requeue, with the laptop away, takes the same"
    assert resumed_from(str(folder.root)) == {1: None, 2: 50} and why_left(9, 1, {1: None, 2: None}).endswith("anew")
    # With nothing whole on the line, what was left behind is better than nothing.
    for step in (50, 60):
        shutil.rmtree(step_of(shared, step))
    assert choose(found(shared)).step == 150 and claimed(folder) == 150
    # Left behind, and written again by the attempt that came by: no longer left behind.
    write_checkpoint(shared.places(), NODES[:1], 100, attempt=2)
    assert choose(found(shared)).step == 100


def test_what_verify_found_damaged_is_not_taken_again(shared: LocalBackend) -> None:
    for step in (50, 100):
        write_checkpoint(shared.places(), NODES, step)
    shard = step_of(shared, 100) / "rank-00002.safetensors"
    flip(shard, 99)
    assert choose(found(shared)).step == 100, "a size says nothing of bits"
    assert not verify(step_of(shared, 100)).ok
    damaged = found(shared)[1]
    assert (damaged.state, damaged.whole) == ("damaged", False)
    assert damaged.problem.startswith("rank 2's shard on node02 is damaged: block 0 of 1")
    assert choose(found(shared)).step == 50
    with pytest.raises(VerificationFailed, match=r"step 100: rank 2's shard .* damaged") as refused:
        choose(found(shared), 100)
    assert refused.value.hint == "whole ones: 50"
    offered = inventory({"run_dir": str(folder_of(shared)), "checkpoint": 100})["checkpoint"]["files"]
    assert "rank-00002.safetensors" not in {f["path"] for f in offered}
    # Another file of the same size in its place voids the note, before anyone verified it.
    data = shard.read_bytes()
    beside = shard.with_suffix(".new")
    beside.write_bytes(data)
    os.utime(beside, ns=(shard.stat().st_atime_ns, shard.stat().st_mtime_ns))
    beside.replace(shard)
    assert choose(found(shared)).step == 100
    # Found right, the note goes.
    assert not verify(step_of(shared, 100)).ok
    flip(shard, 99)
    assert verify(step_of(shared, 100)).ok
    assert not list(step_of(shared, 100).glob("damaged-*")) and choose(found(shared)).step == 100


def test_ls_and_verify_agree_about_links(shared: LocalBackend) -> None:
    write_checkpoint(shared.places(), NODES, 100)
    shard = step_of(shared, 100) / "rank-00001.safetensors"
    shard.rename(shard.with_name("kept"))
    shard.symlink_to("kept")
    assert found(shared)[0].problem == "rank 1's shard on node01 is no plain file"
    assert verify(step_of(shared, 100)).problems[0].endswith("is no plain file")


@pytest.mark.parametrize("purge", ["gone", "short", "empty"])
def test_a_purged_shard_makes_it_damaged_even_when_home_has_it(
    shared: LocalBackend, tmp_path: Path, purge: str
) -> None:
    """A scratch cleaner takes files by age: what is left must never be the newest whole one."""
    for step in (50, 100):
        write_checkpoint(shared.places(), NODES, step)
    home = tmp_path / "home" / "job-1"
    shutil.copytree(folder_of(shared), home)
    shard = step_of(shared, 100) / "rank-00003.safetensors"
    if purge == "gone":
        shard.unlink()
    else:
        os.truncate(shard, 70_000 if purge == "short" else 0)
    looked = found(shared, home)
    assert looked[1].state == "damaged" and "rank 3's shard" in looked[1].problem
    newest = newest_whole(looked)
    assert newest is not None and newest.step == 50, "what lies at home is not where the ranks read"
    assert claimed(RunFolder.at(shared.places()[0].runs, "job-1")) == 50
    (step_of(shared, 50) / "manifest.json").unlink()
    assert [c.state for c in found(shared, home)] == ["unfinished", "damaged"] and newest_whole(found(shared)) is None
