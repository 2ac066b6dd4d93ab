"""The last N lines are N, also of a rank that writes while they are sent."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.agent.tail import Tail, read_request


class Growing(Tail):
    """A rank writes one more line once it is known where its last lines begin."""

    def _list(self, *, first: bool) -> None:
        super()._list(first=first)
        for source in self.sources.values():
            with open(source.path, "ab") as log:
                log.write(b"late\n")


@pytest.mark.parametrize(("last", "lines"), [(2, [b"tick 3", b"tick 4"]), (None, [b"tick 0", b"late"])])
def test_a_line_that_comes_meanwhile_is_not_one_more(tmp_path: Path, last: int | None, lines: list[bytes]) -> None:
    logs = tmp_path / "attempts" / "1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-00000.log").write_bytes(b"".join(b"tick %d\n" % i for i in range(5)))
    with open(tmp_path / "out", "wb") as out:
        Growing(read_request({"run_dir": str(tmp_path), "attempt": 1, "last": last}), out).run()
    found = re.findall(rb"^(?:tick \d|late)$", (tmp_path / "out").read_bytes(), re.M)
    assert [found[0], found[-1]] == lines and (last is None or len(found) == last)
