"""A program's own checkpoint, in pieces on nodes: every node gets all of it, by real verbs on real folders."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from local_places import LocalBackend, attempt_at, local_backend, write_record
from written import launch

from launcher.agent.handed import place as put_in_place
from launcher.backends.protocol import Place
from launcher.checkpoints import candidates, collect, hand_back
from launcher.checkpoints.found import Candidate
from launcher.contract.errors import PartialAnswer, Refused, UsageError, VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.kept import Foreign
from launcher.contract.launch import LaunchSpec, Program
from launcher.contract.plain import dumps, write_atomically

RUN = "job-1"
NODES = ["node01", "node02", "node03"]
NAME = "code/ck/step-10"
Files = dict[str, bytes]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / RUN
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def rack(tmp_path: Path) -> LocalBackend:
    """Ranks 0 and 1 ran on the first two; each has its own file, the first one what all of them need, and the mark."""
    backend = local_backend(tmp_path / "cluster", NODES)
    ran(backend.places()[0], 1, {"rank-0.pt": b"0" * 5000, "deep/model.pt": b"m" * 900, "DONE": b""})
    ran(backend.places()[1], 1, {"rank-1.pt": b"1" * 5000})
    return backend


def spec(run_dir: str, nodes: list[str], attempt: int) -> LaunchSpec:
    made = launch(run_dir, nodes, 1, shared=False, attempt=attempt)
    more = {"program": Program(("x",)), "foreign": Foreign("ck/*", "DONE"), "resume_from": NAME}
    return replace(made, train=None, **more)  # type: ignore[arg-type]


def run_dir(place: Place) -> Path:
    return Path(RunFolder.at(place.runs, RUN).root)


def ran(place: Place, attempt: int, files: Files) -> None:
    """What a node has after an attempt in which its ranks wrote ``files``. Attempt K began at 1000·K."""
    folder = attempt_at(place, RUN, attempt)
    write_atomically(str(folder.launch), dumps(spec(str(run_dir(place)), NODES[:2], attempt)))
    write_record(folder, str(place.node), [0])
    record = Path(folder.node_record(str(place.node)))
    record.write_text(json.dumps({**json.loads(record.read_text()), "started_at": attempt * 1000.0}))
    for name, data in files.items():
        path = run_dir(place) / NAME / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (attempt * 1000 + 500,) * 2)


def give(rack: LocalBackend, home: Path, nodes: list[str], attempt: int = 2) -> tuple[str | None, list[str]]:
    """Hands back as a resume does, then puts in place as the agents do. Returns what was said."""
    answers = []
    for place in rack.places():
        if place.transport.name not in rack.down:
            request = {"run_dirs": [str(run_dir(place))], "attempt": None}
            answers.append(rack.call(place, "state", request)["runs"][str(run_dir(place))])
    chosen = candidates(answers, home)[-1]
    notices: list[str] = []
    said = hand_back(rack, RUN, home, chosen, spec("/x", nodes, attempt), notices.append)  # type: ignore[arg-type]
    for place in rack.places():
        if place.node in nodes:
            put_in_place(spec(str(run_dir(place)), nodes, attempt))
            assert not (run_dir(place) / ".handed").exists()
    return said, notices


def held(place: Place) -> Files:
    folder = run_dir(place) / NAME
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


WHOLE = {"rank-0.pt": b"0" * 5000, "rank-1.pt": b"1" * 5000, "deep/model.pt": b"m" * 900, "DONE": b""}


@pytest.mark.parametrize(
    "apart",
    [pytest.param(False, id="by themselves"), pytest.param(True, id="by way of home", marks=pytest.mark.full)],
)
def test_every_node_gets_every_file(rack: LocalBackend, home: Path, apart: bool) -> None:
    rack.apart = apart
    said, notices = give(rack, home, NODES[1:])
    assert said == f"{NAME} was handed to node02 (3 files (5.8 KiB)), node03 (4 files (10.6 KiB))"
    assert notices[0] == (
        f"{NAME}, from node to node: 3 files (5.8 KiB) node01 → node02; "
        "3 files (5.8 KiB) node01 → node03; 1 file (4.9 KiB) node02 → node03"
    )
    assert any("come here first" in n for n in notices) is apart
    one, two, three = rack.places()
    assert held(two) == held(three) == WHOLE and "rank-1.pt" not in held(one), "not of the attempt, not moved to"
    assert list(home.iterdir()) == []
    assert give(rack, home, NODES[1:], attempt=3) == (None, [])
    request = {"run_dirs": [str(run_dir(two))], "attempt": None}
    told = rack.call(two, "state", request)["runs"][str(run_dir(two))]
    assert candidates([told, told])[-1].bytes == 10_900, "copies are counted once"
    assert give(rack, home, ["node03"], attempt=3) == (None, [])


def test_a_piece_of_an_earlier_attempt_gives_way_to_the_newest(rack: LocalBackend, home: Path) -> None:
    one, two, three = rack.places()
    ran(one, 2, {"rank-0.pt": b"A" * 5000, "DONE": b""})
    ran(three, 2, {"rank-1.pt": b"B" * 5000})  # step 10 was reached once more, with node03 in node02's place
    collect(rack, RUN, home, "10")  # type: ignore[arg-type]
    assert (home / NAME / "rank-1.pt").read_bytes() == b"B" * 5000, "not the first node's that has one"
    said, _ = give(rack, home, NODES[:2], attempt=3)
    assert said is not None
    assert held(one) == held(two) == {**WHOLE, "rank-0.pt": b"A" * 5000, "rank-1.pt": b"B" * 5000}


def told(rack: LocalBackend, home: Path, places: Sequence[Place]) -> Candidate:
    answers = []
    for place in places:
        folder = str(run_dir(place))
        answers.append(rack.call(place, "state", {"run_dirs": [folder], "attempt": None})["runs"][folder])
    return candidates(answers, home)[-1]


def test_what_an_earlier_attempt_left_does_not_say_that_the_next_one_finished(rack: LocalBackend, home: Path) -> None:
    """Attempt 2 went back, without node01, and was cut while it wrote step 10 once more: node01's DONE is of the first
    attempt's."""
    one, two, three = rack.places()
    assert told(rack, home, (one, two)).whole
    ran(two, 2, {"rank-0.pt": b"A" * 5000})
    ran(three, 2, {"rank-1.pt": b"B" * 700})
    torn = told(rack, home, (one, two, three))
    assert (torn.whole, torn.state) == (False, "unfinished")
    assert torn.problem.startswith("attempt 2 wrote it anew and did not finish") and "of attempt 1" in torn.problem
    with pytest.raises(VerificationFailed, match="attempt 2 wrote it anew"):
        collect(rack, RUN, home, "10")  # type: ignore[arg-type]
    # On one and the same node; and whole once the attempt that wrote it says so, on any of its nodes.
    ran(one, 2, {"rank-0.pt": b"A" * 5000})
    assert not told(rack, home, (one,)).whole
    ran(two, 2, {"DONE": b""})
    assert told(rack, home, (one, two, three)).whole


def test_a_copy_that_was_handed_on_stays_whole_without_the_node_that_said_so(rack: LocalBackend, home: Path) -> None:
    _, two, three = rack.places()
    ran(three, 2, {})  # attempt 2 had it in node02's place
    give(rack, home, ["node03"], attempt=3)
    ran(three, 3, {})
    ran(two, 2, {})
    assert told(rack, home, (two, three)).whole, "node01 and its DONE are gone: what node03 has came from there"
    ran(three, 4, {"rank-0.pt": b"A" * 5000})
    assert not told(rack, home, (two, three)).whole


def test_what_came_from_a_node_whose_clock_is_ahead_is_not_taken_for_what_was_written_later(
    rack: LocalBackend, home: Path
) -> None:
    one, two, three = rack.places()
    ahead = time.time() + 86400
    os.utime(run_dir(one) / NAME / "rank-0.pt", (ahead, ahead))
    assert give(rack, home, NODES[1:])[0] is not None
    for place, files in ((two, {"rank-0.pt": b"A" * 5000}), (three, {"rank-1.pt": b"B" * 5000})):
        ran(place, 2, {})
        record = Path(attempt_at(place, RUN, 2).node_record(str(place.node)))
        record.write_text(json.dumps({**json.loads(record.read_text()), "started_at": time.time()}))
        time.sleep(0.02)  # a file's time is that of the kernel's last tick, which the record's may be ahead of
        for name, data in files.items():
            (run_dir(place) / NAME / name).write_bytes(data)  # the same name once more, now by other ranks
    give(rack, home, NODES[1:], attempt=3)
    assert held(two) == held(three) == {**WHOLE, "rank-0.pt": b"A" * 5000, "rank-1.pt": b"B" * 5000}


def test_what_was_put_back_by_half_is_not_whole_by_an_earlier_mark(
    rack: LocalBackend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = rack.places()
    ran(three, 1, {**dict.fromkeys(WHOLE, b"old"), "DONE": b""})
    ran(one, 2, {"rank-0.pt": b"0" * 5000, "deep/model.pt": b"m" * 900, "DONE": b"2"})
    ran(two, 2, {"rank-1.pt": b"1" * 5000})
    replace_file, whole = os.replace, {**WHOLE, "DONE": b"2"}

    def killed(source: Any, target: Any) -> None:
        if "node03" in str(target) and str(target).endswith("rank-1.pt"):
            raise KeyboardInterrupt
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        give(rack, home, NODES[1:], attempt=3)
    monkeypatch.undo()
    assert {name: data[:1] for name, data in held(three).items()} == {
        "rank-0.pt": b"0", "rank-1.pt": b"o", "deep/model.pt": b"m",
    }  # fmt: skip
    assert give(rack, home, NODES[1:], attempt=4)[0] is not None
    assert held(two) == held(three) == whole


def test_what_nodes_wrote_differently_under_one_name_is_theirs_and_nobody_elses(rack: LocalBackend, home: Path) -> None:
    for number, place in enumerate(rack.places()[:2]):
        ran(place, 1, {"local.pt": b"%d" % number})
    with pytest.raises(UsageError, match=r"local.pt is not the same on the nodes .* node03 is to get cannot be said"):
        give(rack, home, NODES)
    give(rack, home, NODES[:2])
    assert [held(place)["local.pt"] for place in rack.places()[:2]] == [b"0", b"1"]


@pytest.mark.full
def test_what_a_lost_disk_had_comes_from_what_was_collected(rack: LocalBackend, home: Path) -> None:
    rack.down.add("node02")
    with pytest.raises(PartialAnswer, match="may have files on node02, which did not answer"):
        give(rack, home, ["node01"])
    rack.down.clear()
    collect(rack, RUN, home, "10")  # type: ignore[arg-type]
    rack.down.add("node02")
    said, notices = give(rack, home, ["node01"])
    assert said == f"{NAME} was handed to node01 (1 file (4.9 KiB))"
    assert notices == [f"{NAME}: 1 file (4.9 KiB) go to node01"]
    assert held(rack.places()[0]) == WHOLE
    # The step was written anew since: what is at home belongs to another checkpoint of this name.
    ran(rack.places()[0], 2, {"rank-0.pt": b"A" * 5000})
    with pytest.raises(PartialAnswer):
        give(rack, home, ["node01"], attempt=3)


@pytest.mark.full
def test_a_link_in_the_way_leads_nowhere(rack: LocalBackend, home: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    three = run_dir(rack.places()[2])
    (three / "code").mkdir(parents=True)
    (three / "code" / "ck").symlink_to(tmp_path / "outside")
    with pytest.raises(Refused, match="a link is in the way"):
        give(rack, home, ["node03"])
    assert list((tmp_path / "outside").iterdir()) == []
