"""A script of the user's own: stopped, resumed, its checkpoints and outputs brought home; and what frameworks see."""

from __future__ import annotations

import json
from typing import Any

from e2e_site import Site

OWN = """\
import os, pathlib, signal, sys, time

rank, run = int(os.environ["RANK"]), pathlib.Path(os.environ["ZERUN_RUN_DIR"])
begun = os.environ.get("ZERUN_RESUME_FROM")


def save(step, whole):
    folder = pathlib.Path("ck") / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank-{rank}.pt").write_bytes(bytes([rank]) * 5000)
    if rank == 0 and whole:
        (folder / "DONE").touch()


if begun:
    mine = pathlib.Path(begun, f"rank-{rank}.pt").read_bytes()
    print(f"rank {rank} goes on from {os.path.relpath(begun, run)}: {len(mine)} bytes of {mine[0]}", flush=True)
    sys.exit()
samples = pathlib.Path("samples", "deep")
samples.mkdir(parents=True)
(samples / f"rank-{rank}.txt").write_text(f"sample of {rank}")
(run / "out").mkdir(exist_ok=True)
(run / "out" / f"table-{rank}.csv").write_text("a,b")
if rank == 0:
    (samples / "passwd").symlink_to("/etc/passwd")
    pathlib.Path("samples", "etc").symlink_to("/etc")
save(9, True)
save(10, True)


def stopped(*_):
    save(30, False)  # torn
    save(20, True)
    (run / "out" / f"stop-file-{rank}").write_text(str(os.path.exists(os.environ["ZERUN_STOP_FILE"])))
    sys.exit(75)


signal.signal(signal.SIGUSR1, stopped)
print("ready", flush=True)
time.sleep(600)
"""
JOB = """\
name: own
nodes: 2
slots_per_node: 1
time: 10s
code: {root: ..}
program: {argv: [python, train.py], stop_signal: USR1, stop_grace: 5s}
checkpoint: {foreign: "ck/*", whole_when: DONE}
outputs: ["samples/**", "$ZERUN_RUN_DIR/out/*"]
"""


def test_a_programs_checkpoints_are_listed_brought_home_proven_and_handed_back(rack: Site, testbed: Any) -> None:
    rack.write("train.py", OWN)
    rack.write("jobs/own.yaml", JOB)
    run = rack.zerun("submit", "jobs/own.yaml", "--cluster", "rack", "--follow", code=75).stdout.strip()
    assert rack.json("status", run)["state"] == "stopped"
    found = [(c["name"], c["step"], c["whole"], c["bytes"]) for c in rack.json("ckpt", "ls", run)]
    assert found == [
        ("code/ck/step-9", 9, True, 10_000), ("code/ck/step-10", 10, True, 10_000),
        ("code/ck/step-20", 20, True, 10_000), ("code/ck/step-30", 30, False, 10_000),
    ]  # fmt: skip
    assert "DONE is not there: it was never finished" in rack.zerun("ckpt", "ls", run).stdout
    got = rack.json("collect", run)
    home = rack.run_folder(run)
    assert (got["name"], got["verified_shards"]) == ("code/ck/step-20", 3)
    assert (home / "code/ck/step-20/rank-1.pt").read_bytes() == bytes([1]) * 5000
    brought = {str(p.relative_to(home)) for top in ("code", "out") for p in (home / top).rglob("*") if not p.is_dir()}
    kept = {f"code/ck/step-20/{name}" for name in ("DONE", "rank-0.pt", "rank-1.pt")}
    outputs = {f"out/{name}-{rank}{end}" for rank in (0, 1) for name, end in (("table", ".csv"), ("stop-file", ""))}
    assert brought == kept | outputs | {f"code/samples/deep/rank-{rank}.txt" for rank in (0, 1)}
    assert (home / "out/stop-file-0").read_text() == "True"
    assert rack.json("collect", run)["moved_files"] == 0
    assert "3 files" in rack.zerun("ckpt", "verify", run).stdout
    # A byte that changed at home is found; one that changed on its node is what the node has.
    with open(home / "code/ck/step-20/rank-0.pt", "r+b") as file:
        file.write(b"X")
    assert "rank-0.pt (from node01) is not xxh3:" in rack.zerun("ckpt", "verify", run, code=7).stderr
    earlier = rack.json("collect", run, "--checkpoint", "9")
    assert earlier["name"] == "code/ck/step-9"
    assert "no checkpoint of step 4" in rack.zerun("resume", run, "--step", "4", code=2).stderr
    again = rack.zerun("resume", run, "--follow")
    assert "code/ck/step-30: DONE is not there" in again.stderr and "code/ck/step-20: whole, taken" in again.stderr
    logs = rack.zerun("logs", run).stdout
    assert "rank 1 goes on from code/ck/step-20: 5000 bytes of 1" in logs
    assert json.loads((home / "attempts/2/launch.json").read_text())["resume_from"] == "code/ck/step-20"
