"""One step of the engine, as a trace: what each rank computed, sent and waited for, and when.

``overlap.py --stage 3 --out step.json`` writes a file that https://ui.perfetto.dev opens, ``--svg FILE`` draws it, and
the table says how much of the time that messages were under way was stood still for. Ranks send through sockets, as
those of several hosts do: on one host they would read each other's memory, which takes little time and overlaps with
nothing. No figure here is a target: they are those of the machine it runs on, and what must hold whatever the machine
is tested from the same trace (``tests/engine/test_engine_trace.py``).
"""

from __future__ import annotations

import argparse
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import measuring
import policies
import ranks
import torch
import torch.distributed as dist

from launcher.engine.comm import connect
from launcher.engine.comm.choose import SEND
from launcher.engine.watching.trace import COMPUTE, GATHER, REDUCE, WAIT, Span, Trace
from launcher.engine.zero import ZeroEngine

WARM_UPS = 3
LANES = ((COMPUTE, "#4c72b0"), (GATHER, "#55a868"), (REDUCE, "#dd8452"), (WAIT, "#c44e52"))
WIDTH, LEFT, ROW, GAP = 1000, 110, 11, 6


def trace(world: int, stage: int, size: str, out: Path) -> list[list[Span]]:
    """The spans of one step of every rank, in rank order; ``out`` holds them in Chrome's format."""
    everyone = ranks.run(world, _traced, stage, size, str(out))[0]
    return [[Span(*row) for row in rows] for rows in everyone]


def _traced(rank: int, world: int, stage: int, size: str, out: str) -> list[list[Span]]:
    seen = Trace()
    optimizer = {"lr": policies.LR, "betas": policies.BETAS, "eps": policies.EPS, "clip": policies.CLIP}
    config = {"zero": {"stage": stage, "bucket_bytes": policies.BUCKET_BYTES}, "optimizer": optimizer}
    engine = ZeroEngine(policies.make_model(size), config, comm=seen.of(connect(same_host=SEND)))
    seen.watch(engine)
    for number in range(WARM_UPS):
        _step(engine, seen, policies.batch(size, number, rank))
    dist.barrier()
    with seen.recording():
        _step(engine, seen, policies.batch(size, WARM_UPS, rank))
    return seen.write(out, engine.comm)


def _step(engine: ZeroEngine, seen: Trace, tokens: torch.Tensor) -> None:
    engine.backward(engine.model(tokens[:, :-1], tokens[:, 1:]))
    with seen.span("step"):
        engine.step()


# --- telling -----------------------------------------------------------------------------------------------


def covered(spans: Iterable[Span]) -> int:
    """Nanoseconds in which at least one of ``spans`` lasts."""
    total = end = 0
    for span in sorted(spans, key=lambda s: s.begin):
        total += max(0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return total


def table(everyone: Sequence[Sequence[Span]]) -> str:
    heads = ("rank", "step", "messages under way", "waited for them", "waited in all", "of messages hidden")
    rows = [heads]
    for rank, spans in enumerate(everyone):
        whole = max(s.end for s in spans) - min(s.begin for s in spans)
        messages = [s for s in spans if s.kind in (GATHER, REDUCE)]
        names = {s.what for s in messages}
        exposed = covered(s for s in spans if s.kind == WAIT and s.what in names)
        waited, under_way = covered(s for s in spans if s.kind == WAIT), covered(messages)
        hidden = f"{100 * (1 - exposed / under_way):.0f} %" if under_way else "–"
        rows.append((str(rank), *(f"{n / 1e6:.1f} ms" for n in (whole, under_way, exposed, waited)), hidden))
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def picture(spans: Sequence[Span], caption: str) -> str:
    """Rank's step as lanes of bars, a kind below the other; overlapping messages in rows of their own."""
    first, last = min(s.begin for s in spans), max(s.end for s in spans)
    scale = (WIDTH - LEFT - 10) / (last - first)
    shapes, y = [], 24
    for kind, colour in LANES:
        rows: list[int] = []
        top = y
        for span in sorted((s for s in spans if s.kind == kind), key=lambda s: s.begin):
            row = next((i for i, end in enumerate(rows) if end <= span.begin), len(rows))
            rows[row:] = [span.end, *rows[row + 1 :]]
            x, width = LEFT + (span.begin - first) * scale, max(0.6, (span.end - span.begin) * scale)
            name = html.escape(f"{span.what}: {(span.end - span.begin) / 1e6:.2f} ms")
            place = f'x="{x:.1f}" y="{top + row * ROW}" width="{width:.1f}" height="{ROW - 2}"'
            shapes.append(f'<rect {place} fill="{colour}"><title>{name}</title></rect>')
        shapes.append(f'<text x="4" y="{top + 9}" font-size="11">{kind}</text>')
        y = top + max(1, len(rows)) * ROW + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif">'
    title = f'<text x="4" y="14" font-size="12">{html.escape(caption)}</text>'
    back = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([head, back, title, *shapes, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(prog="overlap.py", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="ranks, one thread each (default 2)")
    parser.add_argument("--stage", type=int, default=3, choices=range(4), help="ZeRO stage (default 3)")
    parser.add_argument("--parameters", choices=policies.SIZES, default="11M", help="size of the model (default 11M)")
    parser.add_argument("--out", type=Path, default=Path("step-trace.json"), help="default step-trace.json")
    parser.add_argument("--svg", type=Path, help="draw rank 0's step")
    given = parser.parse_args()
    everyone = trace(given.world, given.stage, given.parameters, given.out)
    load = os.getloadavg()[0]
    busy = f"load {load:.1f}" + (", a busy machine" if load >= measuring.QUIET_LOAD else "")
    caption = f"stage {given.stage}, {given.world} ranks, {given.parameters} parameters, rank 0's step; {busy}"
    print(f"{table(everyone)}\n{caption}\n{given.out}: open it in https://ui.perfetto.dev")
    if given.svg:
        given.svg.write_text(picture(everyone[0], caption), encoding="utf-8")


if __name__ == "__main__":
    main()
