"""Writes docs/cli.md from the command line itself; ``--check`` only says whether it is stale (exit 1)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from launcher.cli.main import app
from launcher.contract.errors import Exit

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

EXITS = {
    Exit.DONE: "done: what was asked for happened; of `wait` and `submit --follow`: the job is done",
    Exit.JOB_FAILED: "the job failed",
    Exit.USAGE: "usage or description wrong; a folder that may not be read or written",
    Exit.DOES_NOT_FIT: "the plan does not fit",
    Exit.UNREACHABLE: "cluster unreachable, or state unknown",
    Exit.REFUSED: "refused for safety: host key, name, path; slots that another run or process holds",
    Exit.NO_SPACE: "no space, on a disk or in a quota; of `wait`: what the first failed rank died of",
    Exit.VERIFICATION: "verification failed: bytes that are not what the manifest says",
    Exit.PARTIAL: "only part of the nodes answered, or are well",
    Exit.CANCELLED: "cancelled",
    Exit.STILL_RUNNING: "still running (`wait --timeout`, `status --exit-status`)",
    Exit.STOPPED: "stopped, resumable; also a time limit that left a newer whole checkpoint",
    Exit.TIME_LIMIT: "ended by its time limit",
    Exit.INTERRUPTED: "interrupted (Ctrl-C); while following this detaches and the job goes on",
}

HEAD = """# The command line

<!-- Written by scripts/gen_cli_docs.py (`make docs`) from the command line itself. Do not edit. -->

Data goes to stdout, everything else to stderr. Every reading verb takes `--json` (`render` aside, whose
answer is a script). Off a terminal nothing is cut, wrapped, coloured or animated; `NO_COLOR` is honoured.
`RUN` is a run's id, a unique beginning of one, or `last`.
`CLUSTER` is a path or a name found in `clusters/`; without it the job's `cluster:`, then `$ZERUN_CLUSTER`, then
`~/.config/zerun/cluster`. Runs are kept in the project root's `runs/`, or in `$ZERUN_RUNS`.
`zerun --install-completion`, once a shell, completes verbs, options, runs and clusters on Tab.
"""

EXIT_HEAD = """## Exit codes

Reading verbs exit 0 once they could answer. `wait` and `submit --follow` carry the job's code, and so does
`status --exit-status`; the same number is `exit_code` in `--json`. A rank killed by signal *n* counts as 128 + *n*,
never as 0.

| code | meaning |
|---|---|"""


def page() -> str:
    """The whole of docs/cli.md."""
    root: Any = typer.main.get_command(app)
    lines = [HEAD, "## Verbs", ""]
    verbs = list(_verbs(root, "zerun"))
    lines += [f"- [`{name}`](#{_anchor(name)}): {_first_line(verb)}" for name, verb in verbs]
    for name, verb in verbs:
        lines += ["", *_section(name, verb)]
    lines += ["", EXIT_HEAD, *(f"| {int(code)} | {meaning} |" for code, meaning in EXITS.items())]
    return "\n".join(lines) + "\n"


def _verbs(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _verbs(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _first_line(verb: Any) -> str:
    return str(verb.help).strip().splitlines()[0]


def _section(name: str, verb: Any) -> list[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    opts = [p for p in verb.params if p.param_type_name == "option"]
    usage = " ".join([name, *(_usage_of(p) for p in arguments), *(["[OPTIONS]"] if opts else [])])
    paragraphs = [" ".join(p.split()) for p in str(verb.help).strip().split("\n\n")]
    lines = [f"### {name}", "", "```", usage, "```", ""]
    for paragraph in paragraphs:
        lines += [paragraph, ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| `{_plain_metavar(p)}` | {_cell(p.help)} |" for p in arguments]
    lines += [f"| {_spelling(p)} | {_cell(p.help)} |" for p in opts]
    return lines


def _plain_metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper()).strip("[]")


def _usage_of(parameter: Any) -> str:
    return _plain_metavar(parameter) if parameter.required else f"[{_plain_metavar(parameter)}]"


def _spelling(parameter: Any) -> str:
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(f"`{name}{value}`" for name in parameter.opts)


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            sys.stderr.write("docs/cli.md is stale: run make docs\n")
        return int(stale)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
