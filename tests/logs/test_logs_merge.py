from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.logs.merge import LogLine, Merger, key_of


def line(rank: int, time: float, text: str = "") -> LogLine:
    return LogLine(rank, f"n{rank}", time, text, 1)


histories = st.lists(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=30).map(sorted), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(histories, st.randoms(use_true_random=False))
def test_history_is_in_order_whatever_comes_first(histories, random) -> None:
    # Ranks 4·i … 4·i+3 stand on place i; batches of places come in any order.
    queues = [[line(4 * i + r, t, str(n)) for n, (t, r) in enumerate(h)] for i, h in enumerate(histories)]
    merger = Merger(len(queues), 0.0)
    out: list[LogLine] = []
    waiting = {i: list(q) for i, q in enumerate(queues)}
    while waiting:
        i = random.choice(sorted(waiting))
        size = random.randint(1, 5)
        batch, waiting[i] = waiting[i][:size], waiting[i][size:]
        if batch:
            merger.add(i, batch, key_of(batch[-1]), 0.0)
        if not waiting[i]:
            del waiting[i]
            merger.over(i)
        out += merger.release(0.0)
    out += merger.drain()
    assert out == sorted((x for q in queues for x in q), key=key_of)
    for i, queue in enumerate(queues):
        assert [x for x in out if x.rank // 4 == i] == queue


def test_a_silent_place_holds_history_back_for_a_while_only() -> None:
    merger = Merger(2, 0.0, patience_s=10.0)
    merger.add(0, [line(0, 1.0)], (1.0, 0), 0.0)
    assert merger.release(9.0) == []
    assert merger.release(11.0) == [line(0, 1.0)]


def test_live_lines_wait_for_the_window_and_no_longer() -> None:
    merger = Merger(3, 0.0, window_s=0.25)
    for i in range(3):
        merger.live(i)
    merger.add(0, [line(0, 10.0)], (10.0, 0), 1.0)
    assert merger.release(1.1) == []
    merger.add(1, [line(1, 9.0)], (9.0, 1), 1.2)
    # The older one overtakes; it does not have to wait for its own window.
    assert merger.release(1.3) == [line(1, 9.0), line(0, 10.0)]
    # A place whose clock is behind and that never stops delays others by no more than the window.
    merger.add(0, [line(0, 20.0)], (20.0, 0), 2.0)
    shown: list[LogLine] = []
    for n in range(10):
        merger.add(1, [line(1, 11.0 + n / 10)], (11.0 + n / 10, 1), 2.0 + n / 10)
        shown += merger.release(2.0 + n / 10)
        if n == 3:
            assert line(0, 20.0) in shown


def test_a_filtered_source_does_not_stall_others() -> None:
    merger = Merger(2, 0.0)
    merger.add(0, [line(0, 5.0)], (5.0, 0), 0.0)
    merger.add(1, [], (7.0, 1), 0.0)
    assert merger.release(0.0) == [line(0, 5.0)]


def test_a_source_that_is_asked_again_is_waited_for_until_it_is_live() -> None:
    merger = Merger(2, 0.0, window_s=0.25)
    merger.live(0)
    merger.live(1)
    merger.over(1)
    merger.history(1)
    merger.add(0, [line(0, 3.0)], (3.0, 0), 1.0)
    merger.heard(1, 1.0)
    assert merger.release(2.0) == []
    merger.add(1, [line(1, 2.0)], (2.0, 1), 2.0)
    assert merger.release(2.0) == [line(1, 2.0)]
    merger.live(1)
    assert merger.release(2.5) == [line(0, 3.0)]


def test_who_is_behind() -> None:
    merger = Merger(3, 0.0)
    merger.add(0, [], (5.0, 0), 0.0)
    merger.add(1, [], (4.0, 1), 0.0)
    assert merger.slowest(0.0) == {2}
    merger.live(2)
    assert merger.slowest(0.0) == {1}
