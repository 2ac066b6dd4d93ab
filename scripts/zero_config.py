"""The table of docs/zero.md that says every key of ``ZeroEngine``'s config: from the dataclasses themselves, in the words
of docs/descriptions.md where a job's key is the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

from description_words import MEANINGS

from launcher.contract.train import SGD, AdamW, Units, Zero
from launcher.engine.config import EngineConfig

# ruff: noqa: E501  (a line a key reads better than a cut one)

OWN: dict[str, tuple[str, str, str]] = {
    "zero": ("`Zero`, or its keys", "every stage", "what is partitioned, and how messages travel"),
    "optimizer": ("`AdamW` or `SGD`, or the keys of one", "every stage", "a mapping with `momentum` is SGD, any other AdamW; a `kind`, `adamw` or `sgd`, may say which"),
    "accumulation": ("int, 1 or more", "every stage", "micro-batches a step: so many `backward`, then one `step`"),
    "zero.bucket_bytes": ("int, 1 or more", "every stage", "size of a message, in bytes (a job's `bucket`, where `25MB` is accepted)"),
    "zero.gradient_dtype": ("`fp32`, or `precision`", "every stage", "of accumulated gradients"),
    "zero.unit": ("`Units`, or one of its keys; or None", "every stage", "parameters that travel together; None: each block (a job's `block`)"),
    "zero.prefetch": ("int, 0 or more", "3; nothing below", "units gathered ahead of their use"),
    "zero.replicas": ("int, 1 or more", "every stage", "groups of neighbouring ranks, each of which holds everything once ([below](#replicas)); a number, `nodes` is a job's word"),
    "zero.unit.classes": ("list of str", "every stage", "modules of these classes, the outermost ones (a job's `class`)"),
    "zero.unit.names": ("list of str", "every stage", "modules whose names match (`layers.*.mlp`), the outermost ones"),
    "zero.unit.size_bytes": ("int or None", "every stage", "neighbouring modules up to so many bytes of parameters (a job's `size`)"),
    "optimizer.lr": ("float, above 0", "AdamW, SGD", "the rate until the loop sets `zero.lr`"),
    "optimizer.warmup": ("int, 0 or more", "a job's loop alone", "`step` never looks at it: the loop sets `zero.lr`"),
    "optimizer.schedule": ("`cosine` `constant`", "a job's loop alone", "the same"),
    "optimizer.lr_floor": ("float, 0 or more", "a job's loop alone", "the same: what of `lr` is left at the last step"),
    "optimizer.betas": ("2 floats, 0 to below 1", "AdamW", "as in `torch.optim.AdamW`"),
    "optimizer.eps": ("float, above 0", "AdamW", "the same"),
    "optimizer.nesterov": ("`True` `False`", "SGD", "as in `torch.optim.SGD`"),
    "optimizer.momentum": ("float, 0 to below 1", "SGD", "0 keeps no state"),
}  # fmt: skip
"""Key → type, where it does something, meaning. What is not here is in ``AT`` and in the words of a job's key."""

AT = {
    "precision": "every stage",
    "nonfinite": "every stage",
    "recompute": "every stage",
    "activations": "with `recompute`",
    "zero.stage": "2 ranks or more",
    "zero.reduce_every": "every stage",
    "zero.reshard": "3; nothing below",
    "zero.reduce_with": "0; `native` is refused above",
    "zero.overlap_gather": "1, 2; `True` is refused elsewhere",
    "zero.same_host": "on CPU",
    "optimizer.weight_decay": "AdamW, SGD",
    "optimizer.clip": "AdamW, SGD",
}
_JOBS = {"zero.": "Zero.", "optimizer.": "Optimizer.", "": "Job."}


def rows() -> list[list[object]]:
    """Key, type, default, where it does something, meaning."""
    found: dict[str, list[object]] = {}
    classes = (("", EngineConfig), ("zero.", Zero), ("zero.unit.", Units), ("optimizer.", AdamW), ("optimizer.", SGD))
    for prefix, cls in classes:
        for name, kind, default in _fields(cls):
            key = prefix + name
            if key in found:
                assert found[key][2] == default, f"{key} has two defaults"
                continue
            if key in OWN:
                accepts, at, meaning = OWN[key]
            else:
                words, meaning = MEANINGS[_JOBS[prefix] + name]
                accepts, at = (words if "`" in words and kind != "bool or None" else _text(kind)), AT[key]
                accepts += f", {words}" if kind.startswith("float") else ""
            found[key] = [f"`{key}`", accepts, default, at, meaning]
    return list(found.values())


def _text(kind: str) -> str:
    return {"bool": "`True` `False`", "bool or None": "`True` `False` or None"}.get(kind, kind)


def _fields(cls: Any) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        missing = field.default is dataclasses.MISSING
        yield field.name, _kind(hints[field.name]), "required" if missing else f"`{_shown(field.default)}`"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value).replace("'", '"')


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Union:
        return " or ".join("None" if a is type(None) else _kind(a) for a in args)
    if origin is tuple:
        return f"list of {args[0].__name__}" if args[1] is Ellipsis else f"{len(args)} {args[0].__name__}s"
    return str(annotation.__name__)
