"""YAML text → a tree of text exactly as it was typed, and where each key and value stands.

Only YAML's structure is used: mappings, lists and scalars. What a scalar means is decided by the key it
stands under, so ``partition: NO``, ``account: 0123`` and ``time: 1:30:00`` mean what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ..contract.errors import Problem
from .mistakes import Loc
from .values import Text

MAX_VALUES = 200_000
_STANDARD = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(
    _STANDARD + name for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "merge", "value")
)


class Place(NamedTuple):
    """Where something stands. ``text_column``: column of the text's first character, where text stands unbroken."""

    file: str
    line: int
    column: int
    text_column: int | None = None

    def problem(self, message: str, offset: int | None = None) -> Problem:
        column = self.column
        if offset is not None and self.text_column is not None:
            column = self.text_column + offset
        return Problem(self.file, self.line, column, message)


@dataclass
class Document:
    """``tree`` holds dicts, lists, :class:`Text` and None. ``keys`` and ``values`` say where paths stand."""

    file: str
    tree: dict[str, Any] = field(default_factory=dict)
    keys: dict[Loc, Place] = field(default_factory=dict)
    values: dict[Loc, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    refused: set[Loc] = field(default_factory=set)  # values that were told of and left out of the tree

    def place(self, loc: Loc, *, at_key: bool = False) -> Place:
        """Where ``loc`` stands, or the nearest thing around it that does."""
        first, second = (self.keys, self.values) if at_key else (self.values, self.keys)
        for length in range(len(loc), -1, -1):
            part = loc[:length]
            found = first.get(part) or second.get(part)
            if found is not None:
                # A mapping that lacks something is best shown by its key.
                return self.keys.get(part, found) if length < len(loc) else found
        return Place(self.file, 0, 0)

    def holds(self, loc: Loc) -> bool:
        """Whether ``loc`` is written."""
        return loc in self.keys or loc in self.values

    def is_set(self, loc: Loc) -> bool:
        """Whether what ``loc`` says comes from a ``--set``."""
        return self.place(loc).file != self.file

    def wrong(self, loc: Loc, message: str, *, at_key: bool = False, offset: int | None = None) -> None:
        self.problems.append(self.place(loc, at_key=at_key).problem(message, offset))


def read(source: bytes | str, file: str) -> Document:
    """Reads one document. Mistakes of form are in ``problems``; the tree holds what could be read."""
    document = Document(file)
    text = _decoded(source, document)
    if text is None:
        return document
    root = _composed(text, document)
    if root is None:
        return document
    if not isinstance(root, MappingNode):
        document.problems.append(_place(document.file, root).problem("lines of 'key: value' were expected"))
        return document
    document.values[()] = _place(file, root)
    tree = _Walk(document).value(root, ())
    document.tree = tree if isinstance(tree, dict) else {}
    return document


def _decoded(source: bytes | str, document: Document) -> str | None:
    if isinstance(source, str):
        return source
    try:
        return source.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        before = source[: problem.start]
        line = before.count(b"\n") + 1
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        document.problems.append(Problem(document.file, line, column, "the file is not UTF-8 text"))
        return None


def _composed(text: str, document: Document) -> Node | None:
    yaml = YAML(typ="rt")
    yaml.composer.warn_double_anchors = False
    try:
        root: Node | None = yaml.compose(text)
    except ReaderError as problem:
        before = text[: problem.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        message = f"the character {chr(_code(problem.character))!r} is not allowed in YAML; write it as an escape"
        document.problems.append(Problem(document.file, line, column, message))
    except MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        document.problems.append(Problem(document.file, line, column, _syntax(problem)))
    except (YAMLError, RecursionError) as problem:
        document.problems.append(Problem(document.file, 0, 0, f"not YAML: {str(problem).splitlines()[0]}"))
    else:
        if root is None:
            document.problems.append(Problem(document.file, 0, 0, "the file is empty"))
        return root
    return None


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


def _syntax(problem: MarkedYAMLError) -> str:
    said = problem.problem or "not YAML"
    if "another document" in said:
        return "a second document begins here ('---'); a description is one document"
    if "'\\t'" in said:
        return "a tab stands where YAML wants spaces"
    if "undefined alias" in said:
        return said.replace("found undefined alias", "the alias names no anchor:")
    mark = problem.context_mark
    where = f" {problem.context} (line {mark.line + 1})" if problem.context and mark else ""
    return f"not YAML: {said}{where}"


def _place(file: str, node: Node) -> Place:
    mark = node.start_mark
    line, column = mark.line + 1, mark.column + 1
    text_column = None
    if isinstance(node, ScalarNode) and node.end_mark.line == mark.line:
        if node.style is None:
            text_column = column
        elif node.style in "'\"" and node.end_mark.column - mark.column == len(node.value) + 2:
            text_column = column + 1
    return Place(file, line, column, text_column)


class _Walk:
    """One pass over the node graph; an alias is walked again at each use."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.inside: set[int] = set()
        self.count = 0

    def value(self, node: Node, loc: Loc) -> Any:
        place = _place(self.document.file, node)
        self.document.values.setdefault(loc, place)
        self.count += 1
        if self.count > MAX_VALUES:
            if self.count == MAX_VALUES + 1:
                self.document.wrong(loc, f"the description grows above {MAX_VALUES:,} values (aliases inside aliases?)")
            return None
        tag = str(node.tag)
        if tag not in _PLAIN_TAGS:
            name = tag.replace(_STANDARD, "!!")
            self.document.refused.add(loc)
            self.document.wrong(loc, f"the tag {name} is not accepted; write the value without a tag")
            return None
        if isinstance(node, ScalarNode):
            plain = node.style is None
            if plain and tag == _STANDARD + "null":
                return None
            return Text(node.value, plain)
        if id(node) in self.inside:
            self.document.refused.add(loc)
            self.document.wrong(loc, "an alias stands inside its own anchor")
            return None
        self.inside.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*loc, at)) for at, item in enumerate(node.value)]
            return self.mapping(node, loc)
        finally:
            self.inside.remove(id(node))

    def mapping(self, node: Node, loc: Loc) -> dict[str, Any]:
        document, result = self.document, {}
        for key_node, value_node in node.value:
            place = _place(document.file, key_node)
            if not isinstance(key_node, ScalarNode):
                document.problems.append(place.problem("a key must be a word, not a list or a mapping"))
                continue
            key = str(key_node.value)
            if key == "<<" and key_node.style is None:
                document.problems.append(place.problem("merge keys ('<<') are not accepted; write the keys out"))
                continue
            inner = (*loc, key)
            if key in result:
                first = document.keys[inner]
                document.problems.append(place.problem(f"duplicate key {key!r}; it stands in line {first.line} too"))
                continue
            document.keys[inner] = place
            if isinstance(value_node, ScalarNode) and value_node.style is None and not value_node.value:
                document.values[inner] = place  # an empty value stands nowhere; YAML's mark may be lines below
            result[key] = self.value(value_node, inner)
        return result


# --- --set ----------------------------------------------------------------------------------------

# Under these, the text after '=' is taken as it is, whatever it looks like.
_LITERAL = frozenset({"env", "setup"})


def apply_set(document: Document, assignment: str, label: str) -> None:
    """Writes ``a.b=value`` over the tree. Mistakes about it are placed at ``--set a.b``.

    The value is text as it is; ``null`` (or ``~``) takes the key away, and one that begins with ``[``, ``{`` or a
    quote is read as YAML (not under ``env`` and ``setup``). A number as a step of the path counts in a list.
    """
    dotted, equals, value = assignment.partition("=")
    place = Place(f"--set {label.partition('=')[0]}", 0, 0)
    steps = dotted.split(".")
    if not equals or not all(steps):
        message = f"{label!r} is not an assignment; accepted: key=value, with dots for inner keys (optimizer.lr=1e-3)"
        document.problems.append(Problem("--set", 0, 0, message))
        return
    target: Any = document.tree
    loc: Loc = ()
    for step in steps[:-1]:
        at: str | int = int(step) if isinstance(target, list) and step.isdecimal() else step
        loc = (*loc, at)
        inner = _inner(target, at)
        if inner is None and isinstance(target, dict):
            inner = target[step] = {}
            document.keys[loc] = document.values[loc] = place
        if not isinstance(inner, (dict, list)):
            document.problems.append(place.problem(f"{'.'.join(map(str, loc))} holds no keys to set"))
            return
        target = inner
    _assign(document, target, (*loc, steps[-1]), _read_value(document, steps[0], value, place), place)


def _inner(target: Any, at: str | int) -> Any:
    if isinstance(target, list):
        return target[at] if isinstance(at, int) and at < len(target) else None
    return target.get(at)


def _assign(document: Document, target: Any, loc: Loc, value: Any, place: Place) -> None:
    step = loc[-1]
    if isinstance(target, list):
        if not (isinstance(step, str) and step.isdecimal() and int(step) < len(target)):
            message = f"{step!r} is not an item of a list of {len(target)}; accepted: 0 to {len(target) - 1}"
            document.problems.append(place.problem(message))
            return
        step = int(step)
        loc = (*loc[:-1], step)
    for places in (document.keys, document.values):
        for inner in [p for p in places if p[: len(loc)] == loc]:
            del places[inner]
    document.keys[loc] = document.values[loc] = place
    target[step] = value


def _read_value(document: Document, first: str, value: str, place: Place) -> Any:
    if first in _LITERAL:
        return Text(value, plain=False)
    if value in {"null", "~"}:
        return None
    if value[:1] not in {"[", "{", '"', "'"}:
        return Text(value, plain=True)
    inner = read("value: " + value, place.file)
    for problem in inner.problems:
        document.problems.append(place.problem(problem.message))
    return inner.tree.get("value")
