"""How long ``zerun submit`` takes from a laptop over SSH until Slurm has the job queued.

From the start of the process until it ended, which it does once Slurm gave a job number: description, plan, code
bundle, connection, blobs, ``sbatch``. "First": nothing of ours is on the cluster yet. "Again": runtime and code are
there. The job is held (`sbatch --hold`), so that it stays queued and nothing of it runs
meanwhile; that Slurm has it, by its name and pending, is looked up after every round.
"""

from __future__ import annotations

import shutil
import subprocess

import measuring
import sites
from measuring import ROOT, ZERUN, Options, Report, figure, timed

ROUNDS = 15
AT_MOST_S = 2.0
JOB = """\
name: queued
nodes: 2
slots_per_node: 2
time: 2:00
model: {kind: gpt, layers: 4, hidden: 128, heads: 4, seq_len: 128}
data: {text: python-stdlib}
zero: {stage: 2}
optimizer: {lr: 1e-3}
batch: {global: 32, micro: 8}
steps: 10
"""


def measure(options: Options) -> Report:
    with sites.site("q", sites.UNI, nodes=2, slurm=True) as site:
        (site.folder / "jobs" / "queued.yaml").write_text(JOB)
        # The code that travels: a working tree of a real size.
        shutil.copytree(ROOT / "launcher", site.folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["git", "init", "-q"], cwd=site.folder, check=True)

        def submit(*, first: bool) -> float:
            if first:
                site.testbed.exec("login", ["rm", "-rf", "/home/trainer/zerun"])
            argv = [ZERUN, "submit", "jobs/queued.yaml", "--cluster", "uni"]
            seconds, done = timed(argv, cwd=site.folder, environment=site.environment)
            name = f"zerun-{done.stdout.decode().strip()}"
            ask = ["squeue", "-h", "-o", "%T", "--name", name]
            state = site.testbed.exec("login", ask).stdout.decode().strip()
            if state != "PENDING":
                raise SystemExit(f"{name} is not queued but {state or 'unknown to Slurm'}")
            site.testbed.exec("login", ["scancel", "--name", name])
            return seconds

        def ssh() -> float:
            argv = ["ssh", "-F", str(site.testbed.ssh_config), "login", "sbatch", "--version"]
            return timed(argv, cwd=site.folder)[0]

        sides = {
            "first": lambda: submit(first=True),
            "again": lambda: submit(first=False),
            "ssh login sbatch --version": ssh,
        }
        samples = measuring.interleave(sides, options.rounds)
    return Report(
        benchmark="submit",
        command=".venv/bin/python benchmarks/submit.py",
        machine=measuring.machine(options.load, options.waited),
        figures=[
            figure("submit over SSH until queued, first", "s", samples["first"], AT_MOST_S),
            figure("submit over SSH until queued, again", "s", samples["again"], AT_MOST_S),
            figure("`ssh login sbatch --version`", "s", samples["ssh login sbatch --version"]),
        ],
        samples=samples,
        notes=("the login node is this machine's own too",),
    )


if __name__ == "__main__":
    measuring.command_line(__doc__, "submit.py", ROUNDS, measure)
