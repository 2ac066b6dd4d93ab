from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.contract.records import Failure, NodeRecord, Outcome, ProcessId, RankRecord
from launcher.runs.diagnosis import Cause, first_cause, fold_ranks

AGENT = ProcessId(1, 1, "b")
OWN = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: bad batch"]
PEER = [
    "Traceback (most recent call last):",
    '  File "loop.py", line 9, in step',
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:5123",
]


def rank(number: int, at: float, code: int | None = None, signal: int | None = None, ours: bool = False) -> RankRecord:
    return RankRecord(number, number % 2, 100 + number, 1.0, at, at - 1.0, code, signal, ours)


def node(name: str, *ranks: RankRecord, failure: Failure | None = None) -> NodeRecord:
    return NodeRecord(name, int(name[1:]) - 1, AGENT, "ended", 1.0, 9.0, ranks=ranks, failure=failure, ended_at=9.0)


def cause_of(*records: NodeRecord, lines: dict[int, list[str]] | None = None, outcome: Outcome | None = None) -> Cause:
    cause = first_cause(records, outcome, lines or {})
    assert cause is not None
    return cause


def test_a_rank_that_exits_7_is_named_and_the_others_were_stopped() -> None:
    failure = Failure("rank_exit", "n2", "rank 3 exited with 7", rank=3, exit_code=7, at=5.0)
    cause = cause_of(
        node("n1", rank(0, 5.2, signal=15, ours=True), rank(1, 5.2, signal=15, ours=True), failure=failure),
        node("n2", rank(2, 5.2, signal=9, ours=True), rank(3, 5.0, code=7), failure=failure),
        lines={3: ["giving up"]},
    )
    assert (cause.rank, cause.node, cause.exit_code, cause.signal) == (3, "n2", 7, None)
    assert cause.sentence() == "rank 3 on n2: exit code 7"
    assert cause.last_lines == ("giving up",)
    assert cause.others == "ranks 0-2 stopped by us"


def test_a_killed_rank_is_told_in_plain_words() -> None:
    cause = cause_of(node("n1", rank(0, 5.0, signal=9), rank(1, 5.3, code=1)), lines={1: PEER})
    assert cause.sentence() == "rank 0 on n1: signal 9 (SIGKILL): killed: out of memory or by hand"
    assert cause.others == "rank 1 lost the connection to it"


def test_fallout_that_was_seen_first_is_not_the_cause() -> None:
    agreed = Failure("rank_exit", "n1", "rank 0", rank=0, exit_code=1, at=5.0)
    cause = cause_of(
        node("n1", rank(0, 5.0, code=1), failure=agreed), node("n2", rank(1, 5.6, code=1)), lines={0: PEER, 1: OWN}
    )
    assert cause.rank == 1 and cause.sentence() == "rank 1 on n2: exit code 1: ValueError: bad batch"
    assert cause.others == "rank 0 lost the connection to it"


def test_far_apart_ends_are_told_by_time() -> None:
    cause = cause_of(node("n1", rank(0, 5.0, code=3), rank(1, 50.0, code=1)), lines={1: OWN})
    assert cause.rank == 0 and cause.others == "rank 1 failed too"


def test_what_agents_agreed_on_goes_before_clocks() -> None:
    agreed = Failure("rank_exit", "n2", "", rank=1, exit_code=1, at=5.0)
    records = node("n1", rank(0, 4.8, code=1), failure=agreed), node("n2", rank(1, 5.0, code=1), failure=agreed)
    assert cause_of(*records, lines={0: OWN, 1: OWN}).rank == 1


def test_an_error_before_a_lost_connection_is_the_ranks_own() -> None:
    chain = [*OWN, "", "During handling of the above exception, another exception occurred:", "", *PEER]
    cause = cause_of(node("n1", rank(0, 5.0, code=1), rank(1, 5.0, code=1)), lines={0: PEER, 1: chain})
    assert cause.rank == 1 and cause.words == "ValueError: bad batch"


def test_an_aborting_watchdog_is_fallout_and_an_unknown_signal_has_a_name() -> None:
    watchdog = ["[rank1]: Watchdog caught collective operation timeout: WorkNCCL(...)", "terminate called"]
    cause = cause_of(node("n1", rank(0, 5.5, signal=63), rank(1, 5.0, signal=6)), lines={1: watchdog})
    assert cause.rank == 0 and "signal 63" in cause.sentence()


def test_only_fallout_is_still_said_and_said_as_that() -> None:
    cause = cause_of(node("n1", rank(0, 5.0, code=1)), lines={0: PEER})
    assert "lost its connection to another rank" in cause.sentence()


def test_a_lost_node_and_a_failed_setup() -> None:
    lost = Failure("node_lost", "n2", "node n2 was lost: no sign of life for 10 s", at=20.0)
    cause = cause_of(node("n1", rank(0, 21.0, signal=15, ours=True), failure=lost))
    assert cause.rank is None and cause.sentence() == "node n2 was lost: no sign of life for 10 s"
    assert cause.others == "rank 0 stopped by us"
    setup = Failure("setup_failed", "n1", "setup exited with 1", at=1.0)
    assert cause_of(node("n1", failure=setup)).sentence() == "node n1: setup exited with 1"


def test_a_rank_whose_record_was_lost_is_known_from_its_peers() -> None:
    agreed = Failure("rank_signal", "n2", "crashed", rank=1, signal=11, at=5.0)
    cause = cause_of(node("n1", rank(0, 5.1, signal=15, ours=True), failure=agreed))
    assert cause.sentence() == "rank 1 on n2: signal 11 (SIGSEGV): crashed"


@pytest.mark.parametrize("kind", ["cancelled", "time_limit"])
def test_no_cause_where_nothing_failed(kind: str) -> None:
    ended = Failure(kind, "n1", kind, at=5.0)
    assert first_cause([node("n1", rank(0, 5.0, signal=15, ours=True), failure=ended)], None, {}) is None


def test_no_cause_for_what_ended_well_or_stopped() -> None:
    assert first_cause([], None, {}) is None
    assert first_cause([node("n1", rank(0, 5.0, code=0))], None, {}) is None
    stopped = Outcome("stopped", 5, 5)
    assert first_cause([node("n1", rank(0, 5.0, code=75))], stopped, {}) is None
    assert first_cause([node("n1", rank(0, 5.0, code=75))], None, {}) is not None
    running = replace(rank(0, 5.0), ended_at=None, exit_code=None)
    assert first_cause([node("n1", running)], None, {}) is None


def test_ranks_are_folded() -> None:
    assert fold_ranks([7, 0, 1, 2, 5, 5]) == "0-2,5,7"
    assert fold_ranks([]) == ""


FULL = ["Traceback (most recent call last):", "OSError: [Errno 28] No space left on device: 'ck/step-9.pt'"]


@pytest.mark.parametrize(
    ("code", "lines", "full"),
    [
        (1, FULL, True),
        (1, [*FULL, "", "During handling of the above exception, another exception occurred:", *OWN], True),
        (1, ["OSError: [Errno 122] Disk quota exceeded", *OWN], False),  # said before, and gone on from
        (6, ["rank 0: no space for /scratch/r/checkpoints/step-00000010/rank-00000.safetensors"], True),
        (6, ["giving up"], False),  # a program's own number
        (1, OWN, False),
    ],
)
def test_a_full_disk_is_known_by_what_the_first_one_said(code: int, lines: list[str], full: bool) -> None:
    cause = cause_of(node("n1", rank(0, 5.0, code=code), rank(1, 5.3, code=1)), lines={0: lines, 1: PEER})
    assert cause.rank == 0 and cause.no_space is full


def test_a_full_disk_before_any_rank_began() -> None:
    failure = Failure("no_space", "n1", "no space for the data in /local/zerun-data: No space left on device", at=5.0)
    cause = cause_of(node("n1", failure=failure))
    assert cause.no_space and cause.sentence() == f"node n1: {failure.message}"
