"""The YAML that discover writes: lines with what was found, and comments that say what a person must fill in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_./~$][A-Za-z0-9_./~$@+=:-]*(?:\[[0-9,-]+\])?")
_COMMENT_AT = 48


def scalar(value: Any) -> str:
    """A value as YAML reads it back: quoted wherever that could matter."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if _PLAIN.fullmatch(text) and not text.endswith(":") and text.lower() not in {"null", "~"}:
        return text
    return json.dumps(text, ensure_ascii=False)


def entry(key: str, value: Any, comment: str = "", *, indent: int = 0) -> str:
    """``key: value   # comment``"""
    line = f"{' ' * indent}{key}: {scalar(value)}"
    return f"{line.ljust(_COMMENT_AT)} # {comment}" if comment else line


def to_fill(text: str, *, indent: int = 0) -> str:
    """A line for a person: everything that has to be filled in can be searched for by its first word."""
    return f"{' ' * indent}# FILL IN {text}"


def section(value: Mapping[str, Any], indent: int = 0) -> list[str]:
    """A mapping that a description already had, in full."""
    lines: list[str] = []
    for key, item in value.items():
        lead = f"{' ' * indent}{key if _PLAIN.fullmatch(str(key)) else json.dumps(str(key))}:"
        if isinstance(item, Mapping):
            lines += [lead, *section(item, indent + 2)] if item else [f"{lead} {{}}"]
        elif isinstance(item, Sequence) and not isinstance(item, str):
            lines.append(f"{lead} {json.dumps(list(item), ensure_ascii=False)}")
        elif isinstance(item, str) and "\n" in item and item.endswith("\n") and item[:1] not in (" ", "\n"):
            lines += [f"{lead} |", *(f"{' ' * (indent + 2)}{line}" if line else "" for line in item.splitlines())]
        elif item is None:
            lines.append(f"{lead} null")
        else:
            lines.append(f"{lead} {scalar(item)}")
    return lines
