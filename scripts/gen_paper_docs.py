"""Writes docs/paper.md: the ZeRO paper's figures beside ours; ``--check`` only says whether it is stale (exit 1)."""

# ruff: noqa: E501  (prose of a page, a line as it is printed)

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from paper_figures import (
    FIGURE_4,
    FIGURE_6,
    MODELS,
    TABLE_1,
    TABLE_1_MODELS,
    TABLE_2,
    TABLE_2_MEASURED,
    TABLE_3,
    TABLE_5,
    TABLE_8,
    Model,
)

from launcher.planning.devices import device_bytes
from launcher.planning.make import draft_plan
from launcher.planning.memory import Elements, element_bytes, largest_model, readable, stage_memory, three_digits
from launcher.planning.plan import Plan
from launcher.planning.shapes import Shapes, gpt_numel
from launcher.planning.step import block_bytes, together
from launcher.specs import load_cluster, load_job
from launcher.specs.models import Cluster, GptModel, Job

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper.md"
GB = 10**9
MIXED = element_bytes("fp16", "fp16")
VOCAB, SEQ = 51200, 1024

HEAD = """# The ZeRO paper beside the planner

<!-- Written by scripts/gen_paper_docs.py (`make docs`) from the planner itself. Do not edit. -->

arXiv 1910.02054v3. Each figure of the paper carries where we have it from: **[V]** read in its text, **[S]** a table
read second-hand, **[M]** from memory, not seen in a text though its arithmetic is consistent. [S] and [M] are shown and
never asserted by a test. GB is 10⁹ bytes. `tests/planning/test_planning_paper.py` holds this page and what is asserted.

Every number of ours comes from a command that anyone can run, in the repository's root:

```
zerun plan --parameters 7.5e9 --ranks 64 --device-memory 32GB --table     # tables 1 and 2, without a job
zerun plan jobs/paper/zero-100b.yaml                                      # a run of the evaluation, whole
zerun plan jobs/paper/memory-100b-c2.yaml --search                        # what else would fit its cluster
```
"""


def page() -> str:
    parts = [
        HEAD,
        *_state(),
        *_sizes(),
        *_activations(),
        *_communication(),
        *_runs(),
        *_data_parallel(),
        *_configurations(),
        *_slips(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


# --- state ----------------------------------------------------------------------------------------


def _state() -> Iterator[str]:
    yield "## Model states: table 1 and figure 1 [V]"
    yield ""
    yield "GB a device with stages 1 / 2 / 3, the paper's and ours. Values from 100 on are truncated, smaller ones rounded"
    yield "half up, which is the rule that gives every digit of the paper's table; all 54 are equal."
    yield ""
    rows = []
    for ranks, printed in TABLE_1.items():
        cells = []
        for model, theirs in zip(TABLE_1_MODELS, printed, strict=True):
            ours = table_1_cell(model, ranks)
            mark = "" if ours == theirs else " **differs**"
            cells += [theirs.replace(" ", " / "), ours.replace(" ", " / ") + mark]
        rows.append([str(ranks), *cells])
    yield from _table(("ranks", "7.5B", "ours", "128B", "ours", "1T", "ours"), rows)
    yield "Figure 1, 7.5 B on 64 ranks: 120 / 31.4 / 16.6 / 1.9 GB; ours in bytes: " + ", ".join(
        f"{stage_memory(s, Elements.of_count(TABLE_1_MODELS[0]), MIXED, 64).total_bytes:,}" for s in range(4)
    )
    yield ""
    yield "## Largest models: table 2 [V]"
    yield ""
    yield "Billions of parameters whose state fits 32 GB at 64 data-parallel ranks. The paper rounds the factor of one"
    yield "device (7.6, 14.4) and multiplies that; ours multiplies first, so it is above from two devices on. *Measured*"
    yield "is what the paper could train: 0.63 to 0.65 of the theory without ZeRO, 0.82 with stage 1, because activations"
    yield "and buffers are not in these formulas."
    yield ""
    rows = []
    for tensor, printed in TABLE_2.items():
        ours = [largest_model(s, MIXED, 64, 32 * GB, tensor=tensor) for s in range(4)]
        cells = [f"{theirs} / {three_digits(n, GB)}" for theirs, n in zip(printed, ours, strict=True)]
        measured = TABLE_2_MEASURED[tensor]
        rows.append([str(tensor), *cells, f"{measured[0]}", f"{measured[1]}"])
    head = ("MP", "stage 0", "stage 1", "stage 2", "stage 3", "measured, baseline", "measured, stage 1")
    yield from _table([head[0], *(f"{h}: paper / ours" for h in head[1:5]), *head[5:]], rows)


def table_1_cell(model: int, ranks: int) -> str:
    elements = Elements.of_count(model)
    return " ".join(three_digits(stage_memory(s, elements, MIXED, ranks).total_bytes, GB) for s in (1, 2, 3))


def _gpt(layers: int, hidden: int) -> GptModel:
    return GptModel(kind="gpt", layers=layers, hidden=hidden, heads=1, seq_len=SEQ, vocab=VOCAB)


def _sizes() -> Iterator[str]:
    yield "## Model sizes: table 4 [V]"
    yield ""
    yield f"Ours counts all of a GPT-2: embedding ({VOCAB} tokens, tied head), {SEQ} positions, biases, norms. The paper names"
    yield "sizes by about 12·L·h². The vocabulary is ours: GPT-2's 50,257 padded so that every degree used divides it."
    yield ""
    rows = []
    for model in MODELS:
        psi = gpt_numel(_gpt(model.layers, model.hidden))
        blocks = 12 * model.layers * model.hidden**2
        rows.append([model.name, f"{model.layers} × {model.hidden}", f"{blocks / GB:.2f}B", f"{psi:,}", _about(model)])
    yield from _table(("named", "layers × hidden", "12·L·h²", "Ψ, exact", ""), rows)


def _about(model: Model) -> str:
    if model.hidden_printed is None:
        return ""
    as_printed = 12 * model.layers * model.hidden_printed**2 / GB
    return f"printed with hidden {model.hidden_printed}, which is {as_printed:.1f}B: a slip, see below"


# --- residual states ------------------------------------------------------------------------------


def _activations() -> Iterator[str]:
    b, s = 32, 1024
    whole = 2 * 12 * 1600 * b * s * 48
    root = whole / 48**0.5
    yield "## Activations: §3.2 and §6.1"
    yield ""
    big = 2 * 125 * b * s * 8192
    plan, checkpointed = _plan("memory-100b-c4"), _plan("memory-100b-c3")
    each = {"whole": _line(checkpointed, "stored for recomputation"), "cut": _line(plan, "stored for recomputation")}
    assert each["whole"] == big
    rows = [
        ["1.5B (48 × 1600), batch 32, all kept: 12·h·b·s·L elements", "about 60 GB [V]", readable(whole), "equal"],
        ["the same, √L of it with checkpointing", "about 8 GB [V]", readable(round(root)), "8.7 is rounded down"],
        [
            "the reference GPT's own, all kept",
            "–",
            readable(_gpt_activations(48, 1600, 25, b)),
            "16·b·s·h a block, not 12: a fused attention kernel keeps q, k, v and its output, and no scores; the rest "
            "is the inputs of norms and matrices",
        ],
        [
            "100B (125 × 8192), batch 32, one checkpoint a layer",
            "about 33 GB [V, §6.1], around 60 GB [V, §3.2]",
            readable(each["whole"]),
            f"33 counts elements ({big // 2 / GB:.1f}·10⁹); in fp16 they are {readable(big)} = {big / 2**30:.1f} GiB",
        ],
        [
            "the same under P_a, MP 16",
            "about 2 GB [V]",
            readable(each["cut"]),
            "the same slip: elements, not bytes",
        ],
        ["the same under P_a+cpu", "about 0 [V]", readable(_line(_plan("memory-100b-c5"), "stored for recomputation")),
         "in host memory"],
    ]  # fmt: skip
    yield from _table(("what", "paper", "ours", "why"), rows)


def _gpt_activations(layers: int, hidden: int, heads: int, micro: int) -> int:
    shapes = Shapes(layers, hidden, heads, SEQ, VOCAB, micro, 1, 2)
    return layers * block_bytes(shapes)


def _communication() -> Iterator[str]:
    plain, cut = _plan("memory-100b-c3"), _plan("memory-100b-c4")
    shapes = 32 * 1024 * 8192 * 125
    reduce_ = sum(t.volume_elements for t in plain.traffic or () if t.collective == "all-reduce") / shapes
    gather = sum(t.volume_elements for t in cut.traffic or () if t.what == "stored activations") / shapes
    yield "## Communication [V]"
    yield ""
    yield "Elements a rank and step, as messages; what leaves the rank is (N−1)/N of it, which the paper drops and we print."
    yield ""
    rows = [
        ["stages 0, 1, 2", "2Ψ", "2Ψ + padding; with accumulation a stage 2 reduces in every micro-step: (1 + a)Ψ"],
        ["stage 3", "3Ψ", "3Ψ less what stays gathered from forward to backward (embedding, last norm, last block)"],
        ["tensor parallel with recomputation, a block", "12·b·s·h", f"{reduce_:.2f}·b·s·h: without dropout recomputation ends before a block's last sum; two more a step, for embedding and head"],
        ["P_a, a block", "1·b·s·h: 8.3 %, less than 10 %", f"{gather:.2f}·b·s·h: {100 * gather / reduce_:.1f} %, or {100 * gather / 12:.1f} % of 12"],
    ]  # fmt: skip
    yield from _table(("", "paper", "ours"), rows)


# --- the evaluation's runs ------------------------------------------------------------------------


@functools.cache
def _cluster() -> Cluster:
    return load_cluster(ROOT / "clusters" / "dgx2-25.yaml")


@functools.cache
def _job(name: str) -> Job:
    return load_job(ROOT / "jobs" / "paper" / f"{name}.yaml")


@functools.cache
def _plan(name: str) -> Plan:
    return draft_plan(_job(name), _cluster())


def _line(plan: Plan, what: str) -> int:
    return next(line.bytes for line in plan.step if line.what == what)


def _runs() -> Iterator[str]:
    yield "## Figure 2: the runs of the evaluation, planned"
    yield ""
    cluster = _cluster()
    yield f"On `clusters/dgx2-25.yaml`: {len(cluster.node_list)} DGX-2, a device of {readable(plan_device(cluster))} usable (32,510 MiB less a reserve of 1 GiB)."
    yield "Layers and widths are [V]; degrees, batches and GPUs are table 5's [M], so this table is shown, not asserted; what is"
    yield "asserted is that a run which the paper made is said to fit. *Holds* is the most at one moment, by arithmetic and with"
    yield "what is assumed (logits in fp32, 5 % allocator slack). Bounds are bounds: the paper's 100B ran at 38 TFLOPS a GPU [V],"
    yield "30 % of a V100's peak, and so took about three times its compute bound."
    yield ""
    rows = []
    for kind in ("zero", "baseline"):
        for name in TABLE_5:
            plan = _plan(f"{kind}-{name}")
            rows.append(_run_row(f"{kind}-{name}", plan))
    head = ("job", "ranks = data × tensor", "micro", "state", "holds, arithmetic", "and assumed", "verdict",
            "a rank sends", "out of a node", "bounds: compute", "inside", "between")  # fmt: skip
    yield from _table(head, rows)
    yield "The baseline's tensor groups of 32 to 256 ranks cross nodes: what leaves a node is activations and their gradients,"
    yield "in every block, while ZeRO's tensor groups stay inside. That is the paper's own explanation of its up to tenfold"
    yield "gain: 300 GB/s a device inside a node, 6.25 GB/s a device between nodes."
    yield ""


def plan_device(cluster: Cluster) -> int:
    return device_bytes(cluster) or 0


def _run_row(name: str, plan: Plan) -> list[str]:
    assert plan.bounds is not None and plan.train is not None and plan.state.chosen is not None
    bounds, topology = plan.bounds, plan.topology
    return [
        f"`{name}`",
        f"{topology.world_size} = {topology.data_parallel} × {topology.tensor}",
        str(plan.train.batch.micro),
        readable(plan.state.stages[plan.state.chosen].total_bytes),
        readable(together(plan.step, assumed=False)),
        readable(together(plan.step, assumed=True)),
        plan.judgement.verdict,
        readable(plan.sent_bytes_per_step or 0),
        readable(sum(t.node_bytes for t in plan.traffic or ())),
        *(
            f"{value:.2f} s" if value is not None else "?"
            for value in (bounds.compute_s, bounds.inside_s, bounds.between_s)
        ),
    ]


def _data_parallel() -> Iterator[str]:
    yield "## Figure 4: without model parallelism, 128 GPUs"
    yield ""
    yield "Layers and widths are [V]; the batch is given as a range, 24 down to 2 [S], and which size had which is our choice. The"
    yield "paper trains up to 13B with stage 2, and up to 1.4B without ZeRO [V]. *Without ZeRO* is the same job at stage 0 and micro-"
    yield "batch 1; where its state alone is above the device, arithmetic decides."
    yield ""
    cluster, rows = _cluster(), []
    for name in FIGURE_4:
        job = _job(f"dp-{name}")
        plan = draft_plan(job, cluster)
        assert plan.train is not None and job.zero is not None and job.batch is not None
        batch = job.batch.model_copy(update={"micro": 1, "global_": 128})
        without = draft_plan(
            job.model_copy(update={"zero": job.zero.model_copy(update={"stage": 0}), "batch": batch}), cluster
        )
        alone = "state alone: " if without.state.verdict == "does not fit" else ""
        state = readable(without.state.stages[0].total_bytes)
        rows.append(
            [
                f"`dp-{name}`",
                str(plan.train.batch.micro),
                readable(together(plan.step, assumed=False)),
                readable(together(plan.step, assumed=True)),
                plan.judgement.verdict,
                f"{alone}{without.judgement.verdict} ({state} of state)",
            ]
        )
    yield from _table(("job", "micro", "holds, arithmetic", "and assumed", "stage 2", "without ZeRO"), rows)
    yield "The one row that parts from the paper is 1.5B without ZeRO (1.6B counted exactly), whose state leaves room for a step of"
    yield "one sample by our lines; the paper's baseline stopped at 1.4B with batches and a framework of its own."
    yield ""


def _configurations() -> Iterator[str]:
    yield "## Table 3's configurations: figures 6, 7 and table 8"
    yield ""
    yield "C1 is stage 1; C2 stage 1 and P_a; C3 stage 2; C4 stage 2 and P_a; C5 stage 2 and P_a+cpu [V]. Sizes of the two runs"
    yield "are [S], bar heights are not in the text. *Holds* is by arithmetic; verdicts are ours."
    yield ""
    rows = []
    for config in TABLE_3:
        cells = [config.upper()]
        for name in TABLE_8:
            plan = _plan(f"memory-{name}-{config}")
            cells += [readable(plan.judgement.needs_bytes or 0), plan.judgement.verdict]
        rows.append(cells)
    yield from _table(("", "40B holds", "verdict", "100B holds", "verdict"), rows)
    yield "What the text says of the bars holds for ours too: C2 below C1, and C5 below C4 for 100B. For 40B the paper sees C5"
    yield "equal to C4 where ours are 0.8 GB apart; what it plots is the memory that its allocator cached, which is not in our lines."
    yield ""
    yield "Figure 6, the largest model that fits with MP 16 at a fixed batch. The batch is not in the text, so ours is given for"
    yield "three; depth varies at width 8192, assumed lines included. Nothing here is asserted."
    yield ""
    batches = (8, 16, 32)
    rows = [
        [config.upper(), f"{FIGURE_6[config]}", *(f"{largest_run(config, batch) / GB:.0f}B" for batch in batches)]
        for config in TABLE_3
    ]
    yield from _table(("", "paper [V]", *(f"ours, batch {b}" for b in batches)), rows)
    yield "The order is the paper's. Three things may part the figures, and which weighs most is not known here: the batch that it"
    yield "used; that its sizes are those it tried, at most what fits; and its engine of 2019, which kept attention's scores"
    yield "(5·b·a·s²/MP bytes while a block is computed again) and met fragmentation: without M_D, out of memory with over 30 %"
    yield "still free [V]. The latter two are not in our lines."
    yield ""


def largest_run(config: str, batch: int) -> int:
    """Ψ of the deepest model of width 8192 that is said to fit under a configuration."""
    cluster, job = _cluster(), _job(f"memory-100b-{config}")
    assert job.batch is not None and isinstance(job.model, GptModel)
    said = job.batch.model_copy(update={"micro": batch, "global_": 25 * batch})
    least, most = 1, 400
    while least < most:
        layers = (least + most + 1) // 2
        model = job.model.model_copy(update={"layers": layers})
        plan = draft_plan(job.model_copy(update={"batch": said, "model": model}), cluster)
        least, most = (layers, most) if plan.judgement.verdict == "fits" else (least, layers - 1)
    return gpt_numel(job.model.model_copy(update={"layers": least}))


def _slips() -> Iterator[str]:
    small, right = (12 * layers * 4096**2 / GB for layers in (88, 132)), (12 * n * 6144**2 / GB for n in (88, 132))
    yield "## Slips of the paper"
    yield ""
    yield f"1. **33 GB of checkpoints** for 100B (§6.1) is a count of elements; in fp16 it is {2 * 125 * 32 * 1024 * 8192 / GB:.1f} GB, which is the"
    yield '   "around 60 GB" of its own §3.2 (62.5 GiB); under P_a with MP 16 then 4.19 GB, not 2.'
    yield f"2. **Hidden size 4096** of the 40B and 60B models (table 4) gives {' and '.join(f'{n:.1f}B' for n in small)}; 6144, which table 5 has [M],"
    yield f"   gives {' and '.join(f'{n:.1f}B' for n in right)}. `jobs/paper/` uses 6144."
    yield "3. **Rounded factors**: table 2 multiplies 7.6 and 14.4 by the degree; exact factors give 7.64 and 14.42."
    yield '4. Table 4 names a row "80B-170B" that is 80B to 120B.'


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            sys.stderr.write("docs/paper.md is stale: run make docs\n")
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
