"""A node whose clock is wrong: every Python on it, the agent's too, by Debian's libfaketime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_site import PROGRAM, Site

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
PYTHON = Path("/usr/bin/python3").resolve()
WRONG = f"""#!/bin/bash
export LD_PRELOAD={LIBRARY} FAKETIME=+40s
exec -a "$0" /scratch/python "$@"
"""
TICK = "import time\nfor i in range(8):\n print('tick', i, flush=True)\n time.sleep(.5)\n"


@pytest.fixture
def ahead(testbed: Any) -> Iterator[str]:
    """node02, 40 s ahead of everybody else."""
    if LIBRARY is None:
        pytest.skip("needs Debian's faketime")
    testbed.exec("node02", ["cp", str(PYTHON), "/scratch/python"], user=None)
    testbed.exec("node02", ["tee", "/scratch/wrong"], user=None, stdin=WRONG.encode())
    testbed.exec("node02", ["chmod", "755", "/scratch/wrong"], user=None)
    testbed.exec("node02", ["mount", "--bind", "/scratch/wrong", str(PYTHON)], user=None)
    yield "node02"
    testbed.exec("node02", ["umount", str(PYTHON)], user=None)


@pytest.mark.full
def test_a_node_that_is_ahead(rack: Site, ahead: str) -> None:
    check = {f["name"]: f for f in rack.json("cluster", "check", "rack", code=8)}
    assert 38 < check[ahead]["facts"]["clock_offset_s"] < 42 and not check[ahead]["ok"]
    assert "its clock is +" in check[ahead]["problems"][0] and check["node01"]["ok"]
    rack.write("script.py", TICK)
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=""))
    run = rack.zerun("submit", "jobs/p.yaml", "--cluster", "rack", "--follow").stdout.strip()
    lines = [line.split("  ") for line in rack.zerun("logs", run).stdout.splitlines()]
    assert len(lines) == 32
    # Without allowing for it all of node02's lines would come after all of node01's.
    where = [node.endswith("@node02") for node, _ in lines]
    assert where.count(True) == 16 and any(where[:12]) and not all(where[20:])
    ticks = [int(text.split()[1]) for _, text in lines]
    assert all(abs(tick - at // 4) <= 3 for at, tick in enumerate(ticks)), ticks
