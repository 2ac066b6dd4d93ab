"""What real ranks measure is what the page of ZeRO shows, tables and picture: a part in `make test`, all in `full`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "scripts"))
    import gen_zero_docs
    import gen_zero_step

    yield gen_zero_docs, gen_zero_step
    sys.path[:] = before


def _rows(table: str, columns: int) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")][:columns] for line in table.splitlines()]


def test_the_page_shows_what_two_ranks_measure(scripts: Any) -> None:
    """State and messages; what buffers take besides is held by their own tests."""
    tables, _ = scripts
    page = tables.PAGE.read_text(encoding="utf-8")
    for name, table, columns in (("memory", tables.memory, 10), ("volume", tables.volume, 8)):
        shown = _rows(tables.shown(name, page), columns)
        measured = _rows(table((2,)), columns)
        assert len(measured) > 8 and all(row in shown for row in measured), name


def test_every_key_of_the_config_is_on_the_page(scripts: Any) -> None:
    tables, _ = scripts
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.shown("config", page) == tables.config(), "scripts/gen_zero_docs.py --config"


def test_every_row_of_the_page_holds_what_it_says(scripts: Any) -> None:
    tables, _ = scripts
    page = tables.PAGE.read_text(encoding="utf-8")
    memory = _rows(tables.shown("memory", page), 13)[2:]
    assert {(row[0], row[1]) for row in memory} == {(p, str(n)) for p in tables.ITEM for n in tables.WORLDS}
    for row in memory:
        state, together, closed = row[3:6], row[6], row[7]
        assert sum(int(n.replace(",", "")) for n in state) == int(together.replace(",", ""))
        assert together == closed and (row[1] == "1") <= (row[9] == "0.000 %") and float(row[9].rstrip(" %")) < 0.1
    for row in _rows(tables.shown("volume", page), 8)[2:]:
        assert row[5].endswith(f" = {row[4]}") and row[6] == row[7]
    for row in _rows(tables.shown("parity", page), 9)[2:]:
        assert float(row[4].strip("≤ ")) <= float(row[5]) and float(row[6].strip("≤ ")) <= float(row[7])
        assert row[8] == "yes"
    for row in _rows(tables.shown("reshard", page), 8)[2:]:
        assert row[4] == row[5] and row[7] == "yes"


def test_the_picture_shows_each_block_gathered_while_another_computes(scripts: Any) -> None:
    _, step = scripts
    drawn = step.PICTURE.read_text(encoding="utf-8")
    recorded, messages, _ = step.run_ranks(step.WORLD, step.step)[0]
    phases = {phase: at * recorded.share for at, phase in recorded.marks}
    gathers, reduces = ([m for m in messages if m[0] == kind] for kind in ("gather", "reduce"))
    for _, begin, end, what in messages:
        assert f"<title>{what}</title>" in drawn and recorded.start <= begin <= end
    backward = recorded.start + phases["backward"]
    again = [what for _, begin, _, what in gathers if begin >= backward]
    assert again and all(what in [w for _, b, _, w in gathers if b < backward] for what in again)
    assert all(begin >= backward for _, begin, _, _ in reduces)
    assert any(b < begin < e for _, begin, _, _ in reduces for _, b, e, _ in gathers), "sums pass beside gathers"


@pytest.mark.full
def test_all_tables_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen_zero_docs.py"), "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
