"""Machines without a scheduler → ``nodes:`` and ``device:``, from what each of them says of itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..specs import nodelist
from .text import entry, scalar, to_fill


class Machine(NamedTuple):
    """``said`` is the agent's ``probe``, or None with the reason in ``problem``."""

    name: str
    said: Mapping[str, Any] | None
    problem: str = ""


class _Likeness(NamedTuple):
    cores: int
    memory_gib: int
    gpus: tuple[str, ...]

    @property
    def slots(self) -> int:
        return len(self.gpus) or 1


def nodes_lines(machines: Sequence[Machine]) -> list[str]:
    """``nodes:`` in one line where all are alike, else a list in which each tells its own."""
    answered = [(m.name, _likeness(m.said)) for m in machines if m.said is not None]
    silent = [
        to_fill(f"{m.name}, which did not answer: {m.problem.splitlines()[0]}") for m in machines if m.said is None
    ]
    kinds = {kind for _, kind in answered}
    if len(kinds) == 1:
        kind = answered[0][1]
        names = nodelist.fold([name for name, _ in answered])
        what = "one a GPU" if kind.gpus else "as many ranks a node as you want"
        head = ["nodes:", entry("names", names, _has(kind), indent=2), entry("slots", kind.slots, what, indent=2)]
        return [*head, *silent, *_device_lines(kind, 0)]
    lines = ["nodes:"]
    for name, kind in answered:
        lines += [f"  # {_has(kind)}", f"  - name: {scalar(name)}", entry("slots", kind.slots, indent=4)]
        lines += _device_lines(kind, 4)
    return [*lines, *silent]


def python_lines(machines: Sequence[Machine]) -> list[str]:
    """What the ranks' Python is on the machines; the same everywhere, or told a machine."""
    found: dict[tuple[str, str], list[str]] = {}
    for machine in machines:
        if machine.said is not None:
            torch = (machine.said.get("modules") or {}).get("torch")
            key = (str(machine.said.get("python") or machine.said.get("python_problem")), str(torch or "no torch"))
            found.setdefault(key, []).append(machine.name)
    lines = []
    for (python, torch), names in found.items():
        where = f" on {nodelist.fold(names)}" if len(found) > 1 else ""
        lines.append(
            f"# python3{where}: {python.splitlines()[0]}, {torch if torch == 'no torch' else f'torch {torch}'}"
        )
    if any(torch == "no torch" for _, torch in found):
        lines.append(to_fill("setup: and python: so that a Python with torch is found"))
    return lines


def _likeness(said: Mapping[str, Any]) -> _Likeness:
    gpus = tuple(said.get("gpus") or ())
    return _Likeness(int(said["cores"]), round((said.get("memory_bytes") or 0) / 2**30), gpus)


def _has(kind: _Likeness) -> str:
    gpus = f", {len(kind.gpus)} × {kind.gpus[0].split(',')[0]}" if kind.gpus else ", no GPUs"
    return f"{kind.cores} cores, {kind.memory_gib} GiB{gpus}"


def _device_lines(kind: _Likeness, indent: int) -> list[str]:
    lead = " " * indent
    if not kind.gpus:
        return [f"{lead}device: {{kind: cpu}}"] if not indent else []
    name, _, memory = kind.gpus[0].partition(",")
    mib = re.search(r"(\d+) MiB", memory)
    lines = [f"{lead}device:", entry("kind", "gpu", indent=indent + 2), entry("model", name, indent=indent + 2)]
    if mib:
        lines.append(entry("memory", f"{mib[1]}MiB", "as its driver says", indent=indent + 2))
    else:
        lines.append(to_fill("memory: nvidia-smi did not say it", indent=indent + 2))
    lines.append(to_fill("reserve, peak_flops, precisions", indent=indent + 2))
    return lines
