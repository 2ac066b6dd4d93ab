"""Verbs that look at runs: ls, status, logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.errors import Exit, UsageError
from ..contract.moment import moment
from . import complete, options, show

if TYPE_CHECKING:
    from ..app import App
    from ..logs.select import Selection
    from ..measured import Beside
    from ..runs import RunState


States = Annotated[
    list[str] | None,
    typer.Option("--state", metavar="STATE", help="Only runs in this state: running, failed, … (may be repeated)."),
]


def ls_verb(
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            "-c",
            metavar="CLUSTER",
            help="The runs that lie on this cluster, also another laptop's; yours are taken up here.",
            autocompletion=complete.clusters,
        ),
    ] = None,
    all_users: Annotated[
        bool, typer.Option("--all-users", help="With --cluster: everybody's, as far as their folders let you look.")
    ] = False,
    states: States = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="WHEN", help="Only runs submitted since: 10m, 2h, 7d, an ISO time.")
    ] = None,
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="Only runs of the job of this name.")] = None,
    tags: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Only runs with this tag (repeated: with all).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Lists the runs, oldest first, with their states."""
    from ..runs.choice import Choice

    app = options.open_app()
    choice = Choice(_states(states or []), _since(since), job, frozenset(tags or []))
    if all_users and cluster is None:
        raise UsageError("--all-users needs --cluster: other people's runs are not at home")
    if cluster is None:
        found, owners = app.list_runs(choice.may_be), None
    else:
        on = app.runs_on(cluster, all_users=all_users)
        found, owners = list(on.states), dict(zip((s.run for s in on.states), on.owners, strict=True))
        for text in on.notes:
            show.note(text)
        if on.taken_up:
            show.note(f"taken up here, from another laptop: {' '.join(on.taken_up)}")
    chosen = [state for state in found if choice.takes(state)]
    if as_json:
        show.data_json([s.to_plain() if owners is None else {**s.to_plain(), "owner": owners[s.run]} for s in chosen])
    elif chosen:
        head = ["run", "state", "since", "cluster", "attempt", "ranks"]
        rows = [list(_row(s)) for s in chosen]
        if owners is not None:
            head, rows = [*head, "owner"], [[*row, owners[s.run]] for row, s in zip(rows, chosen, strict=True)]
        show.table(head, rows)
    else:
        where = app.store.root if cluster is None else cluster
        selected = found or any((states, since, job, tags))
        show.note(f"no runs {'in' if cluster is None else 'on'} {where}{' that match' if selected else ' yet'}")


def _states(given: Sequence[str]) -> frozenset[str]:
    from ..runs import EXITS

    wanted = frozenset(word.replace("-", "_").replace(" ", "_") for word in given)
    for word in sorted(wanted - set(EXITS)):
        raise UsageError(f"--state {word!r} is none", hint=f"one of {', '.join(EXITS)}")
    return wanted


def _row(state: RunState) -> tuple[str, ...]:
    since = moment(state.since) if state.since is not None else "-"
    ranks = str(state.ranks) if state.ranks else "-"
    return (state.run, state.state, since, state.cluster, str(state.attempt), ranks)


def _since(given: str | None) -> float | None:
    from ..logs.select import parse_since

    return None if given is None else parse_since(given, time.time())


def status_verb(
    run: options.Run,
    as_json: options.Json = False,
    exit_status: Annotated[
        bool, typer.Option("--exit-status", help="Exits as `wait` would: the job's code, 10 while it goes on.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Sets what was planned beside what the ranks measured.")] = False,
) -> None:
    """Says what a run does, where, since when, and what to do next.

    Of a failed one: the first rank that failed, its node, exit code or signal, and its last lines.
    """
    from ..app import exit_code_of
    from .state_text import print_state

    app = options.open_app()
    state = app.status(app.resolve(run))
    if plan:
        _print_beside(state, app.beside_plan(state.run, state.attempt), as_json)
    else:
        print_state(state, as_json)
    if exit_status and exit_code_of(state):
        raise typer.Exit(exit_code_of(state))


def _print_beside(state: RunState, lines: Sequence[Beside], as_json: bool) -> None:
    from .state_text import print_state

    if as_json:
        rows = [{"what": b.what, "planned": b.planned, "measured": b.measured, "source": b.source} for b in lines]
        show.data_json({**state.to_plain(), "plan": rows})
        return
    print_state(state, False)
    show.data("")
    told = [
        (b.what, _figure(b.planned), _figure(b.measured), f"{b.ratio:.3f}" if b.ratio is not None else "-", b.source)
        for b in lines
    ]
    show.table(("planned beside measured", "planned", "measured", "ratio", "the plan's"), told, right=(1, 2, 3))
    if all(b.measured is None for b in lines):
        show.note(f"nothing measured lies at home: zerun collect {state.run} --checkpoint none")


def _figure(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _say_who_is_not_there(app: App, run: str, chosen: Selection) -> None:
    """Chosen ranks or nodes of which the run has none: an empty answer would read as if they were silent."""
    if chosen.ranks is None and chosen.nodes is None:
        return
    state = app.status(run)
    if chosen.nodes is not None and state.nodes and not chosen.nodes & set(state.nodes):
        show.note(f"none of its ranks is on {' '.join(sorted(chosen.nodes))}; its nodes: {' '.join(state.nodes)}")
    if chosen.ranks is not None and state.ranks and min(chosen.ranks) >= state.ranks:
        show.note(f"it has no such rank; its ranks: 0-{state.ranks - 1}")


def logs_verb(
    run: options.Run,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Goes on as lines come, until the run ends.")] = False,
    ranks: Annotated[str | None, typer.Option("--rank", "-r", metavar="RANKS", help="Only these ranks: 0,3-7.")] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", "-n", metavar="NODES", help="Only these nodes: node[01-03].")
    ] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", "-g", metavar="REGEX", help="Only lines in which this is found.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="WHEN", help="Only lines younger than this: 90s, 10m, 2h, or an ISO time."),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="Only each rank's last N lines (of what is there).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints a JSON object a line.")] = False,
) -> None:
    """Prints every rank's lines, merged by time, each behind `rank@node`.

    Of a run that was started again, those of its newest attempt; `collect` brings every attempt's, in
    runs/RUN/attempts/N/logs. Ctrl-C while following detaches; the job goes on.
    """
    from ..logs.select import select
    from .follow import detached, until_it_starts
    from .lines import LineWriter

    chosen = select(ranks=ranks, nodes=node or [], grep=grep, since=since, tail=tail)
    app = options.open_app()
    name = app.resolve(run)
    writer = LineWriter(
        sys.stdout.buffer, coloured=show.coloured(sys.stdout), at_once=follow or sys.stdout.isatty(), as_json=as_json
    )
    wrote = False
    try:
        if follow:  # said at once: nothing would come until the run ends
            until_it_starts(app, name)
            _say_who_is_not_there(app, name, chosen)
        for line in app.logs(name, chosen, follow=follow, notice=show.note):
            writer.write(line)
            wrote = True
        if not wrote and not follow:
            _say_who_is_not_there(app, name, chosen)
            if not any((ranks, node, grep, since)) and tail != 0:
                show.note(f"no rank has written a line; zerun status {name} says where it stands,")
                show.note(f"zerun collect {name} brings what setup said (attempts/N/logs/setup-NODE.log)")
    except KeyboardInterrupt:
        if follow:
            detached(name)
        raise typer.Exit(int(Exit.INTERRUPTED)) from None
