"""What every key of a job's description means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from . import values
from .checkpoint_model import Checkpoint, Pattern
from .cluster_model import Name
from .data_model import Data, not_of_a_program
from .description import Description
from .device_model import PRECISIONS
from .environment import Env, Secrets
from .mistakes import Mistake, shown, wrong
from .optimizer_model import Optimizer, group_mistakes
from .program_model import Program
from .setup_text import Setup
from .trained_model import ModelField
from .values import (
    LIST,
    Bytes,
    Count,
    FactoryName,
    Line,
    SlurmTime,
    Whole,
    Word,
    choice,
    whole_or_none,
)
from .zero_model import Zero


def _split(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for pattern, kind in value.items():
        if not (isinstance(kind, str) and re.fullmatch(r"column(/[1-9][0-9]*)?|row|vocabulary", kind)):
            raise wrong(f"{pattern}: {shown(kind)} is not accepted; accepted: column, column/3, row, vocabulary")
    return value


class Parallel(Description):
    """``split`` says how a model of one's own is cut: patterns of its layers' names → column, row, vocabulary."""

    tensor: Count = 1
    split: Annotated[values.Options, AfterValidator(_split)] = Field(default_factory=lambda: values.freeze({}))


class Batch(Description):
    """Samples: ``global`` a step and ``micro`` a rank at once; accumulation is derived, or written instead."""

    global_: Annotated[Count | None, Field(alias="global")] = None
    micro: Count
    accumulation: Count | None = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "global" in given and "accumulation" in given:
            yield Mistake(("accumulation",), "write global or accumulation, not both: one follows from the other", True)
        if "global" not in given and "accumulation" not in given:
            yield Mistake((), "batch needs global or accumulation beside micro")
        whole, micro = whole_or_none(given.get("global")), whole_or_none(given.get("micro"))
        if whole and micro and micro > 0 and whole % micro:
            yield Mistake(("global",), _no_multiple(whole, micro))


def _no_multiple(whole: int, micro: int) -> str:
    """The nearest that do: how many ranks there are is known to the planner alone, which says the rest."""
    below = whole // micro * micro
    near = f"{below} and {below + micro}" if below else str(micro)
    divides = next(m for m in range(min(whole, micro, 4096), 0, -1) if whole % m == 0)
    return f"global {whole} is not a multiple of micro {micro}; accepted near it: {near}, or micro {divides}"


class Evaluate(Description):
    every: Count  # steps; the last step is always evaluated
    tokens: Count = 65536


class Code(Description):
    """What is shipped: ``root`` (left out: the job file's git root), without ``exclude``, at most ``limit``.

    ``include`` are files that travel although git or ``.zerunignore`` ignores them.
    """

    root: Line | None = None
    include: Annotated[tuple[Line, ...], LIST] = ()
    exclude: Annotated[tuple[Line, ...], LIST] = ()
    limit: Annotated[Bytes, values.at_least(1)] = 50_000_000


_ENGINE_KEYS = ("model", "data", "zero", "optimizer", "batch", "steps")
_ENGINE_ONLY = (
    *_ENGINE_KEYS,
    "groups",
    "parallel",
    "precision",
    "evaluate",
    "recompute",
    "activations",
    "nonfinite",
    "checkpoint",
    "seed",
)


def _slots(value: Any) -> int | Literal["all"]:
    if value == "all":
        return "all"
    found = whole_or_none(value)
    if found is None or found < 1:
        raise wrong(f"{shown(value)} is not accepted; accepted: all, or a number from 1")
    return found


def _recompute(value: Any) -> str | tuple[int, ...]:
    if value in ("none", "block"):
        return str(value)
    if isinstance(value, (list, tuple)) and value:
        blocks = [whole_or_none(item) for item in value]
        if len(set(blocks)) == len(blocks) and all(block is not None and block >= 0 for block in blocks):
            return tuple(sorted(block for block in blocks if block is not None))
    raise wrong(f"{shown(value)} is not accepted; accepted: none, block, or a list of blocks that counts from 0")


class Job(Description):
    """Either ``program`` (``data`` may stand beside it), or the engine's keys: ``model``, ``data``, ``zero``,
    ``optimizer``, ``batch``, ``steps``."""

    name: Name
    pool: Word | None = None
    nodes: Count = 1
    slots_per_node: Annotated[int | Literal["all"], BeforeValidator(_slots)] = "all"
    time: SlurmTime | None = None
    code: Code = Code()
    model: ModelField | None = None
    data: Data | None = None
    zero: Zero | None = None
    parallel: Parallel = Parallel()
    precision: Annotated[Literal["fp32", "bf16", "fp16"], choice(*PRECISIONS)] = "fp32"
    optimizer: Optimizer | None = None
    groups: FactoryName | None = None
    batch: Batch | None = None
    steps: Count | None = None
    seed: Whole = 0
    evaluate: Evaluate | None = None
    recompute: Annotated[Literal["none", "block"] | tuple[int, ...], BeforeValidator(_recompute)] = "none"
    activations: Annotated[Literal["whole", "partitioned", "host"], choice("whole", "partitioned", "host")] = "whole"
    nonfinite: Annotated[Literal["stop", "skip"], choice("stop", "skip")] = "stop"
    checkpoint: Checkpoint = Checkpoint()
    setup: Setup = ""
    env: Env = Field(default_factory=lambda: values.freeze({}))
    secrets: Secrets = ()
    outputs: Annotated[tuple[Pattern, ...], LIST] = ()
    program: Program | None = None
    cluster: Word | None = None
    tags: Annotated[tuple[Name, ...], LIST] = ()

    def unsaid(self) -> frozenset[str]:
        """The engine's keys, where a program takes its place."""
        if self.program is None:
            return frozenset()
        said = {"checkpoint": self.checkpoint.foreign, "data": self.data}
        return frozenset(_ENGINE_ONLY) - {key for key, value in said.items() if value is not None}

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "program" in given:
            yield from not_of_a_program(given.get("data"))
            for key in _ENGINE_ONLY:
                if key in given and key != "data":
                    yield from _not_with_program(key, given[key])
        elif lacking := [key for key in _ENGINE_KEYS if key not in given]:
            if len(lacking) == len(_ENGINE_KEYS):
                yield Mistake((), f"the job trains nothing: write {', '.join(_ENGINE_KEYS)}, or program")
            else:
                yield from (Mistake((key,), f"{key!r} is missing") for key in lacking)
        yield from _training_mistakes(given)
        env, secrets = given.get("env"), given.get("secrets")
        if isinstance(secrets, (list, tuple)):
            for at, name in enumerate(secrets):
                if not isinstance(name, str):
                    continue  # the field's own type says so
                if isinstance(env, Mapping) and name in env:
                    yield Mistake(("secrets", at), f"{name} stands under env too; a secret comes from your environment")
                if name in secrets[:at]:
                    yield Mistake(("secrets", at), f"{name} is named twice")


def _not_with_program(key: str, section: Any) -> Iterator[Mistake]:
    """A program saves when and how it likes; where, it may say."""
    said = "does not go with program: the program decides that itself"
    if key != "checkpoint":
        yield Mistake((key,), f"{key!r} {said}", True)
        return
    written = section if isinstance(section, Mapping) else {}  # of another type: the section itself says so
    for inner in ("every", "every_steps", "every_s", "keep", "background"):
        if written.get(inner) is not None:
            yield Mistake((key, inner), f"{inner!r} {said}; foreign says where it saves", True)
    if isinstance(section, Mapping) and section.get("foreign") is None and not set(section) & {"every", "keep"}:
        yield Mistake((key,), "checkpoint of a program needs foreign: the pattern of what it saves", True)


def _training_mistakes(given: Mapping[str, Any]) -> Iterator[Mistake]:
    def part(key: str) -> Mapping[str, Any]:
        found = given.get(key)
        return found if isinstance(found, Mapping) else {}

    steps, warmup = whole_or_none(given.get("steps")), whole_or_none(part("optimizer").get("warmup"))
    if steps is not None and warmup is not None and warmup > steps:
        yield Mistake(("optimizer", "warmup"), f"warmup {warmup} is longer than steps {steps}")
    vocab = whole_or_none(part("model").get("vocab"))
    if part("data").get("text") is not None and vocab is not None and vocab < 256:
        yield Mistake(("model", "vocab"), f"vocab {vocab} is too small: text is read as bytes, which need 256")
    files = any(part("data").get(key) is not None for key in ("text", "tokens", "dataset"))
    options = part("data").get("options")
    if files and part("model").get("kind") is not None and options:
        yield Mistake(("data", "options"), "options go with data.factory, or with a model of your own", True)
    if files and part("model").get("factory") is not None and "seq_len" not in (options or {}):
        yield Mistake(
            ("data",),
            "a model of your own over token files needs their form: options: {seq_len: 128, vocab: 256}",
            True,
        )
    tensor, split = whole_or_none(part("parallel").get("tensor")) or 1, part("parallel").get("split")
    if part("model").get("factory") is not None and tensor > 1 and not split:
        said = "a model of your own is cut by parallel.split: names of its layers to column, row or vocabulary"
        yield Mistake(("parallel", "tensor"), said)
    if split and part("model").get("kind") is not None:
        yield Mistake(
            ("parallel", "split"), "split goes with a model of your own; the reference model knows its cuts", True
        )
    if given.get("program") is None and part("data").get("datasets"):
        yield Mistake(("data", "datasets"), "datasets go with program; a model reads one: dataset", at_key=True)
    yield from group_mistakes(part("optimizer"), part("model"), given.get("groups"))
    if given.get("program") is None and part("checkpoint").get("foreign") is not None:
        yield Mistake(("checkpoint", "foreign"), "foreign goes with program: the engine saves its own", at_key=True)
    yield from _activation_mistakes(given, part("model"), part("parallel"))
    if (
        given.get("evaluate") is not None
        and part("data").get("tokens") is not None
        and part("data").get("heldout") is None
    ):
        yield Mistake(("evaluate",), "evaluate needs data.heldout beside data.tokens", True)


def _activation_mistakes(
    given: Mapping[str, Any], model: Mapping[str, Any], parallel: Mapping[str, Any]
) -> Iterator[Mistake]:
    """What is stored for recomputation can be partitioned or moved only where something is recomputed."""
    recompute, activations = given.get("recompute", "none"), given.get("activations", "whole")
    layers = whole_or_none(model.get("layers"))
    if layers is not None and isinstance(recompute, (list, tuple)):
        for at, item in enumerate(recompute):
            block = whole_or_none(item)
            if block is not None and block >= layers:
                yield Mistake(("recompute", at), f"block {block} is not there; accepted: 0 to {layers - 1}")
    if activations in ("partitioned", "host") and recompute == "none":
        yield Mistake(("activations",), f"activations: {activations} needs recompute: it moves what recompute stores")
    if activations == "partitioned" and (whole_or_none(parallel.get("tensor")) or 1) == 1:
        yield Mistake(("activations",), "activations: partitioned needs parallel.tensor above 1: its ranks share them")
