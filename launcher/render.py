"""Plan → the script that is submitted. Jinja2 templates in which every value is shell-quoted by itself.

``{{ value }}`` comes out as one word that a POSIX shell reads back byte-equal, whatever the value holds.
Filters say otherwise: ``sbatch`` quotes for a ``#SBATCH`` line, ``comment`` makes one harmless line for a
shell comment, ``node_path`` leaves ``~`` and ``$NAME`` for the node's shell to expand and quotes all else,
``raw`` leaves text as it is (for text the renderer itself made). A name that is not
defined is an error that says the template and the line.

Templates are looked for in ``--templates DIR``, then in the user's config folder, then among those that
come with the package; each file on its own, so that a folder may override one and leave the rest.
"""

from __future__ import annotations

import importlib.resources
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import jinja2

from .contract.errors import UsageError
from .contract.folder import RunFolder
from .contract.launch import LaunchSpec, Node
from .planning import job_name
from .planning.options import slurm_memory, slurm_time
from .planning.plan import Plan
from .specs.models import Cluster
from .specs.pools import chosen_pool

TEMPLATES = {"slurm": "slurm/job.sh.j2", "direct": "ssh/start.sh.j2"}


def render(
    plan: Plan,
    cluster: Cluster,
    launch: LaunchSpec,
    *,
    templates: Path | None = None,
    user_templates: Path | None = None,
) -> bytes:
    """The script of one attempt, in UTF-8. Needs no Slurm, no torch, no network.

    Raises UsageError for a value that no script can hold (a NUL, a line break in an ``#SBATCH`` line) and
    for a template that is missing, broken, or names what is not there.
    """
    environment = _environment(_folders(templates, user_templates))
    values = _common(plan, cluster, launch)
    values |= _slurm(plan, cluster, launch) if plan.backend == "slurm" else _direct(plan, launch)
    text = _fill(environment, TEMPLATES[plan.backend], values)
    if not text.startswith("#!"):
        raise UsageError(f"{TEMPLATES[plan.backend]}: a script has to begin with #!, or nothing starts it")
    return text.encode("utf-8", "surrogateescape")


def packaged_templates() -> Path:
    """The templates that come with the package. (``launcher/_templates`` is ``templates/`` of the source tree.)"""
    return Path(str(importlib.resources.files(__package__).joinpath("_templates")))


# --- values ---------------------------------------------------------------------------------------


def _common(plan: Plan, cluster: Cluster, launch: LaunchSpec) -> dict[str, Any]:
    folder = RunFolder(PurePosixPath(launch.run_dir))
    attempt = folder.attempt(launch.attempt)
    return {
        "run": launch.run,
        "attempt": launch.attempt,
        "job_name": job_name(launch.run, launch.attempt),
        "run_dir": launch.run_dir,
        "attempt_dir": str(attempt.root),
        "logs": str(attempt.logs),
        "runtime": launch.runtime,
        "agent_python": launch.agent_python,
        "cluster_name": plan.cluster_name,
        "num_nodes": len(plan.nodes),
        "world_size": plan.topology.world_size,
        "time_s": plan.time_s,
        "warn_s": launch.warn_s,
        "overlap": launch.here is not None,
    }


def _slurm(plan: Plan, cluster: Cluster, launch: LaunchSpec) -> dict[str, Any]:
    """A node of a Slurm job has the same slots as every other (planning.place)."""
    slots, pool = plan.nodes[0].slots, chosen_pool(cluster)
    cpus = None if launch.cpus_per_slot is None else launch.cpus_per_slot * slots
    memory = None if cluster.memory_per_slot is None else slurm_memory(cluster.memory_per_slot * slots)
    gpus = f"{cluster.slurm.gpu_type}:{slots}" if cluster.slurm.gpu_type else str(slots)
    by = cluster.slurm.gpus_by
    gpu_option = {"none": None, "gres": f"--gres=gpu:{gpus}", "gpus-per-node": f"--gpus-per-node={gpus}"}[by]
    log = f"{RunFolder(PurePosixPath(launch.run_dir)).attempt(launch.attempt).logs}/slurm-"
    if "\\" in log:
        raise UsageError(
            f"{launch.run_dir}: Slurm reads no log path with a backslash", hint="choose another paths.runs"
        )
    return {
        "slurm": cluster.slurm,
        "slots": slots,
        "cpus": cpus,
        "memory": memory,
        "gpu_option": gpu_option,
        "time": None if plan.time_s is None else slurm_time(plan.time_s),
        "preemptible": pool is not None and pool.preemptible,
        "log_pattern": log.replace("%", "%%") + "%j.out",
    }


def _direct(plan: Plan, launch: LaunchSpec) -> dict[str, Any]:
    first = plan.topology.ranks_on
    return {
        "nodes": [
            {
                "name": node.name,
                "address": node.address or node.name,
                "ranks": _ranks(first(index)),
                "request": _start_request(node, launch),
            }
            for index, node in enumerate(plan.nodes)
        ],
        "rendezvous": str(RunFolder(PurePosixPath(launch.run_dir)).attempt(launch.attempt).rendezvous),
    }


def _start_request(node: Node, launch: LaunchSpec) -> str:
    """What the agent's ``start`` reads on stdin, without its closing brace: ``rendezvous`` may follow."""
    request = {"run_dir": launch.run_dir, "attempt": launch.attempt, "node": node.name}
    return json.dumps(request, ensure_ascii=False)[:-1]


def _ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


# --- quoting --------------------------------------------------------------------------------------


class Text(str):
    """Text that goes into the script as it is."""


def shell_quoted(value: object) -> str:
    """One word of a POSIX shell that reads back as ``value``: what every expression of a template becomes."""
    if isinstance(value, jinja2.Undefined):
        return str(value)  # StrictUndefined: raises, naming the variable
    if isinstance(value, Text):
        return value
    if value is None or isinstance(value, bool):
        raise UsageError(f"a template writes {value}, which is no text: guard it with {{% if %}}")
    if not isinstance(value, (str, int, float, Path)):
        raise UsageError(f"a template writes a {type(value).__name__}; a script can hold text and numbers only")
    text = str(value)
    if "\0" in text:
        raise UsageError(f"a script cannot hold the NUL character of {text!r}")
    return shlex.quote(text)


_PLAIN_OPTION = re.compile(r"^[A-Za-z0-9_@%+=:,./\[\]*&|()!-]+$")


def sbatch_quoted(value: object) -> Text:
    """As sbatch reads a ``#SBATCH`` line: quotes of both kinds, a backslash before any character also inside
    them, ``#`` begins a comment outside them. It has no way to write a line break."""
    text = str(value)
    bad = next((c for c in text if ord(c) < 32 or ord(c) == 127), None)
    if bad is not None:
        raise UsageError(f"an #SBATCH line cannot hold the character {bad!r} of {text!r}")
    if _PLAIN_OPTION.match(text):
        return Text(text)
    return Text('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')


_EXPANDED = re.compile(r"(^~(?=/|$)|\$[A-Za-z_][A-Za-z0-9_]*)")


def node_path(value: object) -> Text:
    """A path whose leading ``~`` and whose ``$NAME`` the node's shell expands; everything else is literal."""
    words = []
    for piece in _EXPANDED.split(str(value)):
        if _EXPANDED.fullmatch(piece):
            words.append(f'"${{{"HOME" if piece == "~" else piece[1:]}}}"')
        elif piece:
            words.append(shell_quoted(piece))
    return Text("".join(words) or "''")


def commented(value: object) -> Text:
    """One line for a shell comment: line breaks and other control characters are written as escapes."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value)))


# --- templates ------------------------------------------------------------------------------------


def _folders(templates: Path | None, user_templates: Path | None) -> list[Path]:
    folders = []
    if templates is not None:
        if not templates.is_dir():
            raise UsageError(f"--templates {templates}: no such folder")
        if not any(templates.rglob("*.j2")):
            names = " or ".join(TEMPLATES.values())
            raise UsageError(f"--templates {templates}: it holds no template", hint=f"it may hold {names}")
        folders.append(templates)
    if user_templates is not None and user_templates.is_dir():
        folders.append(user_templates)
    return [*folders, packaged_templates()]


def _environment(folders: list[Path]) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
        undefined=jinja2.StrictUndefined,
        finalize=shell_quoted,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"raw": Text, "sbatch": sbatch_quoted, "comment": commented, "node_path": node_path}
    return environment


def _fill(environment: jinja2.Environment, name: str, values: Mapping[str, Any]) -> str:
    """Renders, and tells a template's mistake by its file and line."""
    try:
        return environment.get_template(name).render(values)
    except jinja2.TemplateSyntaxError as problem:
        raise UsageError(f"{problem.filename or problem.name}:{problem.lineno}: {problem.message}") from problem
    except jinja2.TemplateNotFound as problem:
        assert isinstance(environment.loader, jinja2.FileSystemLoader)
        looked = ", ".join(map(str, environment.loader.searchpath))
        raise UsageError(f"template {problem.name} is in none of: {looked}") from problem
    except jinja2.TemplateError as problem:
        known = ", ".join(sorted(values))
        raise UsageError(f"{_place(problem)}: {problem.message}", hint=f"templates know: {known}") from problem
    except UsageError as problem:
        raise UsageError(f"{_place(problem)}: {problem.message}", hint=problem.hint) from problem
    except UnicodeDecodeError as problem:
        raise UsageError(f"template {name} is not UTF-8: {problem.reason} at byte {problem.start}") from problem
    except (TypeError, ValueError, ArithmeticError) as problem:
        raise UsageError(f"{_place(problem)}: {problem}") from problem


def _place(problem: BaseException) -> str:
    """``FILE:LINE`` of the innermost template line that the error came through (jinja2 puts them in)."""
    place = "template"
    step: TracebackType | None = problem.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if file.endswith(".j2"):
            place = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return place
