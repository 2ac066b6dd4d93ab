"""The floors of docs/architecture.md, read from the source: who may import whom."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "launcher"
FLOORS = {
    "cli": 7,
    "app": 6,
    "attempts": 5,
    "measured": 5,
    "network_check": 5,
    "execute": 5,
    "clearing": 5,
    "elsewhere": 5,
    "compare": 6,
    "simulation": 5,
    "runs": 5,
    "observe": 5,
    "logs": 5,
    "checkpoints": 5,
    "datasets": 5,
    "discover": 5,
    "backends": 4,
    "render": 3,
    "transports": 3,
    "bundles": 3,
    "planning": 2,
    "specs": 1,
    "contract": 0,
}
BESIDE = {"agent", "engine"}  # beside floor 0: they import contract alone
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room that a file belongs to; the package's own ``__init__`` is none."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[tuple[int, int, str, list[str]]]:
    """(line, level, module, names) of each import anywhere in a file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name, []
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or "", [a.name for a in node.names]


def rooms_imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of each relative import; ``""`` stands for the package itself."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for line, level, module, names in imports(path):
        if level == 0:
            continue
        base = package[: len(package) - (level - 1)]
        for target in [(*base, *module.split("."))] if module else [(*base, n) for n in names]:
            room = target[0]
            yield line, "" if room == "__version__" else room


def allowed(room: str, other: str) -> bool:
    if other in ("", room):
        return True
    if room in BESIDE:
        return other == "contract"
    if other in BESIDE:
        # Nobody imports the engine (torch). The agent's rules about a node's files are read from above too.
        return other == "agent" and FLOORS[room] > 0
    return FLOORS[other] <= FLOORS[room]


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(f) for f in FILES} - {""}
    assert rooms <= FLOORS.keys() | BESIDE, "a new room: give it a floor here and in docs/architecture.md"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down_only(path: Path) -> None:
    room = room_of(path)
    wrong = [f"line {line}: {room} may not import {r}" for line, r in rooms_imported(path) if not allowed(room, r)]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_package_never_says_its_own_name(path: Path) -> None:
    """It travels as ``_zerun``: an absolute import would find a user's folder, or nothing."""
    named = [f"line {line}: {m}" for line, level, m, _ in imports(path) if level == 0 and m.split(".")[0] == "launcher"]
    assert not named


@pytest.mark.parametrize("room", ["contract", "agent"])
def test_nodes_need_the_standard_library_alone(room: str) -> None:
    foreign = [
        f"{path.name}:{line}: {module}"
        for path in (PACKAGE / room).rglob("*.py")
        for line, level, module, _ in imports(path)
        if level == 0 and module.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not foreign


def test_only_the_engine_knows_torch() -> None:
    outside = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in FILES
        if room_of(path) != "engine"
        for line, level, module, _ in imports(path)
        if level == 0 and module.split(".")[0] in {"torch", "safetensors"}
    ]
    assert not outside


def test_nothing_is_unpickled_and_no_shell_text_is_made() -> None:
    """ruff holds most of this; the modules it does not know of are held here."""
    banned = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {module}"
        for path in FILES
        for line, level, module, names in imports(path)
        if level == 0 and (module.split(".")[0] in banned or (module == "os" and {"system", "popen"} & set(names)))
    ]
    assert not wrong


def test_only_the_command_line_prints() -> None:
    """The engine prints its progress and its agent its reply; every other room returns data."""
    wrong = []
    for path in FILES:
        if room_of(path) in {"cli", "engine", "agent"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "exit"}:
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong


# The engine's own floors. A file that is no room's stands by its name. Those below ``zero`` name it for its type alone.
ENGINE = {
    "comm": 0, "chance": 0, "gpt": 0, "heap": 0, "resolve": 0,
    "config": 1, "tensor": 1, "together": 1,
    "model": 2,
    "gather": 3, "reduce": 3, "update": 3, "activations": 3, "unchanged": 3, "kept": 3,
    "agreement": 4, "attached": 4,
    "ranks": 5, "each_step": 5,
    "build": 6, "saving": 6,
    "zero": 7,
    "watching": 8,
    "job": 9,
    "rehearsal": 10,
}  # fmt: skip


def engine_parts_imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part of the engine) of each import, those for types alone left out."""
    here = path.relative_to(PACKAGE / "engine").parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    for_types = {id(inner) for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(here) + 1 and id(node) not in for_types:
            base = here[: len(here) - (node.level - 1)]
            for target in [(*base, *node.module.split("."))] if node.module else [(*base, a.name) for a in node.names]:
                yield node.lineno, target[0]


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=lambda p: "-".join(p.parts[-2:]))
def test_the_engine_has_floors_of_its_own(path: Path) -> None:
    part = path.relative_to(PACKAGE / "engine").with_suffix("").parts[0]
    if part == "__init__":
        return
    assert part in ENGINE, "a new part of the engine: give it a floor here and in docs/architecture.md"
    wrong = [
        f"line {line}: {part} may not import {other}"
        for line, other in engine_parts_imported(path)
        if other != part and ENGINE[other] > ENGINE[part]
    ]
    assert not wrong
