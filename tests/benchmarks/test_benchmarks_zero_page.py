"""docs/zero.md sends a reader who knows the paper to places that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "zero.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "launcher"


def _table(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_each_term_of_the_paper_is_at_its_place() -> None:
    rows = _table("The paper's terms")
    terms = " ".join(row[0] for row in rows)
    for term in ("Ψ", "N_d", "P_os", "P_os+g", "P_os+g+p", "K", "P_a", "P_a+cpu", "C_B", "M_D", "volume"):
        assert term in terms
    for term, _, place in rows:
        words = re.findall(r"`([^`]+)`", place)
        files = [PACKAGE / word for word in words if word.endswith(".py")]
        assert files and all(file.is_file() for file in files), term
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for word in words:
            name = re.match(r"[A-Za-z_.]+", word)
            if word.endswith(".py") or ":" in word or name is None:
                continue
            for part in name[0].strip(".").split("."):
                assert re.search(rf"\b{part}\b", text), (term, part)


def test_commands_name_tests_that_exist() -> None:
    for path in re.findall(r"\b(?:tests|benchmarks|jobs)/[\w/]+\.py", PAGE):
        assert (ROOT / path).is_file(), path


def test_every_file_of_the_phases_exists() -> None:
    for path in re.findall(r"`((?:engine|contract|planning)/[\w/]+\.py)`", PAGE):
        assert (PACKAGE / path).is_file(), path
