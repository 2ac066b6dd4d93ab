"""Verbs that change something on a cluster: submit, cancel, wait, resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.errors import Exit, UsageError
from . import options, show

if TYPE_CHECKING:
    from ..app import App, Submitted
    from ..attempts.starting import Waiting

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Shows every rank's lines (stderr) and ends as the job ends.")
]


WaitFree = Annotated[
    str | None,
    typer.Option(
        "--wait-free",
        metavar="[TIME]",
        help="Without a scheduler: waits until the slots are free, at most TIME (90s, 30min, 2h). Default: is refused.",
    ),
]


def _waiting(wait_free: str | None) -> Waiting:
    from ..attempts.starting import Waiting
    from ..specs import units

    if wait_free is None:
        return Waiting()
    if wait_free == options.FOR_EVER:
        return Waiting(None, show.note)
    try:
        return Waiting(units.duration(wait_free), show.note)
    except ValueError as problem:
        raise UsageError(f"--wait-free {wait_free}: {problem}") from None


def submit_verb(
    job: options.Job,
    cluster: options.Cluster = None,
    sets: options.Sets = None,
    follow: Follow = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints the script that would be submitted, and the plan (stderr).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Submits even what the plan says does not fit.")] = False,
    wait_free: WaitFree = None,
    here: Annotated[
        bool, typer.Option("--here", help="Runs inside this shell's Slurm allocation (salloc), queues nothing.")
    ] = False,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="By it `zerun ls --tag` finds the run again.")
    ] = None,
    templates: options.Templates = None,
) -> None:
    """Submits a job and prints the run's id, alone, on stdout.

    With --follow the exit code is the job's. Ctrl-C while following detaches; the job goes on.
    """
    app = options.open_app(templates)
    if dry_run:
        _dry_run(app, job, cluster, sets or [], force)
        return
    waiting = _waiting(wait_free)
    submitted = app.submit(job, cluster, sets or [], force=force, waiting=waiting, tags=tags or (), here=here)
    _announce(submitted, follow)
    if follow:
        _follow_and_exit(app, submitted.run)


def _announce(submitted: Submitted, follow: bool) -> None:
    """The id alone on stdout, so that ``RUN=$(zerun submit …)`` works; all else on stderr."""
    show.data(submitted.run)
    sys.stdout.flush()
    for text in submitted.notes:
        show.note(text)
    if not follow:
        show.note(f"submitted; look with: zerun status {submitted.run}    zerun logs {submitted.run} -f")


def _dry_run(app: App, job: Path, cluster: str | None, sets: list[str], force: bool) -> None:
    """The script on stdout, byte for byte what render prints; the plan beside it on stderr."""
    from .plan import plan_lines, refuse_if_too_large

    prepared = app.prepare(job, cluster, sets)
    for line in (*plan_lines(prepared.plan), "", *prepared.notes):
        show.note(line)
    if not force:
        refuse_if_too_large(prepared.plan)
    show.data_bytes(prepared.script)
    show.note("nothing was submitted (--dry-run)")


def _follow_and_exit(app: App, run: str) -> None:
    from .follow import follow

    code = follow(app, run)
    if code:
        raise typer.Exit(code)


def cancel_verb(run: options.Run, as_json: options.Json = False) -> None:
    """Ends every process of a run, on every node, and nothing else."""
    from .state_text import print_state

    app = options.open_app()
    print_state(app.cancel(app.resolve(run)), as_json)


def wait_verb(
    run: options.Run,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Gives up then, with exit 10.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Waits until a run has ended; the exit code is the job's."""
    from ..app import exit_code_of
    from .follow import detached
    from .state_text import print_state

    app = options.open_app()
    name = app.resolve(run)
    try:
        state = app.wait(name, timeout, show.note)
    except KeyboardInterrupt:
        detached(name)
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
    print_state(state, as_json)
    code = exit_code_of(state)
    if code:
        raise typer.Exit(code)


def resume_verb(
    run: options.Run,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", metavar="M", min=1, help="For this attempt, another number of nodes than the job's."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="S", min=0, help="This checkpoint. Default: the newest whole one.")
    ] = None,
    sets: options.JobSets = None,
    follow: Follow = False,
    wait_free: WaitFree = None,
) -> None:
    """Starts a run's next attempt from a checkpoint, on the same or another number of ranks.

    The global batch, the cluster and what earlier resumes had --set stay what they were. Says which checkpoints
    were looked at, which was taken, and why. A program that has none of ours starts again, as the next attempt.
    Without a scheduler nodes that do not answer are passed over, and what killed agents left anywhere is ended first.
    Prints the run's id on stdout.
    """
    app = options.open_app()
    waiting = _waiting(wait_free)
    resumed = app.resume(app.resolve(run), nodes=nodes, step=step, sets=sets or (), notice=show.note, waiting=waiting)
    _announce(resumed, follow)
    if follow:
        _follow_and_exit(app, resumed.run)
