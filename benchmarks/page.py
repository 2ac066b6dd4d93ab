"""Runs every benchmark and writes what they told into docs/performance.md: ``page.py [--quiet SECONDS] [NAME…]``.

With names only those are run; what the page says of the others stays.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys

from measuring import PYTHON, ROOT, Figure, Report, cells, conditions

PAGE = ROOT / "docs" / "performance.md"
ENGINE = ("engine.py", "--report", "--world")
OURS, THEIRS = "zero0,zero0-native,zero1,zero2,zero3", "ddp,fsdp2,fsdp2-kept"
ONE_THING = "zero0-send,zero1-send,zero2-send,zero3-send,zero1-waits,zero3-trims,fsdp2-heap"
DEEPSPEED = ",".join(["zero1,zero2,zero3", *(f"deepspeed{n}-{how}" for n in (1, 2, 3) for how in ("default", "set"))])
DEEPSPEED_BEST = "zero1,zero2,zero3,alone,deepspeed1-set,deepspeed2-default,deepspeed2-set,deepspeed3-set"
RUNS = {
    "startup": ("startup.py", "--json"),
    "reach": ("reach.py", "--json"),
    "submit": ("submit.py", "--json"),
    "first_step": ("first_step.py", "--json"),
    "engine_2_11M": (*ENGINE, "2", "--parameters", "11M", "--steps", "2", "--policies", f"{OURS},{THEIRS},{ONE_THING}"),
    "engine_2_11M_deepspeed": (*ENGINE, "2", "--parameters", "11M", "--steps", "1", "--policies", DEEPSPEED),
    "engine_4_11M_deepspeed": (*ENGINE, "4", "--parameters", "11M", "--steps", "1", "--policies", DEEPSPEED_BEST),
    "engine_2_25M_deepspeed": (*ENGINE, "2", "--parameters", "25M", "--steps", "1", "--policies", DEEPSPEED_BEST),
    "engine_4_11M": (*ENGINE, "4", "--parameters", "11M", "--steps", "1", "--policies", f"{OURS},{THEIRS}"),
    "engine_2_25M": (*ENGINE, "2", "--parameters", "25M", "--steps", "1", "--policies", f"{OURS},{THEIRS}"),
    "simulate": ("simulate.py", "--json"),
    "narrow_link": ("narrow_link.py", "--json"),
    # All at once would not fit the memory of this machine.
    "engine_2_85M": (*ENGINE, "2", "--parameters", "85M", "--steps", "1", "--policies", f"zero1,zero2,zero3,{THEIRS}"),
}


def section(report: Report) -> str:
    """The part of the page between a benchmark's two marks."""
    rows = [cells(shown) for shown in report.figures]
    lines = ["| | median | 95 % interval | to reach | |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    notes = "".join(f"{note[0].upper()}{note[1:]}. " for note in report.notes)
    return f"`{report.command}`\n\n" + "\n".join(lines) + f"\n\n{notes}{conditions(report)}.\n"


def write(report: Report) -> None:
    begin, end = f"<!-- {report.benchmark}: begin -->\n", f"<!-- {report.benchmark}: end -->"
    text = PAGE.read_text("utf-8")
    found = re.search(re.escape(begin) + ".*?" + re.escape(end), text, re.DOTALL)
    if found is None:
        raise SystemExit(f"{PAGE} has no marks for {report.benchmark}")
    PAGE.write_text(text[: found.start()] + begin + section(report) + end + text[found.end() :], "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=" ".join(RUNS))
    parser.add_argument("--quiet", default="600", metavar="SECONDS", help="wait so long for a quiet machine")
    given = parser.parse_args()
    unknown = set(given.names) - set(RUNS)
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(RUNS)}")
    for name in given.names or RUNS:
        script, *options = RUNS[name]
        argv = [PYTHON, str(ROOT / "benchmarks" / script), *options, "--quiet", given.quiet]
        said = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)
        report = Report(**{**said, "figures": [Figure(**shown) for shown in said["figures"]]})
        write(report)
        sys.stderr.write(f"{PAGE.relative_to(ROOT)}: {name} written\n")


if __name__ == "__main__":
    main()
