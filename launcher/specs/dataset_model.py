"""Data sets that a cluster has, by the names that jobs call them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from ..contract.folder import is_safe_name
from . import values
from .description import Description
from .mistakes import Mistake, did_you_mean, wrong
from .values import FREEZE, MAPPING

ROLES = {"tokens": "train", "heldout": "heldout"}
"""What a job calls a file → what the table calls it."""


def _absolute_problem(path: str) -> str | None:
    if path.startswith("/") and not path.endswith("/"):
        return None
    return f"{path!r} is no absolute path of a file; accepted: /data/pile/train.bin"


def _digest_problem(digest: str) -> str | None:
    if re.fullmatch(r"xxh3:[0-9a-f]{32}|sha256:[0-9a-f]{64}", digest):
        return None
    return f"{digest!r} is no digest; accepted: xxh3: and 32 hex digits (xxhsum -H2), sha256: and 64 (sha256sum)"


AbsolutePath = Annotated[str, BeforeValidator(values.checked(_absolute_problem))]
Digest = Annotated[str, BeforeValidator(values.checked(_digest_problem))]


class Dataset(Description):
    """Token files on the cluster. A digest that stands here is held against the file before a job is queued."""

    train: AbsolutePath
    heldout: AbsolutePath | None = None
    train_digest: Digest | None = None
    heldout_digest: Digest | None = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if given.get("heldout_digest") is not None and given.get("heldout") is None:
            yield Mistake(("heldout_digest",), "heldout_digest goes with heldout", at_key=True)
        paths = [p for p in (given.get("train"), given.get("heldout")) if isinstance(p, str)]
        if len(paths) == 2 and paths[0].rpartition("/")[2] == paths[1].rpartition("/")[2]:
            yield Mistake(("heldout",), "train and heldout have one file name; data push could not tell them apart")


def _named(datasets: dict[str, Dataset]) -> dict[str, Dataset]:
    for name in datasets:
        if not is_safe_name(name):
            raise wrong(f"dataset {name!r}: a name has letters, digits, '.', '_', '-', first a letter or digit")
    return datasets


Datasets = Annotated[dict[str, Dataset], MAPPING, AfterValidator(_named), FREEZE]


def variable_part(name: str) -> str:
    """The part of a variable's name that stands for a data set: ``pile-v2`` is ``PILE_V2``."""
    return re.sub(r"[^A-Z0-9]", "_", name.upper())


def unknown_dataset(name: str, datasets: Mapping[str, Dataset]) -> str:
    known = f"known: {', '.join(datasets)}" if datasets else "it has none (datasets: in its description)"
    return f"no dataset is called {name!r}{did_you_mean(name, datasets)}; {known}"
