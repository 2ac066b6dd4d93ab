"""How long 25 nodes take to be reached cold, against ``clush -w node[01-25] hostname`` in the same run.

Every side is a process of its own that starts with nothing: no connection, no agent, no multiplexing. Interleaved,
and judged by the ratio round by round. ``zerun cluster check`` does much more than ``hostname`` (two Pythons
a node, names of the others, disk, clock); it is told beside them, once with the runtime to be shipped and once without.

clush runs OpenSSH, whose key exchange is post-quantum by default (sntrup761x25519); paramiko's is curve25519.
So clush is also run with curve25519: what of the ratio is left then is the launcher's own.
"""

from __future__ import annotations

import measuring
import sites
from measuring import PYTHON, ZERUN, Options, Report, figure, ratios, timed

ROUNDS = 12
NODES = 25
AT_MOST = 0.95
SAME_KEX = "KexAlgorithms=curve25519-sha256"


def measure(options: Options) -> Report:
    with sites.site("r", sites.RACK, nodes=NODES, slurm=False) as site:
        nodes = f"node[01-{NODES:02d}]"
        config = f"-F {site.testbed.ssh_config}"
        hostnames = sorted(f"{node}: {node}" for node in site.testbed.nodes)

        def reach(*argv: str) -> float:
            seconds, done = timed(argv, cwd=site.folder, environment=site.environment)
            if sorted(done.stdout.decode().splitlines()) != hostnames:
                raise SystemExit(f"{argv[0]} did not reach every node: {done.stdout.decode()}")
            return seconds

        def check(*, first: bool) -> float:
            if first:
                for node in site.testbed.nodes:
                    site.testbed.exec(node, ["rm", "-rf", "/scratch/trainer/zerun"])
            return timed([ZERUN, "cluster", "check", "rack"], cwd=site.folder, environment=site.environment)[0]

        sides = {
            "zerun": lambda: reach(PYTHON, str(measuring.ROOT / "benchmarks/hostnames.py"), "clusters/rack.yaml"),
            "clush": lambda: reach("clush", "-w", nodes, "-o", config, "hostname"),
            "clush, curve25519": lambda: reach("clush", "-w", nodes, "-o", f"{config} -o {SAME_KEX}", "hostname"),
            "check, first": lambda: check(first=True),
            "check, again": lambda: check(first=False),
        }
        samples = measuring.interleave(sides, options.rounds)
    clush = samples["clush"]
    return Report(
        benchmark="reach",
        command=".venv/bin/python benchmarks/reach.py",
        machine=measuring.machine(options.load, options.waited),
        figures=[
            figure(f"{NODES} nodes reached, over clush", "×", ratios(samples["zerun"], clush), AT_MOST),
            figure("the same, clush with curve25519", "×", ratios(samples["zerun"], samples["clush, curve25519"])),
            figure("all of `zerun cluster check`, over clush", "×", ratios(samples["check, again"], clush)),
            figure("the same on nodes that never saw zerun", "×", ratios(samples["check, first"], clush)),
            figure(f"{NODES} nodes reached", "s", samples["zerun"]),
            figure(f"`clush -w {nodes} hostname`", "s", clush),
            figure("`zerun cluster check`", "s", samples["check, again"]),
        ],
        samples=samples,
        notes=("all nodes are this machine's own: what their sshd and Python cost is in every side",),
    )


if __name__ == "__main__":
    measuring.command_line(__doc__, "reach.py", ROUNDS, measure)
