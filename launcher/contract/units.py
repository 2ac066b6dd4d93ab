"""Which parameters form a unit: what stage 3 gathers together. Engine and planner ask this file.

A rule (``train.Units``) chooses modules, the outermost ones that match; what lies in a chosen module is its unit's.

==========  ===================================================================================================
no rule     each block, a child of an outermost list of modules, is a unit
classes     each module of one of these classes (or of one derived from it)
names       each module whose name matches one of these patterns; ``*`` stands for any characters, dots too
size_bytes  neighbouring blocks, filled up to the size; a block above it is divided into its own modules, unless
            it holds parameters itself. A model without lists is divided from the top.
==========  ===================================================================================================

What is in no chosen module stays gathered from forward to backward, as do a weight that two units share (tied) and
one that is used outside the module which holds it (``zero_kept``, which a model says itself). Such parameters form
runs in the order of modules: embeddings before the blocks, the last norm after them.
"""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .partition import ITEM_BYTES, Parameter
from .train import Units


class Module(NamedTuple):
    """A module of the model, in the order in which modules are built; parents stand before their children.

    ``kinds`` names its class, then those it derives from.
    """

    name: str
    kinds: Tuple[str, ...]


class Tree(NamedTuple):
    """A model as a rule sees it. ``blocks``: children of outermost lists of modules; ``kept``: parameters that are
    used outside the module that holds them."""

    modules: Sequence[Module]
    blocks: Sequence[str]
    kept: Sequence[str] = ()


class Grouped(NamedTuple):
    """A unit to be: ``modules`` use it, none: it stays gathered."""

    name: str
    parameters: List[Parameter]
    modules: Tuple[str, ...]


def group(parameters: Iterable[Parameter], tree: Tree, rule: Optional[Units], *, tensor: int = 1) -> List[Grouped]:
    """The units of ``parameters``, which come in module order, under ``rule``.

    Raises ``ValueError`` for a rule that chooses nothing.
    """
    parameters = list(parameters)
    members = _members(parameters, tree, rule, tensor)
    home = {module: row for row in members for module in row}
    taken = {row[0] for row in members}
    found: Dict[str, Grouped] = {}
    run: Optional[str] = None
    for parameter in parameters:
        owners = {_owner(alias, home) for alias in (parameter.name, *parameter.tied)}
        owner = owners.pop() if len(owners) == 1 and parameter.name not in tree.kept else None
        if owner is None:
            run = run or _run_name(parameter.name, taken)
            name, modules = run, ()  # type: Tuple[str, Tuple[str, ...]]
        else:
            run, name, modules = None, owner[0], owner
        found.setdefault(name, Grouped(name, [], modules)).parameters.append(parameter)
    return list(found.values())


def _owner(name: str, home: Dict[str, Tuple[str, ...]]) -> Optional[Tuple[str, ...]]:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in home:
            return home[name]
    return None


def _run_name(parameter: str, taken: "set[str]") -> str:
    """A name for a run of parameters outside units: its first module's, made unlike the others'."""
    base = parameter.rpartition(".")[0] or parameter
    name, count = base, 2
    while name in taken:
        name, count = f"{base}-{count}", count + 1
    taken.add(name)
    return name


# --- the modules that a rule chooses -------------------------------------------------------------------


def _members(parameters: Sequence[Parameter], tree: Tree, rule: Optional[Units], tensor: int) -> List[Tuple[str, ...]]:
    """Of each unit the modules that use it, in module order."""
    if rule is None:
        return [(name,) for name in tree.blocks]
    inside = _bytes_inside(parameters, tensor)
    candidates = [m for m in tree.modules if m.name in inside and m.name]
    if rule.size_bytes is not None:
        return list(_filled(tree, inside, {p.name.rpartition(".")[0] for p in parameters}, rule.size_bytes))
    for what, wanted, known in (
        ("class", rule.classes, sorted({k for m in candidates for k in m.kinds})),
        ("names", rule.names, [m.name for m in candidates]),
    ):
        for word in wanted:
            if not any(fnmatchcase(k, word) if what == "names" else k == word for k in known):
                closest = difflib.get_close_matches(word, known, n=3, cutoff=0.3) or known[:3]
                near = f"closest: {', '.join(closest)}" if closest else "inside the model there is none"
                raise ValueError(f"zero.unit: {what}: {word!r} matches no module with parameters; {near}")
    chosen: List[Tuple[str, ...]] = []
    outer: "set[str]" = set()
    for module in candidates:
        matches = set(rule.classes) & set(module.kinds) or any(fnmatchcase(module.name, p) for p in rule.names)
        if matches and not _is_inside(module.name, outer):
            outer.add(module.name)
            chosen.append((module.name,))
    return chosen


def _is_inside(name: str, outer: "set[str]") -> bool:
    while "." in name:
        name = name.rpartition(".")[0]
        if name in outer:
            return True
    return False


def _bytes_inside(parameters: Sequence[Parameter], tensor: int) -> Dict[str, int]:
    """Bytes of the parameters in each module, by its name; the model itself is ``""``."""
    found: Dict[str, int] = {}
    for parameter in parameters:
        count = parameter.local_numel(tensor) * ITEM_BYTES[parameter.dtype]
        name = parameter.name
        while name:
            name = name.rpartition(".")[0]
            found[name] = found.get(name, 0) + count
    return found


def _filled(tree: Tree, inside: Dict[str, int], holders: "set[str]", size: int) -> Iterator[Tuple[str, ...]]:
    children: Dict[str, List[str]] = {}
    for module in tree.modules:
        if module.name and module.name in inside:
            children.setdefault(module.name.rpartition(".")[0], []).append(module.name)
    rows: Dict[str, List[str]] = {}
    for block in tree.blocks:
        rows.setdefault(block.rpartition(".")[0], []).append(block)
    for row in rows.values() if rows else [children.get("", [])]:
        yield from _fill(row, children, inside, holders, size)


def _fill(
    row: Sequence[str], children: Dict[str, List[str]], inside: Dict[str, int], holders: "set[str]", size: int
) -> Iterator[Tuple[str, ...]]:
    """Neighbours up to ``size``; what is larger is divided, and stands alone where it cannot be."""
    current: List[str] = []
    total = 0
    for name in row:
        count = inside[name]
        if current and total + count > size:
            yield tuple(current)
            current, total = [], 0
        if count > size and name not in holders and children.get(name):
            yield from _fill(children[name], children, inside, holders, size)
            continue
        current.append(name)
        total += count
    if current:
        yield tuple(current)


# --- the reference GPT --------------------------------------------------------------------------------


def gpt_tree(layers: int, tensor: int = 1) -> Tree:
    """The reference GPT's modules with parameters, without torch; a test holds it against the real ones."""
    column, row = (("ColumnLinear",), ("RowLinear",)) if tensor > 1 else (("Linear",), ("Linear",))
    embedding = ("VocabularyEmbedding",) if tensor > 1 else ("Embedding",)

    def own(kind: str) -> Tuple[str, ...]:
        return (f"Tensor{kind}", kind) if tensor > 1 else (kind,)

    modules = [Module("", own("GPT")), Module("embedding", embedding), Module("position", ("Embedding",))]
    modules.append(Module("blocks", ("ModuleList",)))
    for number in range(layers):
        block = f"blocks.{number}"
        modules += [
            Module(block, own("Block")),
            Module(f"{block}.norm1", ("LayerNorm",)),
            Module(f"{block}.attention", own("Attention")),
            Module(f"{block}.attention.qkv", column),
            Module(f"{block}.attention.out", row),
            Module(f"{block}.norm2", ("LayerNorm",)),
            Module(f"{block}.mlp", own("MLP")),
            Module(f"{block}.mlp.up", column),
            Module(f"{block}.mlp.down", row),
        ]
    modules.append(Module("norm", ("LayerNorm",)))
    return Tree(modules, [f"blocks.{number}" for number in range(layers)], ("embedding.weight",))
