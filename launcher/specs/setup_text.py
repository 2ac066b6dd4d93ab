"""The text of ``setup:``, which knows where it stands, so that a line that fails on a node is told by its file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator

from .document import Document
from .values import Text, text

_BLOCK = re.compile(r":\s*\|[+-]?\s*(#.*)?$")


class SetupText(str):
    """``file`` is empty where nobody knows; ``line`` is that of the text's first line, None where lines of the file
    and of the text do not run side by side."""

    file: str = ""
    line: int | None = None


def _kept(value: Any) -> SetupText:
    found = SetupText(text(value))
    if isinstance(value, SetupText):
        found.file, found.line = value.file, value.line
    return found


Setup = Annotated[str, PlainValidator(_kept), PlainSerializer(str, return_type=str)]


def place_setup(document: Document, source: str) -> None:
    """Writes into the document's ``setup`` where it stands in ``source``, the text of its file."""
    value = document.tree.get("setup")
    if not isinstance(value, Text):
        return
    placed = SetupText(value)
    place = document.place(("setup",))
    placed.file = place.file
    lines = source.splitlines()
    if 0 < place.line <= len(lines):
        if _BLOCK.search(lines[place.line - 1]):
            placed.line = place.line + 1
        elif "\n" not in value.strip("\n"):
            placed.line = place.line
    document.tree["setup"] = placed
