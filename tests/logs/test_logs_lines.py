from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.logs.lines import LINE_BYTES, Lines, clean


def lines_of(data: bytes, cuts: list[int] = []) -> list[str]:  # noqa: B006
    splitter, texts, at = Lines(), [], 0
    for cut in [*sorted(c % (len(data) + 1) for c in cuts), len(data)]:
        texts += splitter.feed(data[at:cut])
        at = cut
    return texts + splitter.flush()


pieces = st.one_of(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"\x1b[31m", b"\x1b]0;t\x07", b"\xff", b"\x00", b"\t", b""]),
    st.just("é€𝄞".encode()),
    st.binary(max_size=12),
    st.text(max_size=8).map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"x" * (LINE_BYTES - 1), b"y" * LINE_BYTES, "é".encode() * LINE_BYTES]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(pieces, max_size=12).map(b"".join), st.lists(st.integers(0, 10**6), max_size=8))
def test_any_chunking_gives_the_same_lines(data: bytes, cuts: list[int]) -> None:
    assert lines_of(data, cuts) == lines_of(data)


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=8).map(b"".join))
def test_nothing_that_a_terminal_obeys_is_left(data: bytes) -> None:
    for text in lines_of(data):
        assert not re.search(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]", text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=30)))
def test_plain_text_stays_what_it_was(texts: list[str]) -> None:
    assert lines_of("".join(t + "\n" for t in texts).encode()) == texts


@pytest.mark.parametrize(
    "data,shown",
    [
        (b"10%\r50%\r100%\ndone\n", ["100%", "done"]),
        (b"10%\r50%\r", ["50%"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\n\nx", ["", "", "x"]),
        (b"caf\xc3\xa9 \xff\n", ["café \\xff"]),
        (b"\x1b[1;31mred\x1b[0m\x1b]8;;http://x\x1b\\link\x1b]8;;\x07 \x1b(Bok\x08\n", ["redlink ok"]),
        ("\x9b31mone\x85two\n".encode(), ["onetwo"]),
        (b"\x1b\x1b[31mx\n", ["x"]),
        (b"col\tumn\n", ["col\tumn"]),
        (b"\x1b]0;never closed\nnext\n", ["", "next"]),
    ],
)
def test_what_is_shown(data: bytes, shown: list[str]) -> None:
    assert lines_of(data) == shown


def test_a_huge_line_is_counted_not_kept() -> None:
    splitter = Lines()
    for _ in range(64):
        assert splitter.feed(b"z" * 2**20) == []
    assert splitter.feed(b"\nnext\n") == [f"{'z' * LINE_BYTES}… +{2**26 - LINE_BYTES} bytes", "next"]
    # A character is never cut in two.
    text = lines_of(b"x" + "é".encode() * LINE_BYTES)[0]
    assert text.startswith("xé") and text.endswith(f"é… +{LINE_BYTES + 2} bytes") and "\\x" not in text


def test_a_flushed_part_is_neither_glued_nor_followed_by_an_empty_line() -> None:
    splitter = Lines()
    assert splitter.feed(b"Continue? ") == [] and splitter.pending
    assert splitter.flush() == ["Continue? "] and not splitter.pending
    assert splitter.feed(b"\nyes\n") == ["yes"]
    splitter.feed(b"half")
    splitter.flush()
    assert splitter.feed(b" rest\n\n") == [" rest", ""]


def test_clean_is_not_fooled_by_sequences_inside_sequences() -> None:
    assert "\x1b" not in clean(b"\x1b\x1b\x1b[[31m\x1b]\x1b]x\x07")
