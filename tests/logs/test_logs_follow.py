"""Following through real tail processes on real files, with connections that break."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_places import AGENT_PYTHON, LocalBackend, LocalStream, Log, attempt_at, local_backend, write_record

from launcher.contract.errors import PartialAnswer, Unreachable, UsageError
from launcher.logs.follow import Follower, Known, follow
from launcher.logs.frames import Frames
from launcher.logs.merge import LogLine
from launcher.logs.select import Selection, select

RUN = "job-1"


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def read(backend: LocalBackend, selection: Selection = Selection(), **more: Any) -> list[LogLine]:
    return list(follow(backend, RUN, more.pop("attempt", 1), selection, **more))  # type: ignore[arg-type]


def test_clocks_that_differ_are_allowed_for(tmp_path: Path) -> None:
    """A node 40 s ahead wrote its times 40 s too late: the merge, `since` and what is shown are this machine's."""
    backend = local_backend(tmp_path, ["n1", "n2"])
    for place, rank, wrong in zip(backend.places(), (0, 1), (0.0, 40.0), strict=True):
        folder = attempt_at(place, RUN)
        log = Log(folder, rank)
        for number in range(4):
            log.write(f"{number}\n".encode(), 1000.0 + 2 * number + rank + wrong)
        write_record(folder, str(place.node), [rank])
    first, second = backend.places()
    told = local_backend(tmp_path, ["n1", "n2"])
    told._places = [first, dataclasses.replace(second, ahead_s=40.0)]
    assert [(line.rank, line.time) for line in read(told)] == [(i % 2, 1000.0 + i) for i in range(8)]
    assert [line.rank for line in read(backend)] == [0] * 4 + [1] * 4  # without it
    assert [line.time for line in read(told, Selection(since=1005.0))] == [1005.0, 1006.0, 1007.0]


class Live:
    """A follower in a thread, so that a test can write while it reads."""

    def __init__(self, backend: LocalBackend, selection: Selection = Selection()) -> None:
        self.lines: list[LogLine] = []
        self.notices: list[str] = []
        self.follower = Follower(backend, RUN, 1, selection, True, self.notices.append)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        for batch in self.follower.batches():
            self.lines += batch

    def until(self, check: Callable[[], bool], seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, (texts(self.lines)[-20:], self.notices)
            time.sleep(0.02)

    def finish(self) -> list[LogLine]:
        self.thread.join(40.0)
        assert not self.thread.is_alive(), "the follower did not notice the end"
        return self.lines


@pytest.fixture
def shared(tmp_path: Path) -> LocalBackend:
    return local_backend(tmp_path, [None])


@pytest.fixture
def two(tmp_path: Path) -> LocalBackend:
    return local_backend(tmp_path, ["n1", "n2"])


def test_history_of_two_nodes_is_in_time_order_with_rank_and_node(two: LocalBackend) -> None:
    for index, place in enumerate(two.places()):
        folder = attempt_at(place, RUN)
        write_record(folder, place.node or "", [2 * index, 2 * index + 1])
        for rank in (2 * index, 2 * index + 1):
            log = Log(folder, rank)
            for n in range(5):
                log.write(f"line {n} of {rank}\n".encode(), 100.0 + n + rank / 10)
            log.write(b"unfinished", 101.05)
    lines = read(two)
    assert [(x.time, x.rank) for x in lines] == sorted((x.time, x.rank) for x in lines)
    assert len(lines) == 24
    assert {(x.rank, x.node) for x in lines} == {(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")}
    # Clocks that go back (each "unfinished" says 101.05, after 104) never put a rank's own lines out of order.
    assert [x.text for x in lines if x.rank == 0] == [f"line {n} of 0" for n in range(5)] + ["unfinished"]


def test_selection(two: LocalBackend) -> None:
    for index, place in enumerate(two.places()):
        folder = attempt_at(place, RUN)
        write_record(folder, place.node or "", [index])
        log = Log(folder, index)
        for n in range(100):
            log.write(f"step {n}\n".encode(), 1000.0 + n)
    assert {x.rank for x in read(two, select(ranks="1-5"))} == {1}
    assert {x.node for x in read(two, select(nodes=["n[1-1]"]))} == {"n1"}
    assert two.asked[-1]["run_dir"].endswith("n1/runs/job-1")
    assert texts(read(two, select(grep=r"step 9\d", ranks="0"))) == [f"step {n}" for n in range(90, 100)]
    assert texts(read(two, select(since="3s", clock=lambda: 1100.0, ranks="0"))) == ["step 97", "step 98", "step 99"]
    assert texts(read(two, select(tail=2))) == ["step 98", "step 98", "step 99", "step 99"]
    assert texts(read(two, select(tail=0))) == []
    assert texts(read(two, select(tail=1000, ranks="0")))[0] == "step 0"


def test_since_and_tail_in_large_files(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0])
    log = Log(folder, 0)
    lines = [f"line {n} {'x' * (n % 90)}\n".encode() for n in range(40_000)]
    log.path.write_bytes(b"".join(lines))
    offsets = itertools.accumulate((len(x) for x in lines), initial=0)
    log.times.write_bytes(b"".join(b"%d %d.5\n" % (o, n) for n, o in enumerate(offsets) if n % 3 == 0))
    got = texts(read(shared, Selection(since=30_000.0)))
    assert got[0].startswith("line 30000 ") and len(got) == 10_000
    assert texts(read(shared, Selection(last=12_345)))[0].startswith("line 27655 ")


def test_logs_without_arrival_times(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0, 1])
    Log(folder, 0).write(b"old\n")
    os.utime(folder.log(0), (50.0, 50.0))
    Log(folder, 1).write(b"new\n")
    os.utime(folder.log(1), (90.0, 90.0))
    assert [(x.text, x.time) for x in read(shared)] == [("old", 50.0), ("new", 90.0)]
    assert texts(read(shared, Selection(since=60.0))) == ["new"]


def test_live_lines_new_ranks_and_the_end(shared: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where this process does not run for a while, half a line is a line of its own: tested below.
    monkeypatch.setattr("launcher.logs.follow.FLUSH_S", 1000.0)
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    first = Log(folder, 0)
    first.write(b"before\n", time.time())
    live = Live(shared)
    live.until(lambda: texts(live.lines) == ["before"])
    first.write(b"half a l", time.time())
    time.sleep(0.3)
    assert texts(live.lines) == ["before"]
    first.write(b"ine\n", time.time())
    live.until(lambda: texts(live.lines)[-1] == "half a line")
    write_record(folder, "n1", [0, 1], "running")
    Log(folder, 1).write(b"late rank\n", time.time())
    live.until(lambda: texts(live.lines)[-1] == "late rank")
    assert live.lines[-1].node == "n1"
    first.write(b"last word", time.time())
    write_record(folder, "n1", [0, 1], "ended")
    assert texts(live.finish())[-1] == "last word"


def test_an_unfinished_line_is_shown_after_silence(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    log = Log(folder, 0)
    log.write(b"loading: 10%\rloading: 99%", time.time())
    live = Live(shared)
    live.until(lambda: texts(live.lines) == ["loading: 99%"])
    log.write(b"\ndone\n", time.time())
    live.until(lambda: texts(live.lines)[1:] == ["done"])
    live.follower.close()
    live.finish()


def test_cuts_lose_nothing_and_repeat_nothing(two: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a round of this test is a silence of its own; those are shown, and tested above and below.
    monkeypatch.setattr("launcher.logs.follow.FLUSH_S", 1000.0)
    monkeypatch.setattr("launcher.logs.follow.BACK_OFF_S", (0.1, 0.2))
    folders = [attempt_at(place, RUN) for place in two.places()]
    logs = []
    for index, folder in enumerate(folders):
        write_record(folder, f"n{index + 1}", [index], "running")
        logs.append(Log(folder, index))
        logs[-1].write(b"".join(b"old %d\n" % n for n in range(50)), time.time())
    live = Live(two, Selection(last=3))
    live.until(lambda: len(live.lines) == 6)
    for round_ in range(3):
        for log in logs:
            log.write(b"".join(b"%d.%d\nxx" % (round_, n) for n in range(200)), time.time())
        time.sleep(0.05)
        before = two.streams["n1"]
        before.cut()
        # What is written while the connection is down (more than --tail asks for) comes too.
        logs[0].write(b"".join(b"down %d.%d\nyy" % (round_, n) for n in range(20)), time.time())
        live.until(lambda: two.streams["n1"] is not before)  # noqa: B023
    for folder, node, log in zip(folders, ("n1", "n2"), logs, strict=True):
        log.write(b"end\n", time.time())
        write_record(folder, node, [int(node[1]) - 1], "ended")
    live.finish()
    for index, log in enumerate(logs):
        assert [x.text for x in live.lines if x.rank == index] == log.path.read_text().splitlines()[47:]
    # Two cuts in a row may come before the new connection's process has said its first word.
    told = ("n1: connection lost; asking again", "n1: still no answer", "n1: answers again")
    assert live.notices and all(n.startswith(told) for n in live.notices), live.notices


def test_a_cut_is_not_a_silence_of_the_rank(shared: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.logs.follow.FLUSH_S", 1000.0)  # the silence begins with the cut
    monkeypatch.setattr("launcher.logs.follow.BACK_OFF_S", (1.5, 1.5))
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    log = Log(folder, 0)
    log.write(b"first\nhalf of", time.time())
    live = Live(shared)
    live.until(lambda: texts(live.lines) == ["first"])
    before = shared.streams["shared"]
    before.cut()
    monkeypatch.setattr("launcher.logs.follow.FLUSH_S", 0.6)
    # The rank goes on at once; only we do not see it, for longer than an unfinished line is kept back.
    log.write(b" a line\n", time.time())
    live.until(lambda: len(live.lines) > 1)
    assert shared.streams["shared"] is not before
    assert texts(live.lines) == ["first", "half of a line"]
    live.follower.close()
    live.finish()


def test_a_node_that_is_down_stalls_nobody_and_is_told(two: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.logs.follow.BACK_OFF_S", (0.1, 0.5))  # else it waits for as long as it was down
    folders = [attempt_at(place, RUN) for place in two.places()]
    for index, folder in enumerate(folders):
        write_record(folder, f"n{index + 1}", [index], "running")
        Log(folder, index).write(b"hello\n", 1.0 + index)
    two.down.add("n1")
    live = Live(two)
    live.until(lambda: texts(live.lines) == ["hello"] and bool(live.notices))
    assert "no route to host" in live.notices[0]
    two.down.clear()
    live.until(lambda: len(live.lines) == 2)
    live.follower.close()
    live.finish()


def test_without_follow_what_could_not_be_read_is_an_error(two: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.logs.follow.BACK_OFF_S", (0.02, 0.05))
    folder = attempt_at(two.places()[0], RUN)
    write_record(folder, "n1", [0])
    Log(folder, 0).write(b"here\n", 1.0)
    two.down.add("n2")
    got: list[str] = []
    with pytest.raises(PartialAnswer, match="n2"):
        got.extend(line.text for line in follow(two, RUN, 1, Selection()))  # type: ignore[arg-type]
    assert got == ["here"]
    two.down.add("n1")
    with pytest.raises(Unreachable, match="no route"):
        read(two)


def test_a_node_that_an_earlier_attempt_left_is_not_asked(two: LocalBackend) -> None:
    folder = attempt_at(two.places()[0], RUN, 2)
    write_record(folder, "n1", [0])
    Log(folder, 0).write(b"on n1\n", 1.0)
    two.down.add("n2")
    known = Known(frozenset({"n1"}))
    for following in (False, True):
        assert texts(read(two, attempt=2, follow=following, known=known)) == ["on n1"]


def test_following_ends_with_the_run_though_a_node_of_it_is_gone(
    two: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.logs.follow.BACK_OFF_S", (0.02, 0.05))
    monkeypatch.setattr("launcher.logs.follow.ASK_END_S", 0.1)
    folder = attempt_at(two.places()[0], RUN)
    write_record(folder, "n1", [0])
    Log(folder, 0).write(b"here\n", 1.0)
    two.down.add("n2")
    notices: list[str] = []
    ends = iter([False, False, True])
    known = Known(ended=lambda: next(ends))  # as long as it goes on, the node may come back
    got: list[str] = []
    with pytest.raises(PartialAnswer, match="the logs on n2 could not be read to their end"):
        for line in follow(two, RUN, 1, Selection(), follow=True, notice=notices.append, known=known):  # type: ignore[arg-type]
            got.append(line.text)
    assert got == ["here"] and next(ends, None) is None
    assert [n for n in notices if "n2" in n] == notices and len(notices) == 2, notices


def test_truncated_and_replaced_logs_start_again(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    log = Log(folder, 0)
    log.write(b"one\ntwo\nunfin")
    live = Live(shared)
    live.until(lambda: len(live.lines) == 2)
    log.path.write_bytes(b"a\n")
    live.until(lambda: texts(live.lines)[-1] == "a")
    other = log.path.with_name("other")
    other.write_bytes(b"replaced by a longer file\n")
    other.replace(log.path)
    live.until(lambda: texts(live.lines)[-1] == "replaced by a longer file")
    write_record(folder, "n1", [0], "ended")
    assert texts(live.finish()) == ["one", "two", "unfin", "a", "replaced by a longer file"]


def test_garbage_and_huge_lines_pass_through(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0, 1])
    garbage = bytes(range(256)) * 3000 + b"\n"
    Log(folder, 0).write(garbage + b"after\n", 1.0)
    Log(folder, 1).write(b'{"rank":0,"bytes":5}\n{"event":"ended"}\n' + b"h" * 3_000_000 + b"\nafter\n", 2.0)
    lines = read(shared)
    assert [x.text for x in lines if x.rank == 0][-1] == "after"
    mine = [x.text for x in lines if x.rank == 1]
    assert mine[:2] == ['{"rank":0,"bytes":5}', '{"event":"ended"}'] and mine[3] == "after"
    assert mine[2].endswith(f"… +{3_000_000 - 65536} bytes") and len(mine[2]) < 66_000
    assert Path(folder.log(0)).read_bytes() == garbage + b"after\n"


def test_a_new_attempt_is_followed(shared: LocalBackend) -> None:
    place = shared.places()[0]
    folder = attempt_at(place, RUN)
    write_record(folder, "n1", [0], "running")
    Log(folder, 0).write(b"first\n", 1.0)
    live = Live(shared)
    live.until(lambda: texts(live.lines) == ["first"])
    second = attempt_at(place, RUN, 2)
    Log(second, 0).write(b"second\n", 2.0)
    write_record(second, "n1", [0], "running")
    write_record(folder, "n1", [0], "ended")
    live.until(lambda: [(x.attempt, x.text) for x in live.lines] == [(1, "first"), (2, "second")])
    assert any("attempt 2" in n for n in live.notices)
    write_record(second, "n1", [0], "ended")
    live.finish()


def test_a_dead_agent_does_not_keep_followers(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    gone = subprocess.Popen(["true"])
    gone.wait()
    path = Path(folder.node_record("n1"))
    record = json.loads(path.read_text())
    record["agent"]["pid"] = gone.pid
    path.write_text(json.dumps(record))
    Log(folder, 0).write(b"only\n", 1.0)
    live = Live(shared)
    assert texts(live.finish()) == ["only"]


def test_the_tail_process_goes_when_its_reader_goes(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    stream = shared.tail(shared.places()[0], {"run_dir": str(folder.root.parent.parent), "attempt": 1, "follow": True})
    assert b'"at"' in next(iter(stream))
    assert stream.process.stdout is not None
    stream.process.stdout.close()
    assert stream.process.wait(30.0) == 0


def test_a_verb_that_refuses_is_an_error_with_its_words(shared: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt_at(shared.places()[0], RUN)
    monkeypatch.setattr(
        shared, "tail", lambda place, request: LocalStream(["printf", r'{"error":"no such run","hint":"look"}\n'], b"")
    )
    with pytest.raises(UsageError, match="no such run"):
        read(shared)


def test_frames_survive_any_cut_and_name_foreign_bytes() -> None:
    stream = b'Welcome to n1!\n{"event":"at","positions":{}}\n{"rank":1,"bytes":4}\nab\nc{"event":"ended"}\n'
    whole = list(Frames("n1").feed(stream))
    assert [payload for _, payload in whole] == [b"", b"ab\nc", b""]
    frames = Frames("n1")
    cut = [item for i in range(len(stream) - 18) for item in frames.feed(stream[i : i + 1])]
    assert cut == [({"event": "at", "positions": {}}, b""), ({"rank": 1, "bytes": 4}, b"ab\nc")]
    assert frames.noise == b"Welcome to n1!\n"
    with pytest.raises(Unreachable, match="cannot be understood"):
        list(frames.feed(b"nonsense\n"))


def test_a_closed_iterator_leaves_nothing_behind(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [0], "running")
    Log(folder, 0).write(b"one\ntwo\n", 1.0)
    lines: Iterator[LogLine] = follow(shared, RUN, 1, Selection(), follow=True)  # type: ignore[arg-type]
    assert next(lines).text == "one"
    lines.close()  # type: ignore[attr-defined]
    assert shared.streams["shared"].process.wait(30.0) is not None


@pytest.mark.parametrize(
    "flags,message",
    [
        ({"ranks": "0,x"}, "'x' is no rank"),
        ({"ranks": "7-3"}, "goes down"),
        ({"ranks": ""}, "no rank"),
        ({"ranks": "0-999999999"}, "more than"),
        ({"grep": "a(b"}, "at character 2"),
        ({"since": "yesterday"}, "neither an age nor a time"),
        ({"nodes": ["node[3-1]"]}, "column"),
        ({"tail": -1}, "0 or more"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select(**flags)


def test_right_flags() -> None:
    got = select(ranks="0,3-5", nodes=["n[1-2]", "x"], since="1.5m", tail=3, clock=lambda: 100.0)
    assert got.ranks == {0, 3, 4, 5} and got.nodes == {"n1", "n2", "x"} and got.since == 10.0 and got.last == 3
    assert select(since="2026-01-31T14:25:00+00:00").since == 1769869500.0
    assert AGENT_PYTHON


def test_lines_that_come_before_their_agents_record_wait_for_their_nodes_name(shared: LocalBackend) -> None:
    folder = attempt_at(shared.places()[0], RUN)
    write_record(folder, "n1", [], state="running")
    live = Live(shared)
    Log(folder, 0).write(b"first\n", 1.0)
    time.sleep(1.0)
    write_record(folder, "n1", [0], state="running")
    live.until(lambda: texts(live.lines) == ["first"])
    write_record(folder, "n1", [0])
    assert [(line.rank, line.node, line.text) for line in live.finish()] == [(0, "n1", "first")]
