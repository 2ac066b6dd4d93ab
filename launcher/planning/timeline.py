"""A step's memory as a picture: categories stacked over the order in which storages come and go. Plain SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from ..contract.simulation import Simulation
from .memory import readable

_COLOURS = {
    "parameters": "#4269d0",
    "gradients": "#97bbf5",
    "optimizer": "#9c6b4e",
    "gathered": "#6cc5b0",
    "buckets": "#9498a0",
    "norm": "#c8c8c8",
    "activations": "#efb118",
    "recomputed": "#ff8ab7",
    "temporaries": "#ff725c",
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _KEY = 960, 380, 80, 56, 150


def timeline_svg(simulation: Simulation, title: str, device_bytes: int | None = None) -> str:
    """The picture. A line is drawn at ``device_bytes`` where that is near enough to be seen."""
    timeline = simulation.timeline
    totals = [sum(point) for point in timeline.points]
    most = max([*totals, 1])
    top = most * 1.05
    if device_bytes is not None and device_bytes <= 2 * most:
        top = max(top, device_bytes * 1.05)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + _KEY} {_TOP + _HEIGHT + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="38" fill="#555555">rank {simulation.rank} of {simulation.world_size}; peak '
        f"{readable(simulation.peak_bytes)} in {escape(simulation.peak_phase)}</text>",
        *_areas(timeline.points, timeline.categories, top),
        *_marks(timeline.marks, len(timeline.points)),
        *_axis(top),
        *_key(simulation),
    ]
    if device_bytes is not None and device_bytes <= top:
        parts.append(_line(_y(device_bytes, top), "#c00000", f"device {readable(device_bytes)}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(at: float, count: int) -> float:
    return _LEFT + _WIDTH * at / max(1, count)


def _y(count: float, top: float) -> float:
    return _TOP + _HEIGHT * (1 - count / top)


def _areas(points: Sequence[Sequence[int]], categories: Sequence[str], top: float) -> Iterator[str]:
    """Steps, not slopes: a size holds until the next one."""
    count = len(points)
    below = [0] * count
    for number, name in enumerate(categories):
        above = [low + point[number] for low, point in zip(below, points, strict=True)]
        if above != below:
            there = [corner for at in range(count) for corner in _step(at, count, above[at], top)]
            back = [corner for at in reversed(range(count)) for corner in reversed(_step(at, count, below[at], top))]
            colour = _COLOURS.get(name, "#888888")
            yield f'<path d="M{"L".join([*there, *back])}Z" fill="{colour}"><title>{escape(name)}</title></path>'
        below = above


def _step(at: int, count: int, size: int, top: float) -> list[str]:
    """Both ends of one size."""
    return [f"{_x(where, count):.1f} {_y(size, top):.1f}" for where in (at, at + 1)]


def _marks(marks: Sequence[tuple[int, str]], count: int) -> Iterator[str]:
    """Where phases begin; those that last too short for a word have none."""
    ends = [at for at, _ in marks[1:]] + [count]
    for (at, phase), end in zip(marks, ends, strict=True):
        x = _x(at, count)
        yield f'<path d="M{x:.1f} {_TOP}V{_TOP + _HEIGHT}" stroke="#555555" stroke-dasharray="3 3"/>'
        if end - at > count / 20:
            yield f'<text x="{x + 3:.1f}" y="{_TOP + _HEIGHT + 16}" fill="#555555">{escape(phase)}</text>'


def _axis(top: float) -> Iterator[str]:
    yield f'<path d="M{_LEFT} {_TOP}V{_TOP + _HEIGHT}H{_LEFT + _WIDTH}" fill="none" stroke="#000000"/>'
    for share in range(1, 5):
        size = int(top * share / 4)
        y = _y(size, top)
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{readable(size)}</text>'
        yield f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#000000" stroke-opacity="0.12"/>'
    yield (
        f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 32}" text-anchor="end" fill="#555555">'
        "one step, in the order in which memory comes and goes</text>"
    )


def _line(y: float, colour: str, words: str) -> str:
    return (
        f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="{colour}" stroke-width="1.5"/>'
        f'<text x="{_LEFT + 6}" y="{y - 4:.1f}" fill="{colour}">{escape(words)}</text>'
    )


def _key(simulation: Simulation) -> Iterator[str]:
    """Categories from the top of the stack down, with what each held at the peak."""
    held = {h.what: h.bytes for h in simulation.peak_holds}
    columns = zip(simulation.timeline.categories, zip(*simulation.timeline.points, strict=True), strict=True)
    names = [name for name, column in columns if any(column)]
    for row, name in enumerate(reversed(names)):
        y = _TOP + 8 + 34 * row
        yield f'<rect x="{_LEFT + _WIDTH + 12}" y="{y}" width="12" height="12" fill="{_COLOURS.get(name, "#888888")}"/>'
        yield f'<text x="{_LEFT + _WIDTH + 30}" y="{y + 10}">{escape(name)}</text>'
        yield f'<text x="{_LEFT + _WIDTH + 30}" y="{y + 24}" fill="#555555">{readable(held.get(name, 0))}</text>'
