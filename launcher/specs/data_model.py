"""Where samples come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from . import values
from .dataset_model import variable_part
from .description import Description
from .mistakes import Mistake
from .values import (
    LIST,
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


_FORMS = ("text", "tokens", "dataset", "datasets", "factory")
_OF_A_MODEL = ("text", "factory", "options")


class Data(Description):
    """Exactly one of ``text``, ``tokens``, ``dataset``, ``datasets`` and ``factory``; a program takes files alone."""

    text: Annotated[Literal["python-stdlib"], choice("python-stdlib")] | None = None
    tokens: DataPath | None = None
    heldout: DataPath | None = None
    dataset: Word | None = None  # a name in the cluster's datasets
    datasets: Annotated[tuple[Word, ...], LIST] = ()  # several of them, for a program
    stage_to: Annotated[Literal["node_local"], choice("node_local")] | None = None
    factory: FactoryName | None = None
    options: values.Options = Field(default_factory=lambda: values.freeze({}))

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        forms = [key for key in _FORMS if given.get(key) not in (None, (), [])]
        # A key that is refused as unknown or not built was meant to be the one.
        if len(forms) > 1 or (not forms and set(given) <= set(cls.model_fields)):
            what = " and ".join(forms) if forms else "none of them"
            yield Mistake((), f"data takes exactly one of {', '.join(_FORMS)}, not {what}")
        if "heldout" in given and "tokens" not in given:
            yield Mistake(("heldout",), "heldout goes with tokens", at_key=True)
        if "stage_to" in given and not {"tokens", "dataset", "datasets"} & set(forms):
            yield Mistake(("stage_to",), "stage_to goes with tokens or dataset: files that can be copied", at_key=True)
        yield from _twice(given.get("datasets"))


def _twice(names: Any) -> Iterator[Mistake]:
    """Names of data sets that would go by one variable."""
    known: dict[str, str] = {}
    for at, name in enumerate(names if isinstance(names, (list, tuple)) else ()):
        if not isinstance(name, str):
            continue  # the field's own type says so
        part = variable_part(name)
        if part in known:
            said = "is named twice" if known[part] == name else f"and {known[part]} would both be ZERUN_DATA_{part}_…"
            yield Mistake(("datasets", at), f"{name} {said}")
        known.setdefault(part, name)


def not_of_a_program(data: Any) -> Iterator[Mistake]:
    """What ``data`` of a job with a program says that only a model of the engine reads; of a model, the other way."""
    for key in _OF_A_MODEL:
        if isinstance(data, Mapping) and data.get(key) not in (None, {}):
            said = "does not go with program; accepted: tokens, heldout, dataset, datasets, stage_to"
            yield Mistake(("data", key), f"{key!r} {said}", at_key=True)
