"""Tensor parallelism for a model of one's own: a map of its layers' names to how they are cut.

::

    parallel:
      tensor: 2
      split: {"layers.*.qkv": column/3, "layers.*.up": column, "layers.*.out": row, "layers.*.down": row,
              "words": vocabulary, "head": vocabulary}

The layers are replaced in the model that the factory built; all others stay whole on every rank. Between a
column layer and the row layer behind it only a part of the width is there, so the model must take sizes
from its tensors (``view(b, s, heads, -1)`` with ``heads`` left to -1), not from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from ...contract.errors import UsageError
from ..comm import Comm
from .layers import ColumnLinear, RowLinear, VocabularyEmbedding, VocabularyLinear, split_of


def split_layers(model: nn.Module, plan: Mapping[str, str], comm: Comm) -> None:
    """Replaces the layers that ``plan`` names (patterns as in a shell) by slices for this rank of ``comm``.

    Raises :class:`UsageError` for an empty plan, a name that nothing has, a layer that cannot be cut so, or
    sizes that the degree does not divide.
    """
    if not plan:
        raise UsageError(
            f"parallel.tensor: {comm.size} does not know how to cut this model",
            hint="parallel.split maps the names of its layers to column, row or vocabulary",
        )
    layers = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, str] = {}
    for pattern, kind in plan.items():
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(f"parallel.split: no layer of the model is called {pattern!r}")
        for name in names:
            if chosen.setdefault(name, kind) != kind:
                raise UsageError(f"parallel.split: {name} is to be both {chosen[name]} and {kind}")
    _refuse_halves_of_tied(model, layers, chosen)
    slices: dict[int, nn.Parameter] = {}  # of each whole parameter that was cut, so that tied ones stay tied
    for name, kind in chosen.items():
        whole = layers[name]
        cut = _cut(name, whole, kind, comm)
        for key, parameter in list(cut.named_parameters(recurse=False)):
            if split_of(parameter) is not None:
                cut.register_parameter(key, slices.setdefault(id(getattr(whole, key)), parameter))
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, cut)


def _cut(name: str, whole: nn.Module, kind: str, comm: Comm) -> nn.Module:
    how, _, parts = kind.partition("/")
    if how not in ("column", "row", "vocabulary") or (
        parts and (how != "column" or not parts.isdigit() or not int(parts))
    ):
        raise UsageError(f"parallel.split: {name}: {kind!r} is not known; accepted: column, column/3, row, vocabulary")
    try:
        if how == "vocabulary" and type(whole) is nn.Embedding:
            return VocabularyEmbedding(whole, comm)
        if type(whole) is nn.Linear:
            if how == "column":
                return ColumnLinear(whole, comm, parts=int(parts or 1))
            return RowLinear(whole, comm) if how == "row" else VocabularyLinear(whole, comm)
    except ValueError as error:
        raise UsageError(f"parallel.split: {name}: {error}") from error
    raise UsageError(f"parallel.split: {name} is a {type(whole).__name__}, which cannot be cut by {kind}")


def _refuse_halves_of_tied(model: nn.Module, layers: Mapping[str, nn.Module], chosen: Mapping[str, str]) -> None:
    """A tied weight is cut in all of its places in the same way, or in none."""
    places: dict[int, dict[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = name.rpartition(".")[0]
        places.setdefault(id(parameter), {})[layer] = chosen.get(layer, "left whole")
    for found in places.values():
        if len(set(found.values())) > 1:
            told = ", ".join(f"{layer} {kind}" for layer, kind in found.items())
            raise UsageError(f"parallel.split: one weight is tied between layers that are cut differently: {told}")
