"""A step's memory as a picture: categories stacked over the order in which storages come and go. Plain SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from ..contract.simulation import Simulation
from .memory import readable
from .simulated import NAMES

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
    "host": "#e8e0c0",
}
_LEFT, _TOP, _WIDTH, _HEIGHT, _KEY = 76, 64, 690, 340, 226
_QUIET = "#555555"


class Bar(NamedTuple):
    """Something that lasts from one point of the timeline to another; ``label`` stands in it where there is room."""

    begin: float
    end: float
    label: str
    what: str


class Lane(NamedTuple):
    """Bars of one kind, drawn below the memory."""

    name: str
    colour: str
    bars: Sequence[Bar]


def timeline_svg(
    simulation: Simulation,
    title: str,
    device_bytes: int | None = None,
    *,
    how: str = "simulated",
    lanes: Sequence[Lane] = (),
) -> str:
    """The picture. A line is drawn at ``device_bytes`` where that is near enough to be seen; ``how`` says what was
    watched."""
    timeline = simulation.timeline
    totals = [sum(point) for point in timeline.points]
    most = max([*totals, 1])
    step = _round_step(most)
    top = most * 1.1  # room for the words at the peak
    if device_bytes is not None and device_bytes <= 2 * most:
        top = max(top, device_bytes * 1.1)
    drawn, lowest = _lanes(lanes, len(timeline.points))
    width, height = _LEFT + _WIDTH + _KEY, lowest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="16">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="42" fill="{_QUIET}">tensors of one step on rank {simulation.rank} of '
        f"{simulation.world_size}, {escape(how)}</text>",
        *_areas(timeline.points, timeline.categories, top),
        *_marks(timeline.marks, len(timeline.points)),
        *_axis(top, step),
        *_key(simulation),
        *drawn,
    ]
    if device_bytes is not None and device_bytes <= top:
        parts.append(_device(_y(device_bytes, top), f"device: {readable(device_bytes)}"))
    parts += _peak(totals, simulation, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _round_step(most: int) -> int:
    """Between lines of the axis: 1, 2, 2.5 or 5 times a power of ten, four to eight of them below ``most``."""
    unit = 1
    while unit * 100 < most:
        unit *= 10
    return next(int(unit * times) for times in (1, 2, 2.5, 5, 10, 20, 25, 50) if most / (unit * times) <= 8)


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
    """Where phases begin, of those that last long enough to be seen or that end the step."""
    ends = [at for at, _ in marks[1:]] + [count]
    bottom, free = _TOP + _HEIGHT, 0.0
    for number, ((at, phase), end) in enumerate(zip(marks, ends, strict=True)):
        x, words = _x(at, count), 7.5 * len(phase)
        if end - at < count / 60 and number < len(marks) - 1:
            continue
        yield f'<path d="M{x:.1f} {_TOP}V{bottom + 6}" stroke="{_QUIET}" stroke-dasharray="3 3"/>'
        left = min(x + 3, _LEFT + _WIDTH - words)
        if left >= free and left + words <= max(_x(end, count), _LEFT + _WIDTH * (number == len(marks) - 1)):
            yield f'<text x="{left:.1f}" y="{bottom + 18}" fill="{_QUIET}">{escape(phase)}</text>'
            free = left + words


def _lanes(lanes: Sequence[Lane], count: int) -> tuple[list[str], int]:
    """Bars below the axis, those that overlap in rows of their own; and where the picture ends."""
    parts, y = [], _TOP + _HEIGHT + 46
    for lane in lanes:
        rows: list[float] = []
        for bar in sorted(lane.bars):
            row = next((i for i, free in enumerate(rows) if free <= bar.begin), len(rows))
            rows[row:] = [bar.end, *rows[row + 1 :]]
            x, top = _x(bar.begin, count), y + 16 * row
            wide = max(2.0, _x(bar.end, count) - x)
            place = f'x="{x:.1f}" y="{top}" width="{wide:.1f}" height="14"'
            words = f"<title>{escape(bar.what)}</title>"
            parts.append(f'<rect {place} fill="{lane.colour}" stroke="#ffffff">{words}</rect>')
            if 6 * len(bar.label) < wide:
                middle = f'x="{x + wide / 2:.1f}" y="{top + 11}" text-anchor="middle"'
                parts.append(f'<text {middle} font-size="10" fill="#ffffff">{escape(bar.label)}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(lane.name)}</text>')
        y += 16 * max(1, len(rows)) + 6
    return parts, y


def _axis(top: float, step: int) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _WIDTH}" fill="none" stroke="#000000"/>'
    for size in range(0, int(top) + 1, step):
        y = _y(size, top)
        yield f'<text x="{_LEFT - 8}" y="{y + 4.5:.1f}" text-anchor="end">{readable(size) if size else 0}</text>'
        yield f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#000000" stroke-opacity="0.15"/>'
    yield (
        f'<text x="{_LEFT + _WIDTH}" y="{bottom + 38}" text-anchor="end" fill="{_QUIET}">'
        "one step, in the order in which memory comes and goes (not in time)</text>"
    )


def _device(y: float, words: str) -> str:
    return (
        f'<path d="M{_LEFT} {y:.1f}H{_LEFT + _WIDTH}" stroke="#c00000" stroke-width="1.5"/>'
        f'<text x="{_LEFT + _WIDTH - 4}" y="{y - 5:.1f}" text-anchor="end" fill="#c00000">{escape(words)}</text>'
    )


def _peak(totals: Sequence[int], simulation: Simulation, top: float) -> list[str]:
    """A dot at the largest moment, a line down from it, and its size in words beside it."""
    at = max(range(len(totals)), key=totals.__getitem__, default=0)
    x, y = _x(at + 0.5, len(totals)), _y(simulation.peak_bytes, top)
    right = x < _LEFT + _WIDTH * 0.6
    return [
        f'<path d="M{x:.1f} {y:.1f}V{_TOP + _HEIGHT}" stroke="#000000" stroke-opacity="0.6"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>',
        f'<text x="{x + 8 if right else x - 8:.1f}" y="{y - 5:.1f}" text-anchor="{"start" if right else "end"}" '
        f'font-weight="bold">peak {readable(simulation.peak_bytes)}, in {escape(simulation.peak_phase)}</text>',
    ]


def _key(simulation: Simulation) -> Iterator[str]:
    """Categories from the top of the stack down, with what each held at the peak."""
    held = {h.what: h.bytes for h in simulation.peak_holds}
    columns = zip(simulation.timeline.categories, zip(*simulation.timeline.points, strict=True), strict=True)
    names = [name for name, column in columns if any(column)]
    left = _LEFT + _WIDTH + 16
    yield f'<text x="{left}" y="{_TOP + 4}" fill="{_QUIET}">held at the peak</text>'
    for row, name in enumerate(reversed(names)):
        y = _TOP + 16 + 36 * row
        yield f'<rect x="{left}" y="{y}" width="13" height="13" fill="{_COLOURS.get(name, "#888888")}"/>'
        yield f'<text x="{left + 20}" y="{y + 11}">{escape(NAMES.get(name, name))}</text>'
        yield f'<text x="{left + 20}" y="{y + 27}" fill="{_QUIET}">{readable(held.get(name, 0))}</text>'
