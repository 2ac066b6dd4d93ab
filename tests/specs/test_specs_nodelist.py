"""Node lists as Slurm writes them, the ones it should have refused, and hostfiles."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.contract.folder import is_safe_name
from launcher.specs.nodelist import NodeListError, address_problem, expand, fold, host_problem, parse_hostfile


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("node[001-3]", "node001 node002 node003"),
        ("node[9-10]", "node9 node10"),
        ("node[3,1,2]", "node3 node1 node2"),
        ("b2,a1", "b2 a1"),
        ("n[1,3-4],m,n2", "n1 n3 n4 m n2"),
        ("node[5]", "node5"),
        ("n[01-02]-ib.cluster", "n01-ib.cluster n02-ib.cluster"),
        ("rack[1-2]node[01-02]", "rack1node01 rack1node02 rack2node01 rack2node02"),
        ("r[1-2][a0]", None),
        ("r[1-2][3-4]x", "r13x r14x r23x r24x"),
        ("[1-2]n", "1n 2n"),
        ("n1,n1", "n1 n1"),
    ],
)
def test_expand(text: str, names: str | None) -> None:
    if names is None:
        with pytest.raises(NodeListError):
            expand(text)
    else:
        assert expand(text) == tuple(names.split())


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("", 1, "is empty"),
        ("node[1-3", 5, "never closed"),
        ("a,node[1-3", 7, "never closed"),
        ("node1-3]", 8, "']' without"),
        ("node[[1]]", 6, "do not nest"),
        ("node[]", 6, "empty range"),
        ("node[1,,2]", 8, "empty range"),
        ("node[1,]", 8, "empty range"),
        ("node[4-1]", 6, "goes down"),
        ("node[1,4-2]", 8, "goes down"),
        ("node[-1]", 6, "negative"),
        ("node[-1-2]", 6, "negative"),
        ("node[1-]", 6, "no end"),
        ("node[a-c]", 6, "not a number"),
        ("node[1-4/2]", 6, "steps"),
        ("node[1-010]", 6, "padded differently"),
        ("node[1- 2]", 6, "not a number"),
        ("node[1-1234567890123456789]", 6, "too many digits"),
        ("a,,b", 3, "missing beside a comma"),
        (",a", 1, "missing beside a comma"),
        ("a,", 2, "missing beside a comma"),
        ("a,-oProxyCommand=x", 3, "begins with '-'"),
        ("a b", 1, "holds ' '"),
        ("a;rm", 1, "holds ';'"),
        ("$(id)", 1, "holds"),
        ("a\nb", 1, "holds"),
        ("node1\n", 1, "holds"),
        ("@all", 1, "holds '@'"),
        ("nöde1", 1, "holds 'ö'"),
        ("n[١-٢]", 3, "not a number"),
        ("_n1", 1, "first a letter or digit"),
        ("n[1-2]..x", 1, "holds '..'"),
        ("n" * 129, 1, "longer than"),
        ("n[1-65537]", 1, "more than 65,536"),
        ("m,n[1-65536]", 3, "more than 65,536"),
        ("n[1-1000][1-1000]", 1, "more than 65,536"),
        ("n[1-999999999999999999]", 1, "more than 65,536"),
    ],
)
def test_broken_lists_name_their_column(text: str, column: int, says: str) -> None:
    before = time.process_time()
    with pytest.raises(NodeListError, match=re.escape(says)) as caught:
        expand(text)
    assert caught.value.column == column
    assert time.process_time() - before < 1.0  # nothing was expanded first


def test_the_limit_itself_is_fine() -> None:
    assert len(expand("n[00001-65536]")) == 65536
    assert expand("n[1-3]", limit=3) == ("n1", "n2", "n3")


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ("node01 node02 node03", "node[01-03]"),
        ("node3 node1", "node[3,1]"),
        ("node1 node2 node4 node5", "node[1-2,4-5]"),
        ("n09 n10 n011", "n[09-10,011]"),
        ("n9 n10", "n[9-10]"),
        ("n99 n100", "n[99-100]"),
        ("a b", "a,b"),
        ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"),
        ("n1-ib n2-ib", "n[1-2]-ib"),
        ("localhost", "localhost"),
        ("", ""),
    ],
)
def test_fold(names: str, folded: str) -> None:
    assert fold(names.split()) == folded


_HOSTS = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,3}(0{0,2}[0-9]{0,3})?(-ib|\.x)?", fullmatch=True).filter(
    lambda n: host_problem(n) is None
)
_RUNS = st.builds(
    lambda stem, first, count, width, tail: [f"{stem}{n:0{width}d}{tail}" for n in range(first, first + count)],
    st.sampled_from(["n", "rack1n", "a-"]),
    st.integers(0, 1200),
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from(["", "-ib"]),
)


@given(
    st.lists(st.one_of(_HOSTS.map(lambda h: [h]), _RUNS), min_size=1, max_size=8).map(
        lambda x: [n for part in x for n in part]
    )
)
def test_fold_and_expand_are_inverse(names: list[str]) -> None:
    assert expand(fold(names)) == tuple(names)


@given(st.text(alphabet="n0123[],-. ;\n", max_size=16))
def test_expand_answers_or_refuses_any_text(text: str) -> None:
    try:
        names = expand(text)
    except NodeListError as problem:
        assert 1 <= problem.column <= max(1, len(text))
    else:
        assert names
        assert all(is_safe_name(n) and host_problem(n) is None for n in names)


@given(st.text(max_size=12))
def test_accepted_host_names_are_safe_everywhere(name: str) -> None:
    if host_problem(name) is None:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)
        assert is_safe_name(name)


def test_addresses() -> None:
    assert address_problem("10.0.0.1") is None
    assert address_problem("fe80::1") is None
    assert address_problem("node1.example.org") is None
    assert address_problem("fe80::1%eth0") is not None
    assert address_problem("-oProxyCommand=x") is not None
    assert address_problem("a b") is not None


def test_hostfile() -> None:
    hosts, mistakes = parse_hostfile("# the lab\n\nnode1 slots=4\nnode2   # slow\n\tnode3\tslots=1\r\n")
    assert hosts == [("node1", 4), ("node2", None), ("node3", 1)]
    assert mistakes == []


def test_hostfile_mistakes_all_at_once() -> None:
    _, mistakes = parse_hostfile("node1 slots=2\n-x\nnode2 slots=0\n  node1\nnode3 slot=2 max\nnode4 slots=1 slots=2\n")
    assert [(m.line, m.column) for m in mistakes] == [(2, 1), (3, 7), (4, 3), (5, 7), (5, 14), (6, 15)]
    assert "stands here and in line 1" in mistakes[2].message
    assert parse_hostfile("# nothing\n")[1][0].message.startswith("the hostfile names no host")
