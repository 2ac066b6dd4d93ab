"""What every key of a job's description means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_serializer
from pydantic_core import PydanticCustomError

from . import units, values
from .cluster_model import PRECISIONS, Name
from .description import Description
from .environment import Env, Secrets
from .mistakes import Mistake, shown, wrong
from .values import LIST, Bytes, Count, FactoryName, Line, Positive, Seconds, SlurmTime, Whole, Word, choice


def _int(value: Any) -> int | None:
    """A whole number where there is one: for checks across fields, which say nothing about the field itself."""
    try:
        return values.whole(value)
    except PydanticCustomError:
        return None


class GptModel(Description):
    """The reference model. Learned positions up to ``seq_len``; ``vocab`` 256 is bytes."""

    kind: Annotated[Literal["gpt"], choice("gpt")]
    layers: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 10_000)]
    hidden: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**20)]
    heads: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**20)]
    seq_len: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**24)]
    vocab: Annotated[int, BeforeValidator(values.whole), values.at_least(2, 2**24)] = 256
    dropout: Annotated[float, BeforeValidator(values.number), values.between(0, 1)] = 0.0

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        hidden, heads = _int(given.get("hidden")), _int(given.get("heads"))
        if hidden and heads and hidden % heads:
            fits = [n for n in range(1, min(hidden, 1024) + 1) if hidden % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - heads))[:3])
            yield Mistake(
                ("heads",),
                f"hidden {hidden} cannot be divided among {heads} heads; accepted near it: {', '.join(map(str, near))}",
            )


class FactoryModel(Description):
    """A user's own model: ``factory(**options) -> nn.Module``, called on the meta device."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"weights": "load them inside the factory"}

    factory: FactoryName
    options: values.Options = Field(default_factory=lambda: values.freeze({}))
    loss: FactoryName | None = None


def _model_form(value: Any) -> str:
    if isinstance(value, FactoryModel):
        return "<factory>"
    return "<factory>" if isinstance(value, Mapping) and "factory" in value and "kind" not in value else "<gpt>"


ModelField = Annotated[
    Annotated[GptModel, Tag("<gpt>")] | Annotated[FactoryModel, Tag("<factory>")], Discriminator(_model_form)
]


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
    """Exactly one of ``text``, ``tokens`` and ``factory``."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"dataset": "write tokens: /absolute/path"}

    text: Annotated[Literal["python-stdlib"], choice("python-stdlib")] | None = None
    tokens: DataPath | None = None
    heldout: DataPath | None = None
    factory: FactoryName | None = None
    options: values.Options = Field(default_factory=lambda: values.freeze({}))

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        forms = [key for key in ("text", "tokens", "factory") if key in given]
        # A key that is refused as unknown or not built was meant to be the one.
        if len(forms) > 1 or (not forms and set(given) <= set(cls.model_fields)):
            what = " and ".join(forms) if forms else "none of them"
            yield Mistake((), f"data takes exactly one of text, tokens, factory, not {what}")
        if "heldout" in given and "tokens" not in given:
            yield Mistake(("heldout",), "heldout goes with tokens", at_key=True)


class Zero(Description):
    stage: Annotated[Literal[0, 1, 2, 3], choice(0, 1, 2, 3)]
    bucket: Annotated[Bytes, values.at_least(1)] = 25_000_000
    gradient_dtype: Annotated[Literal["fp32", "bf16", "fp16"], choice(*PRECISIONS)] = "fp32"


def _split(value: Mapping[str, Any]) -> Mapping[str, Any]:
    for pattern, kind in value.items():
        if not (isinstance(kind, str) and re.fullmatch(r"column(/[1-9][0-9]*)?|row|vocabulary", kind)):
            raise wrong(f"{pattern}: {shown(kind)} is not accepted; accepted: column, column/3, row, vocabulary")
    return value


class Parallel(Description):
    """``split`` says how a model of one's own is cut: patterns of its layers' names → column, row, vocabulary."""

    tensor: Count = 1
    split: Annotated[values.Options, AfterValidator(_split)] = Field(default_factory=lambda: values.freeze({}))


def _pair(value: Any) -> Any:
    if len(values.listed(value)) != 2:
        raise wrong(f"a list of {len(value)} was given; accepted: two numbers, [0.9, 0.95]")
    return tuple(value)


_Beta = Annotated[float, BeforeValidator(values.number), values.between(0, 1)]


def _numbers(value: Any) -> Any:
    """The value with numbers and booleans for their words, to be compared with a default."""
    if isinstance(value, (list, tuple)):
        return [_numbers(v) for v in value]
    try:
        return float({"true": "1", "false": "0"}.get(str(value).lower(), value))
    except (TypeError, ValueError):
        return value


class Optimizer(Description):
    """``clip`` is the global gradient norm, ``warmup`` steps of a linear rise; cosine falls to a tenth of ``lr``."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"groups": ""}

    kind: Annotated[Literal["adamw", "sgd"], choice("adamw", "sgd")] = "adamw"
    lr: Positive
    weight_decay: values.NotNegative = 0.0
    betas: Annotated[tuple[_Beta, _Beta], BeforeValidator(_pair)] = (0.9, 0.95)
    eps: Positive = 1e-8
    momentum: _Beta = 0.0
    nesterov: values.Flag = False
    clip: Positive | None = None
    warmup: Whole = 0
    schedule: Annotated[Literal["cosine", "constant"], choice("cosine", "constant")] = "cosine"

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        kind = given.get("kind", "adamw")
        for other, keys in (("adamw", ("betas", "eps")), ("sgd", ("momentum", "nesterov"))):
            for key in keys if kind in ("adamw", "sgd") and kind != other else ():
                # A description written out by us names every key: the default is no mistake.
                if key in given and _numbers(given[key]) != _numbers(cls.model_fields[key].default):
                    yield Mistake((key,), f"{key} goes with kind: {other}; this is {kind}", True)
        if kind == "sgd" and _numbers(given.get("nesterov")) == 1 and _numbers(given.get("momentum", 0)) == 0:
            yield Mistake(("nesterov",), "nesterov needs a momentum above 0")


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
        whole, micro = _int(given.get("global")), _int(given.get("micro"))
        if whole and micro and micro > 0 and whole % micro:
            yield Mistake(("global",), f"global {whole} is not a multiple of micro {micro}")


class Evaluate(Description):
    every: Count  # steps; the last step is always evaluated
    tokens: Count = 65536


def _every(value: Any) -> tuple[str, int]:
    """``50`` → every_steps, ``30min`` → every_s; ValueError in plain words."""
    steps = _int(value)
    if steps is None:
        try:
            seconds = units.duration(str(value))
        except ValueError:
            raise ValueError(
                f"{str(value)!r} is not accepted; accepted: a number of steps, or 90s, 30min, 2h"
            ) from None
        field, found = "every_s", seconds
    else:
        field, found = "every_steps", steps
    if found < 1:
        raise ValueError(f"{str(value)!r} is out of range; accepted: 1 step or 1 second, or more")
    return field, found


class Checkpoint(Description):
    """Written ``every: 50`` (steps) or ``every: 30min``; the newest ``keep`` stay (left out: all)."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {"foreign": ""}
    LOADER_ONLY: ClassVar[frozenset[str]] = frozenset({"every_steps", "every_s"})

    every_steps: Count | None = None
    every_s: Seconds | None = None
    keep: Count | None = None

    @classmethod
    def keys(cls, *, written: bool) -> list[str]:
        return ["every", *super().keys(written=written)]

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        if "every" not in given:
            return given
        rest = {k: v for k, v in given.items() if k != "every"}
        try:
            field, found = _every(given["every"])
        except ValueError:
            return rest  # mistakes() has said so
        return {**rest, field: found}

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "every" in given:
            try:
                _every(given["every"])
            except ValueError as problem:
                yield Mistake(("every",), str(problem))
        if len({"every", "every_steps", "every_s"} & set(given)) > 1:
            yield Mistake((), "every is given twice")

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        every = self.every_steps if self.every_s is None else f"{self.every_s}s"
        return {"every": every, "keep": self.keep}


class Code(Description):
    """What is shipped: ``root`` (left out: the job file's git root), without ``exclude``, at most ``limit``."""

    root: Line | None = None
    exclude: Annotated[tuple[Line, ...], LIST] = ()
    limit: Annotated[Bytes, values.at_least(1)] = 50_000_000


_STOP_SIGNALS = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2")


def _argv(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv or not argv[0]:
        raise wrong("argv is empty; accepted: [python, train.py]")
    return argv


class Program(Description):
    """The user's own script, instead of ``model`` … ``steps``. On ``stop_signal`` it may save and exit 75."""

    argv: Annotated[tuple[values.AnyText, ...], LIST, AfterValidator(_argv)]
    stop_signal: Annotated[str, choice(*_STOP_SIGNALS, same={f"SIG{s}": s for s in _STOP_SIGNALS})] = "TERM"
    stop_grace: Seconds = 30


_ENGINE_KEYS = ("model", "data", "zero", "optimizer", "batch", "steps")
_ENGINE_ONLY = (*_ENGINE_KEYS, "parallel", "precision", "evaluate", "recompute", "activations", "checkpoint", "seed")


def _slots(value: Any) -> int | Literal["all"]:
    if value == "all":
        return "all"
    found = _int(value)
    if found is None or found < 1:
        raise wrong(f"{shown(value)} is not accepted; accepted: all, or a number from 1")
    return found


def _recompute(value: Any) -> str | tuple[int, ...]:
    if value in ("none", "block"):
        return str(value)
    if isinstance(value, (list, tuple)) and value:
        blocks = [_int(item) for item in value]
        if len(set(blocks)) == len(blocks) and all(block is not None and block >= 0 for block in blocks):
            return tuple(sorted(block for block in blocks if block is not None))
    raise wrong(f"{shown(value)} is not accepted; accepted: none, block, or a list of blocks that counts from 0")


class Job(Description):
    """Either ``program``, or the engine's keys: ``model``, ``data``, ``zero``, ``optimizer``, ``batch``, ``steps``."""

    NOT_BUILT: ClassVar[Mapping[str, str]] = {
        "pool": "the cluster has one kind of node",
        "outputs": "logs, metrics and checkpoints are collected",
        "groups": "",
        "foreign": "",
    }

    name: Name
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
    batch: Batch | None = None
    steps: Count | None = None
    seed: Whole = 0
    evaluate: Evaluate | None = None
    recompute: Annotated[Literal["none", "block"] | tuple[int, ...], BeforeValidator(_recompute)] = "none"
    activations: Annotated[Literal["whole", "partitioned", "host"], choice("whole", "partitioned", "host")] = "whole"
    checkpoint: Checkpoint = Checkpoint()
    env: Env = Field(default_factory=lambda: values.freeze({}))
    secrets: Secrets = ()
    program: Program | None = None
    cluster: Word | None = None

    def unsaid(self) -> frozenset[str]:
        """The engine's keys, where a program takes its place."""
        return frozenset(_ENGINE_ONLY) if self.program is not None else frozenset()

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        if "program" in given:
            for key in _ENGINE_ONLY:
                if key in given:
                    yield Mistake((key,), f"{key!r} does not go with program: the program decides that itself", True)
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


def _training_mistakes(given: Mapping[str, Any]) -> Iterator[Mistake]:
    def part(key: str) -> Mapping[str, Any]:
        found = given.get(key)
        return found if isinstance(found, Mapping) else {}

    steps, warmup = _int(given.get("steps")), _int(part("optimizer").get("warmup"))
    if steps is not None and warmup is not None and warmup > steps:
        yield Mistake(("optimizer", "warmup"), f"warmup {warmup} is longer than steps {steps}")
    vocab = _int(part("model").get("vocab"))
    if part("data").get("text") is not None and vocab is not None and vocab < 256:
        yield Mistake(("model", "vocab"), f"vocab {vocab} is too small: text is read as bytes, which need 256")
    files = part("data").get("text") is not None or part("data").get("tokens") is not None
    options = part("data").get("options")
    if files and part("model").get("kind") is not None and options:
        yield Mistake(("data", "options"), "options go with data.factory, or with a model of your own", True)
    if files and part("model").get("factory") is not None and "seq_len" not in (options or {}):
        yield Mistake(
            ("data",),
            "a model of your own over token files needs their form: options: {seq_len: 128, vocab: 256}",
            True,
        )
    tensor, split = _int(part("parallel").get("tensor")) or 1, part("parallel").get("split")
    if part("model").get("factory") is not None and tensor > 1 and not split:
        said = "a model of your own is cut by parallel.split: names of its layers to column, row or vocabulary"
        yield Mistake(("parallel", "tensor"), said)
    if split and part("model").get("kind") is not None:
        yield Mistake(
            ("parallel", "split"), "split goes with a model of your own; the reference model knows its cuts", True
        )
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
    layers = _int(model.get("layers"))
    if layers is not None and isinstance(recompute, (list, tuple)):
        for at, item in enumerate(recompute):
            block = _int(item)
            if block is not None and block >= layers:
                yield Mistake(("recompute", at), f"block {block} is not there; accepted: 0 to {layers - 1}")
    if activations in ("partitioned", "host") and recompute == "none":
        yield Mistake(("activations",), f"activations: {activations} needs recompute: it moves what recompute stores")
    if activations == "partitioned" and (_int(parallel.get("tensor")) or 1) == 1:
        yield Mistake(("activations",), "activations: partitioned needs parallel.tensor above 1: its ranks share them")
