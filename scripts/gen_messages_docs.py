"""Writes docs/messages.md: what a person reads most, by the code that says it; ``--check``: is it stale (exit 1)?

States come out of ``runs.fold`` from records as agents write them; refusals from the command line itself, in a project
made for the purpose. Nothing here is typed off a screen.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.backends.protocol import Handle, Poll
from launcher.bundles import CodeBundle
from launcher.checkpoints import Candidate, explain
from launcher.cli import show
from launcher.cli.main import run as command
from launcher.cli.state_text import state_lines
from launcher.contract.plain import to_plain
from launcher.contract.records import Failure, NodeRecord, Outcome, ProcessId, RankRecord
from launcher.runs import Event, Observation, Progress, Run, fold

PAGE = Path(__file__).parent.parent / "docs" / "messages.md"
BEGAN = 1_769_869_501.0  # 2026-01-31 14:25:01 UTC
NODES = tuple(f"gpu{n:02d}" for n in range(1, 5))
NAME = "gpt-20260131-142501-3f9a"
ABOUT = {"job_name": "gpt", "cluster_name": "uni", "backend": "slurm", "job": {}, "cluster": {}, "plan": {}, "code": {}}
HANDLE = Handle("slurm", {"job": "4711", "name": f"zerun-{NAME}"})

HEAD = """# What zerun says

<!-- Written by scripts/gen_messages_docs.py (`make docs`) by the code that says it. Do not edit. -->

The first line says what, where and since when; the next ones why; the last what to do about it, as commands to paste.
Data goes to stdout, what happens meanwhile to stderr, and nothing is coloured or cut off a terminal.
"""

JOB = """name: gpt
nodes: 4
model: {kind: gpt, layers: 48, hidden: 1600, heads: 25, seq_len: 1024, vocab: 50257}
data: {tokens: /lustre/data/pile/train.bin}
zero: {stage: 0}
optimizer: {lr: 3e-4}
batch: {global: 256, micro: 2}
steps: 1000
precision: fp16
"""
CLUSTER = """name: uni
backend: slurm
login: {host: login.uni.invalid}
slurm: {partition: gpu}
nodes: {names: "gpu[01-25]", slots: 4, time_max: 24:00:00}
device: {kind: gpu, model: V100, memory: 16160MiB}
paths: {runs: "/lustre/scratch/$USER/zerun"}
"""


def submitted(*more: Event) -> Run:
    events = (
        Event(BEGAN, "submitting", 1, {"num_nodes": 4, "ranks": 16, "name": f"zerun-{NAME}"}),
        Event(BEGAN + 1, "submitted", 1, {"handle": to_plain(HANDLE)}),
        *more,
    )
    return Run(Path("runs") / NAME, ABOUT, events)


def record(node_rank: int, state: str = "running", failure: Failure | None = None, **ends: float | int) -> NodeRecord:
    """One node's record; ``ends`` says how its ranks ended, all alike."""
    ranks = tuple(
        RankRecord(4 * node_rank + i, i, 100 + i, BEGAN + 60, **ends)  # type: ignore[arg-type]
        for i in range(4)
    )
    ended = BEGAN + 7260 if state == "ended" else None
    agent = ProcessId(99, 1, "boot")
    return NodeRecord(
        NODES[node_rank], node_rank, agent, state, BEGAN + 58, BEGAN + 60, ranks=ranks, failure=failure, ended_at=ended
    )


def told(run: Run, seen: Observation, later: float) -> str:
    return "\n".join(state_lines(fold(run, seen), BEGAN + later))


def pending() -> str:
    why = "waits until enough nodes are free (Resources)"
    return told(submitted(), Observation(Poll("queued", "PENDING", why), 1, num_nodes=4), 312)


def running() -> str:
    seen = Observation(
        Poll("running", "RUNNING"), 1, tuple(record(n) for n in range(4)), frozenset(NODES), num_nodes=4,
        progress=Progress(420, 1000, 3.1416, 6.2, 42_318.0), checkpoints=(200, 400), attempt_checkpoints=(200, 400),
    )  # fmt: skip
    return told(submitted(), seen, 2730)


def done() -> str:
    outcome = Outcome("done", 1000, 1000, 2.7315, 2.8104)
    records = tuple(record(n, "ended", exit_code=0, ended_at=BEGAN + 7260) for n in range(4))
    seen = Observation(Poll("absent"), 1, records, outcome=outcome, checkpoints=(800, 1000), num_nodes=4)
    return told(submitted(), seen, 7900)


def failed() -> str:
    """A rank is killed; its peers die of it, the rest is stopped."""
    failure = Failure("rank_signal", NODES[2], "rank 9 was killed", 9, None, 9, BEGAN + 3660)
    records = []
    for n in range(4):
        whole = record(n, "ended", failure, exit_code=1, ended_at=BEGAN + 3661.2)
        ranks = [
            RankRecord(r.rank, r.local_rank, r.pid, r.started_at, BEGAN + 3660, signal=9) if r.rank == 9 else r
            for r in whole.ranks
        ]
        records.append(NodeRecord(**{**whole.__dict__, "ranks": tuple(ranks)}))
    lines = {
        9: ("step 611/1000  loss 3.0122  42,011 tokens/s  eta 40:11",),
        0: ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc] Connection closed by peer [10.0.0.3]",),
    }
    seen = Observation(
        Poll("absent"), 1, tuple(records), last_lines=lines, checkpoints=(400, 600), num_nodes=4,
        progress=Progress(611, 1000, 3.0122, 6.2, 42_011.0),
    )  # fmt: skip
    return told(submitted(), seen, 7900)


def time_limit() -> str:
    outcome = Outcome("stopped", 870, 870, 2.9, reason="the time limit is near")
    records = tuple(record(n, "ended", exit_code=75, ended_at=BEGAN + 7260) for n in range(4))
    seen = Observation(Poll("absent", "TIMEOUT"), 1, records, outcome=outcome, checkpoints=(800, 870), num_nodes=4)
    return told(submitted(), seen, 7900)


def unknown() -> str:
    seen = Observation(
        Poll("unknown", why="no answer within 10 s"), 1, num_nodes=4,
        silent={"login.uni.edu": "no answer within 10 s"},
    )  # fmt: skip
    return told(submitted(), seen, 900)


def resumed() -> str:
    found = [
        Candidate(400, True, "", 2**34, 1, 16, NODES, state="whole"),
        Candidate(600, True, "", 2**34, 1, 16, NODES, state="whole"),
        Candidate(800, False, "rank 9's shard is missing on gpu03", 2**34, 1, 16, NODES, state="damaged"),
    ]
    lines = explain(found, found[1])
    return "\n".join([f"$ zerun resume {NAME}", *lines, NAME])


def code() -> str:
    """A submit's line about the code: at first, with a changed file, with none, to nodes of which one was empty."""
    contents = {f"{n}": b"\n" * (3_100 if n == 7 else 56_000) for n in range(214)}
    size = sum(map(len, contents.values()))
    tree = CodeBundle(
        "x.tree", b"", "", len(contents), size, True, "8f31c0de", "main", ("train.py",), contents=contents,
        digests=tuple(contents),
    )  # fmt: skip
    every, one = frozenset(contents), frozenset({"7"})
    cases: Sequence[dict[str, frozenset[str]]] = (
        {"login": every}, {"login": one}, {"login": frozenset()}, {"gpu01": one, "gpu02": every},
    )  # fmt: skip
    return "\n".join(tree.sentence(sent) for sent in cases)


def refused(project: Path, *argv: str) -> str:
    """What the command prints on stderr, and its exit status."""
    said = io.StringIO()
    before = Path.cwd()
    os.chdir(project)
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = command(argv)
    finally:
        os.chdir(before)
    words = said.getvalue().rstrip().replace(str(project), "~/project")
    return f"$ zerun {' '.join(argv)}\n{words}\n[exit {code}]"


def project(folder: Path) -> Path:
    for name, text in (("jobs/gpt.yaml", JOB), ("clusters/uni.yaml", CLUSTER)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    wrong = JOB.replace("layers: 48", "layer: 48").replace("nodes: 4", "nodes: four\ntime: 48:00:00")
    (folder / "jobs/wrong.yaml").write_text(wrong)
    return folder


def page() -> str:
    # The words must not hang on where or by whom they are made.
    kept = {name: os.environ.pop(name, None) for name in ("ZERUN_RUNS", "ZERUN_CLUSTER", "NO_COLOR", "TZ")}
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        with tempfile.TemporaryDirectory() as folder:
            at = project(Path(folder).resolve())
            refusals = [
                ("It does not fit", refused(at, "submit", "jobs/gpt.yaml", "--cluster", "uni")),
                ("A description is wrong", refused(at, "submit", "jobs/wrong.yaml", "--cluster", "uni")),
                ("No such run", refused(at, "status", "gtp")),
            ]
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    states: Sequence[tuple[str, Callable[[], str]]] = (
        ("The code that a submit sends", code),
        ("Pending", pending), ("Running", running), ("Done", done), ("Failed", failed),
        ("Ended by its time limit, with a checkpoint", time_limit), ("The cluster does not answer", unknown),
        ("Resumed", resumed),
    )  # fmt: skip
    parts = [(title, text()) for title, text in states] + refusals
    time.tzset()
    return HEAD + "".join(f"\n## {title}\n\n```text\n{text}\n```\n" for title, text in parts)


def main() -> int:
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    show.note("docs/messages.md is not what the code says now: `make docs`, and read the difference")
    return 1


if __name__ == "__main__":
    sys.exit(main())
