"""Writes the measured tables of docs/zero.md from real ranks (needs torch); ``--check`` says whether they are stale,
``--print`` shows them. A small GPT, whole seconds; nothing in the tables is a time. ``--config`` does so with the table
of the config's keys alone (``zero_config``), which measures nothing.

Each measured number stands beside what it is held against, which is computed without the engine: Ψ and its formulas,
an undistributed run of plain torch, the elements that a rank owns.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "engine")]
PAGE = ROOT / "docs" / "zero.md"

import torch  # noqa: E402
from engine_models import MODELS, TINY, batches, digest, relative, train, undistributed, whole_state  # noqa: E402
from engine_ranks import run_ranks as _run_ranks  # noqa: E402
from zero_config import rows as keys_of_the_config  # noqa: E402

from launcher.contract.partition import Layout  # noqa: E402
from launcher.contract.train import GPT as GPTConfig  # noqa: E402
from launcher.contract.train import AdamW, Zero  # noqa: E402
from launcher.engine.config import EngineConfig  # noqa: E402
from launcher.engine.gpt import GPT  # noqa: E402
from launcher.engine.model.precision import DTYPES, LossScale  # noqa: E402
from launcher.engine.saving import shardfile  # noqa: E402
from launcher.engine.zero import ZeroEngine  # noqa: E402

SIZES = GPTConfig(layers=3, hidden=45, heads=3, seq_len=16, vocab=251)
BUCKET = 30_000
BLOCK = 4096
OPTIMIZER = AdamW(lr=1e-2, weight_decay=0.1, clip=0.5, eps=1e-5)
"""``eps`` is well above rounding noise: a key's bias has no gradient but noise, which Adam would blow up."""

WORLDS = (1, 2, 4)
ITEM = {"fp32": (4, 4, 8), "bf16": (2, 2, 12)}
"""Bytes an element of parameters, gradients, optimizer; 16 bits with the paper's 2 + 2 + 12."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return _run_ranks(world, function, *args, timeout_s=300.0)


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return GPT(SIZES)


MODELS["page"] = (_model, SIZES.vocab)


def _engine(stage: int, accumulation: int = 1, dtype: torch.dtype = torch.float32, **more: Any) -> ZeroEngine:
    """``same_host: send``: room for messages is then the same on every machine."""
    precision = more.pop("precision", "fp32")
    config = EngineConfig(
        Zero(stage, BUCKET, same_host="send", **more), OPTIMIZER, accumulation=accumulation, precision=precision
    )
    return ZeroEngine(_model().to(dtype), config)


def _batches(count: int, size: int) -> list[torch.Tensor]:
    return batches(count, size, SIZES.vocab, length=SIZES.seq_len)


def _lines(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    told = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(heads), ["---"] * len(heads), *told])


# --- memory ---------------------------------------------------------------------------------------------


def formula(stage: int, ranks: int, precision: str) -> tuple[str, Callable[[int], float]]:
    """The paper's bytes of state, in words and as a function of Ψ."""
    parameters, gradients, optimizer = ITEM[precision]
    whole = sum(n for n, first in ((parameters, 3), (gradients, 2), (optimizer, 1)) if stage < first or ranks == 1)
    cut = parameters + gradients + optimizer - whole
    words = " + ".join([*([f"{whole}Ψ"] if whole else []), *([f"{cut}Ψ/{ranks}"] if cut else [])])
    return words, lambda psi: whole * psi + cut * psi / ranks


def _memory(_rank: int, world: int, cells: list[tuple[str, int]]) -> list[tuple[dict[str, int], int, int]]:
    found = []
    for precision, stage in cells:
        engine = _engine(stage, precision=precision, gradient_dtype=precision)
        train(engine, _batches(1, 2 * world))
        found.append((engine.memory(), engine.state_bytes().total, sum(p.numel() for p in engine.model.parameters())))
    return found


def memory(worlds: Sequence[int] = WORLDS) -> str:
    rows: list[list[object]] = []
    for world in worlds:
        cells = [(precision, stage) for precision in ITEM for stage in range(1 if world == 1 else 4)]
        everyone = run_ranks(world, _memory, cells)
        for (precision, stage), row in zip(cells, zip(*everyone, strict=True), strict=True):
            held = row[0][0]
            states = {tuple(m[k] for k in ("parameters", "gradients", "optimizer")) for m, _, _ in row}
            assert len(states) == 1, "a rank holds more state than another"
            words, of = formula(stage, world, precision)
            (state,), (closed,), (psi,) = states, {c for _, c, _ in row}, {p for _, _, p in row}
            plain = math.ceil(of(psi))
            padding = f"{100 * (sum(state) - plain) / plain:.3f} %"
            rest = [held["gathered"], held["buckets"], max(m["norm"] for m, _, _ in row)]
            told = "0 to 3" if world == 1 else str(stage)
            rows.append([precision, world, told, *state, sum(state), closed, f"{words} = {plain:,}", padding, *rest])
    heads = "precision,ranks,stage,parameters,gradients,optimizer,together,closed form,the paper's,padding"
    return _lines([*heads.split(","), "gathered", "buckets", "norm"], rows)


# --- volume ---------------------------------------------------------------------------------------------

HOW: list[tuple[int, int, dict[str, Any]]] = [  # (micro-steps, stage, settings)
    *((a, stage, {}) for a in (1, 2) for stage in range(4)),
    *((2, stage, {"reduce_every": "step"}) for stage in (2, 3)),
    *((1, 3, {"reshard": how}) for how in ("after_forward", "keep")),
]


def _staying(layout: Layout, reshard: str) -> int:
    """Ψ(kept), with padding: what no block holds, and the last block, all of them, or none."""
    blocks = [unit.padded for unit in layout.units if unit.modules]
    outside = sum(unit.padded for unit in layout.units if not unit.modules)
    return outside + sum({"keep": blocks, "after_forward": [], "keep_last": blocks[-1:]}[reshard])


def _volume(_rank: int, world: int) -> list[tuple[int, int, int, int]]:
    found = []
    for accumulation, stage, more in HOW:
        engine = _engine(stage, accumulation, **more)
        before = engine.comm.traffic.volume_elements, engine.comm.traffic.sent_bytes
        train(engine, _batches(1, world * accumulation))
        after = engine.comm.traffic.volume_elements, engine.comm.traffic.sent_bytes
        psi = sum(unit.padded for unit in engine.layout.units)
        kept = _staying(engine.layout, more.get("reshard", "keep_last"))
        found.append((after[0] - before[0], after[1] - before[1], psi, kept))
    return found


def volume(worlds: Sequence[int] = (2, 4)) -> str:
    rows: list[list[object]] = []
    for world in worlds:
        everyone = run_ranks(world, _volume)
        assert all(found == everyone[0] for found in everyone)
        for (accumulation, stage, more), (elements, sent, psi, kept) in zip(HOW, everyone[0], strict=True):
            sums = 1 if stage < 2 or "reduce_every" in more else accumulation
            words, told = f"{1 + sums}Ψ", (1 + sums) * psi
            if stage == 3:
                times = "" if accumulation == 1 else str(accumulation)
                words = f"{2 * accumulation + sums}Ψ − {times}Ψ(kept)"
                told = (2 * accumulation + sums) * psi - accumulation * kept
            setting = ", ".join(f"`{k}: {v}`" for k, v in more.items()) or "–"
            expected = 4 * told * (world - 1) // world
            rows.append([world, accumulation, str(stage), setting, elements, f"{words} = {told:,}", sent, expected])
    heads = "ranks,micro-steps,stage,setting,elements,formula,sent bytes,4 · elements · (N−1)/N"
    return _lines(heads.split(","), rows)


# --- parity ---------------------------------------------------------------------------------------------

PARITY = {
    "fp64": (torch.float64, 10, 1e-12, 1e-12),
    "fp32": (torch.float32, 20, 1e-5, 1e-4),
    "bf16": (torch.bfloat16, 20, 2e-2, 3e-2),
    "fp16": (torch.float16, 20, 2e-2, 3e-2),
}
"""Steps, and bounds of losses and of parameters. In 16 bits losses are held against fp32, and parameters against a
plain loop of the same arithmetic; farthest goes a key's bias, which has no gradient but 16 bits' noise."""


def _narrow_alone(steps: Sequence[torch.Tensor], world: int, accumulation: int, dtype: torch.dtype) -> dict[str, Any]:
    """Plain torch in 16 bits beside an fp32 master, one rank's rows after the other's: the last parameters."""
    model = MODELS["gpt"][0]()
    masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model = model.to(dtype)
    o, scale = OPTIMIZER, LossScale.of({v: k for k, v in DTYPES.items()}[dtype]).value
    adam = torch.optim.AdamW(masters, o.lr, o.betas, o.eps, weight_decay=o.weight_decay, fused=True)
    assert o.clip is not None
    for batch in steps:
        sums = [torch.zeros_like(m) for m in masters]
        for rows in batch.chunk(world * accumulation):
            (model(rows[:, :-1], rows[:, 1:]) * scale).backward()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad.float()
            model.zero_grad()
        mean = 1 / (world * accumulation * scale)
        norm = math.sqrt(sum(float(s.double().square().sum()) for s in sums)) * mean
        assert math.isfinite(norm), "a step that the engine would leave out"
        for master, total in zip(masters, sums, strict=True):
            master.grad = total * (mean * min(1.0, o.clip / (norm + 1e-6)))
        adam.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
    return {name: p.detach() for name, p in model.named_parameters()}


def _narrow_engine(stage: int, accumulation: int, precision: str) -> ZeroEngine:
    zero = Zero(stage, BUCKET // 10, same_host="send", reduce_every="micro_step")
    return ZeroEngine(MODELS["gpt"][0](), EngineConfig(zero, OPTIMIZER, accumulation=accumulation, precision=precision))


def _parity(_rank: int, world: int, cells: list[tuple[str, int]]) -> list[tuple[float, float, int]]:
    """The largest gaps over all stages, of losses after every step and of parameters after the last, and how many
    different bits the stages have."""
    found = []
    for precision, accumulation in cells:
        dtype, count, _, _ = PARITY[precision]
        narrow = precision in DTYPES
        steps = batches(count, 8, TINY.vocab, length=TINY.seq_len) if narrow else _batches(count, 8)
        if narrow:
            losses, _ = undistributed("gpt", steps, OPTIMIZER, torch.float32)
            expected = _narrow_alone(steps, world, accumulation, dtype)
        else:
            losses, states = undistributed("page", steps, OPTIMIZER, dtype)
            expected = states[-1]
        bits, loss_gap, parameter_gap = set(), 0.0, 0.0
        for stage in range(4):
            if narrow:
                engine = _narrow_engine(stage, accumulation, precision)
            else:
                engine = _engine(stage, accumulation, dtype, reduce_every="micro_step")
            history, state = train(engine, steps), whole_state(engine)
            gaps = [abs(mine - other) / abs(other) for (mine, _), other in zip(history, losses, strict=True)]
            loss_gap = max(loss_gap, *gaps)
            gaps = [relative(state[name].double(), value.double()) for name, value in expected.items()]
            parameter_gap = max(parameter_gap, *gaps)
            bits.add((tuple(history), digest(state)))
        found.append((loss_gap, parameter_gap, len(bits)))
    return found


def at_most(gap: float) -> str:
    """1 or 3 times a power of ten that is not below: further digits of a gap are a machine's own."""
    if not gap:
        return "0"
    power = math.floor(math.log10(gap))
    return next(
        f"≤ {times}e{power + up}" for times, up in ((1, 0), (3, 0), (1, 1)) if gap <= times * 10.0 ** (power + up)
    )


def parity(worlds: Sequence[int] = (2, 4)) -> str:
    cells = [(precision, accumulation) for precision in PARITY for accumulation in (1, 2)]
    rows: list[list[object]] = []
    for world in worlds:
        everyone = run_ranks(world, _parity, cells)
        for (precision, accumulation), found in zip(cells, zip(*everyone, strict=True), strict=True):
            _, count, losses_within, parameters_within = PARITY[precision]
            loss, parameter = (max(row[i] for row in found) for i in (0, 1))
            equal = "yes" if {row[2] for row in found} == {1} else "no"
            gaps = [at_most(loss), f"{losses_within:.0e}", at_most(parameter), f"{parameters_within:.0e}"]
            rows.append([world, precision, count, accumulation, *gaps, equal])
    heads = "ranks,precision,steps,micro-steps,losses,bound,parameters,bound,four stages bitwise equal"
    return _lines(heads.split(","), rows)


# --- reshard --------------------------------------------------------------------------------------------

SAVED = ((1, 0), (2, 3), (3, 2), (4, 1))
LOADED = {1: [0], 2: [0, 1], 3: [3], 4: [2, 3]}


def _bits(engine: ZeroEngine) -> str:
    """A digest of all parameters and moments, whole."""
    found = whole_state(engine)
    for flat in engine.units:
        for index in range(len(flat.moments)):
            shards = engine.comm.gather_small(torch.cat(flat.own_moments(index)), "moments")
            for rank in range(engine.comm.size):
                for piece in flat.unit.pieces(rank):
                    name = f"{piece.parameter.name}/{index}"
                    whole = found.setdefault(name, torch.zeros(piece.parameter.numel))
                    width = piece.stop - piece.start
                    whole[piece.start : piece.stop] = shards[rank, piece.offset : piece.offset + width]
    return digest(found)


def _save(_rank: int, world: int, stage: int, folder: str) -> str:
    shardfile.BLOCK_BYTES = BLOCK
    engine = _engine(stage)
    train(engine, _batches(2, 12))
    engine.save(folder, 2)
    return _bits(engine)


class _Counted(shardfile.Reader):
    """Counts what the engine asks for, and what is read from files for it."""

    asked = read_bytes = 0

    def into(self, name: str, first: int, target: torch.Tensor) -> None:
        _Counted.asked += target.numel() * target.element_size()
        super().into(name, first, target)

    def _block(self, at: int) -> tuple[int, bytes]:
        found = super()._block(at)
        _Counted.read_bytes += len(found[1])
        return found


def _load(rank: int, world: int, stages: list[int], folders: list[str]) -> list[tuple[str, int, int, int]]:
    """For each stage and folder: bits, bytes that this rank needs, bytes of tensors that it asked for, and of files."""
    shardfile.BLOCK_BYTES = BLOCK
    shardfile.Reader = _Counted  # type: ignore[misc]
    found = []
    for stage in stages:
        for folder in folders:
            engine = _engine(stage)
            owned = range(world) if stage == 0 else [rank]
            pieces = [piece for unit in engine.layout.units for r in owned for piece in unit.pieces(r)]
            needs = 3 * 4 * sum(piece.stop - piece.start for piece in pieces)  # parameters and two moments, in fp32
            _Counted.asked = _Counted.read_bytes = 0
            engine.load(folder)
            found.append((_bits(engine), needs, _Counted.asked, _Counted.read_bytes))
    return found


def reshard(saved: Sequence[tuple[int, int]] = SAVED) -> str:
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {cell: str(Path(place, f"{cell[0]}-{cell[1]}")) for cell in saved}
        bits = {cell: set(run_ranks(cell[0], _save, cell[1], folder)) for cell, folder in folders.items()}
        for world, stages in LOADED.items():
            everyone = run_ranks(world, _load, stages, list(folders.values()))
            cells = [(stage, cell) for stage in stages for cell in folders]
            for (stage, cell), found in zip(cells, zip(*everyone, strict=True), strict=True):
                assert all(row[1] == row[2] for row in found), "a rank asked for other bytes than it needs"
                _, needs, asked, from_files = max(found, key=lambda row: row[2])
                equal = "yes" if {row[0] for row in found} == bits[cell] else "no"
                rows.append([cell[0], str(cell[1]), world, str(stage), needs, asked, from_files, equal])
    heads = (
        "saved by ranks,at stage,loaded by ranks,at stage,a rank needs,reads of tensors,reads of files,tensors equal"
    )
    return _lines(heads.split(","), rows)


def config() -> str:
    return _lines(["key", "type", "default", "does something at", "meaning"], keys_of_the_config())


# --- the page -------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "config": config, "memory": memory, "volume": volume, "parity": parity, "reshard": reshard,
}  # fmt: skip


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"


def shown(name: str, page: str) -> str:
    """The table between its marks."""
    begin, end = marks(name)
    found = re.search(re.escape(begin) + "(.*?)" + re.escape(end), page, re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE.name} has no marks for {name}")
    return found[1]


def _told(name: str, table: str) -> list[list[str]]:
    """What has to be the same on every machine: not how far rounding goes."""
    rows = [line.split("|") for line in table.splitlines()]
    return [[*row[:5], row[6], *row[8:]] for row in rows] if name == "parity" else rows


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = ["config"] if "--config" in sys.argv[1:] else TABLES
    made = {name: TABLES[name]() for name in wanted}
    if "--print" in sys.argv[1:]:
        sys.stdout.write("\n\n".join(made.values()) + "\n")
        return 0
    if "--check" in sys.argv[1:]:
        stale = [name for name, table in made.items() if _told(name, shown(name, page)) != _told(name, table)]
        if stale:
            sys.stderr.write(f"docs/zero.md is stale ({', '.join(stale)}): run make zero\n")
        return int(bool(stale))
    for name, table in made.items():
        begin, end = marks(name)
        page = page.replace(begin + shown(name, page) + end, begin + table + end)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
