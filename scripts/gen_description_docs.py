"""Writes docs/descriptions.md from the models; ``--check`` only says whether it is stale (exit 1).

The keys, their defaults and what is not built come from the models; their meaning is said here, and a key
without one is an error, so that no key can appear undocumented.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from description_words import HEAD, MEANINGS, SECTIONS, UNITS
from pydantic import BaseModel

from launcher.specs.models import Cluster, Job

PAGE = Path(__file__).parent.parent / "docs" / "descriptions.md"


def page() -> str:
    lines = [HEAD, UNITS]
    for title, root in (("Clusters: `clusters/NAME.yaml`", Cluster), ("Jobs: `jobs/NAME.yaml`", Job)):
        lines += [f"## {title}", ""]
        for model in _models(root, set()):
            lines += _section(model, root)
    return "\n".join(lines).rstrip() + "\n"


def _models(model: type[BaseModel], seen: set[type]) -> Iterator[type[BaseModel]]:
    """A model, then those that its keys hold, in the order of the keys."""
    if model in seen:
        return
    seen.add(model)
    yield model
    for name in filter(None, _written(model).values()):
        for inner in _models_in(model.model_fields[name].annotation):
            yield from _models(inner, seen)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _written(model: Any) -> Mapping[str, str | None]:
    """Key as it is written → its field; None for a key that the model reads into several fields."""
    by_key = {field.alias or name: name for name, field in model.model_fields.items()}
    return {key: by_key.get(key) for key in model.keys(written=True)}


def _section(model: Any, root: type) -> list[str]:
    title, note = SECTIONS[model.__name__]
    lines = [] if model is root else [f"### {title}", ""]
    lines += [note, ""] if note else []
    lines += ["| key | accepts | default | meaning |", "|---|---|---|---|"]
    for key, name in _written(model).items():
        try:
            accepts, meaning = MEANINGS[f"{model.__name__}.{key}"]
        except KeyError:
            raise SystemExit(
                f"{model.__name__}.{key} has no meaning in scripts/description_words.py: say it there"
            ) from None
        default = _default(model.model_fields[name]) if name else "–"
        lines.append(f"| `{key}` | {accepts} | {default} | {meaning} |")
    refused = [f"`{key}`" + (f" ({instead})" if instead else "") for key, instead in model.NOT_BUILT.items()]
    if refused:
        lines += ["", f"Not built yet, and refused by name: {', '.join(refused)}."]
    return [*lines, ""]


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", ()) or isinstance(value, (BaseModel, Mapping)):
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(str(v) for v in value)}]`"
    return f"`{value}`"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            sys.stderr.write("docs/descriptions.md is stale: run make docs\n")
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
