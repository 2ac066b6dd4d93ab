"""Where samples come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from . import values
from .description import Description
from .mistakes import Mistake
from .values import (
    FactoryName,
    Word,
    choice,
)


def _data_path_problem(path: str) -> str | None:
    if path.startswith(("~", "$")):
        return f"{path!r} is not a plain path; accepted: absolute on the cluster, or relative inside the shipped code"
    if not path.startswith("/"):
        depth = 0
        for part in PurePosixPath(path).parts:
            depth += -1 if part == ".." else 1
            if depth < 0:
                return f"{path!r} leaves the shipped code; accepted: a path inside it, or absolute on the cluster"
    return None


DataPath = Annotated[str, BeforeValidator(values.checked(_data_path_problem))]


class Data(Description):
    """Exactly one of ``text``, ``tokens``, ``dataset`` and ``factory``."""

    text: Annotated[Literal["python-stdlib"], choice("python-stdlib")] | None = None
    tokens: DataPath | None = None
    heldout: DataPath | None = None
    dataset: Word | None = None  # a name in the cluster's datasets
    stage_to: Annotated[Literal["node_local"], choice("node_local")] | None = None
    factory: FactoryName | None = None
    options: values.Options = Field(default_factory=lambda: values.freeze({}))

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        forms = [key for key in ("text", "tokens", "dataset", "factory") if key in given]
        # A key that is refused as unknown or not built was meant to be the one.
        if len(forms) > 1 or (not forms and set(given) <= set(cls.model_fields)):
            what = " and ".join(forms) if forms else "none of them"
            yield Mistake((), f"data takes exactly one of text, tokens, dataset, factory, not {what}")
        if "heldout" in given and "tokens" not in given:
            yield Mistake(("heldout",), "heldout goes with tokens", at_key=True)
        if "stage_to" in given and not {"tokens", "dataset"} & set(given):
            yield Mistake(("stage_to",), "stage_to goes with tokens or dataset: files that can be copied", at_key=True)
