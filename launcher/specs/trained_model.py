"""What is trained: the reference model, or one of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from . import values
from .data_model import DataPath
from .description import Description
from .mistakes import Mistake
from .values import (
    FactoryName,
    choice,
    whole_or_none,
)


class GptModel(Description):
    """The reference model. Learned positions up to ``seq_len``; ``vocab`` 256 is bytes."""

    kind: Annotated[Literal["gpt"], choice("gpt")]
    layers: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 10_000)]
    hidden: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**20)]
    heads: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**20)]
    seq_len: Annotated[int, BeforeValidator(values.whole), values.at_least(1, 2**24)]
    vocab: Annotated[int, BeforeValidator(values.whole), values.at_least(2, 2**24)] = 256
    dropout: values.Fraction = 0.0
    weights: DataPath | None = None

    @classmethod
    def mistakes(cls, given: Mapping[str, Any]) -> Iterator[Mistake]:
        hidden, heads = whole_or_none(given.get("hidden")), whole_or_none(given.get("heads"))
        if hidden and heads and hidden % heads:
            fits = [n for n in range(1, min(hidden, 1024) + 1) if hidden % n == 0]
            near = sorted(sorted(fits, key=lambda n: abs(n - heads))[:3])
            yield Mistake(
                ("heads",),
                f"hidden {hidden} cannot be divided among {heads} heads; accepted near it: {', '.join(map(str, near))}",
            )


class FactoryModel(Description):
    """A user's own model: ``factory(**options) -> nn.Module``, called on the meta device."""

    factory: FactoryName
    options: values.Options = Field(default_factory=lambda: values.freeze({}))
    loss: FactoryName | None = None
    weights: DataPath | None = None


def _model_form(value: Any) -> str:
    if isinstance(value, FactoryModel):
        return "<factory>"
    return "<factory>" if isinstance(value, Mapping) and "factory" in value and "kind" not in value else "<gpt>"


ModelField = Annotated[
    Annotated[GptModel, Tag("<gpt>")] | Annotated[FactoryModel, Tag("<factory>")], Discriminator(_model_form)
]
