"""Writes docs/accuracy.md from real steps and simulated ones (needs torch); ``--check`` says whether it is stale."""

# ruff: noqa: E501  (prose of a page, a line as it is printed)

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "simulate"), str(ROOT / "tests" / "engine")]
PAGE = ROOT / "docs" / "accuracy.md"

HEAD = """# How exact a simulated step is

<!-- Written by scripts/gen_accuracy_docs.py from real steps and simulated ones. Do not edit. -->

`zerun plan JOB --cluster C --simulate` runs one step of the engine and the loop as they are, as one rank of the planned world, on
tensors that have shapes and no memory and in a process group in which nobody else is. Every storage is told to a ledger
(`launcher/engine/watching/track.py`) from the operation that makes it to its last reference, `resize_` included. The same ledger records real
runs, so the two can be held against each other: this page, and `tests/simulate/test_simulate_exact.py`.

The reference GPT (3 layers of 96, 300 tokens, two micro-batches of 4 × 50, buckets of 70 kB, AdamW with clipping, fp32), the second
step, on CPU ranks that talk over gloo. Bytes of live storages at the peak of each phase; *differs* is simulated less real, by category.

"""

TAIL = """
## What may differ, and what is not counted

- **In the update**, up to 64 KiB: a worker thread of gloo lets go of a message's buffer when it gets to it, so a real run sometimes
  holds one small buffer (`temporaries`) longer than the simulation does. The row then says so. The last message of a step is kept
  until the next one on purpose, so that forward and backward do not hang on that thread.
- **Inside a call**: what a kernel, an allocator or a library holds while it works is no tensor's storage, and counted on neither side.
- **GPUs**: simulated on CPU tensors with the library's own collectives. A GPU's attention kernel may keep other statistics, and
  workspaces of kernels and of NCCL come on top: `zerun plan` says this in the line marked *assumed*.
- **Values**: none exist. Where a run reads one, a floating-point number is taken as 1, a flag as false, an integer as 1; a model that
  branches on values takes that branch.
- **Gloo's messages** are simulated one by one, as `PeerComm` sends them: meant for worlds of up to 64 CPU ranks.
"""


SECOND = """
A smaller model (2 layers of 92, 301 tokens) in other precisions, with other optimizers, with tensor ranks and with what recomputation
stores elsewhere: rank 0 of 4. `tests/simulate/test_simulate_exact.py` holds a few of these in `make test`, and every setting at every
stage, with and without recomputation, at the first rank and the last, in `make test-all`.

"""


def page() -> str:
    from exactness import PHASES, Row, cases_of, plain_cases, rows
    from real_steps import SETTINGS

    def cells(row: Row) -> str:
        shown = [
            f"{row.simulated[p]:,}" + ("" if row.simulated[p] == row.real[p] else f" (real {row.real[p]:,})")
            for p in PHASES[:2]
        ]
        parts = [f"{p} {what} {n:+,}" for p in PHASES for what, n in sorted(row.differs[p].items())]
        update = f"{row.simulated['update']:,} | {row.real['update']:,}"
        return f"{shown[0]} | {shown[1]} | {update} | {', '.join(parts) or 'nothing'} |"

    heads = "forward | backward | update: simulated | update: real | differs |"
    lines = [f"| ranks | stage | recompute | rank | {heads}", "|---|" + "---|" * 8]
    lines += [
        f"| {row.world} | {row.stage} | {row.recompute} | {row.rank} | {cells(row)}" for row in rows(plain_cases())
    ]
    second = [f"| setting | stage | recompute | {heads}", "|---|" + "---|" * 7]
    found = rows([case for name in SETTINGS for case in cases_of(name, stages=(1, 3))])
    second += [f"| {row.setting} | {row.stage} | {row.recompute} | {cells(row)}" for row in found if row.rank == 0]
    return HEAD + "\n".join(lines) + "\n" + SECOND + "\n".join(second) + "\n" + TAIL


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        # The update's column may differ by what gloo's threads happen to hold: everything else must be equal.
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if [line.split("|")[:7] for line in old.splitlines()] == [line.split("|")[:7] for line in text.splitlines()]:
            return 0
        sys.stderr.write("docs/accuracy.md is stale: run scripts/gen_accuracy_docs.py\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
