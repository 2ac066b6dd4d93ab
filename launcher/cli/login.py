"""``zerun login``: the one verb that may ask for a password; the system's ssh does, at the user's terminal."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ..contract.errors import UsageError
from . import complete, options, show

_LONGEST_S = 365 * 86400


def login_verb(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLUSTER|HOST]",
            help="A name in clusters/, a path, or a host that none describes yet. Default: $ZERUN_CLUSTER, then yours.",
            autocompletion=complete.clusters,
        ),
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", metavar="TIME", help="How long the login stays when nothing uses it: 8h, 30min.")
    ] = "8h",
    close: Annotated[bool, typer.Option("--close", help="Ends the login, and whatever goes through it.")] = False,
) -> None:
    """Logs in to a cluster once, so that the other verbs need not.

    Where a server wants a password or a second factor (`via: openssh` in the cluster's description), this verb lets
    ssh ask for it at your terminal and keeps the connection open in the background. Every other verb goes through
    it and never asks: without it they exit 4 and say so. A cluster that nobody described yet is logged in to by its
    host's name; `zerun cluster discover HOST` goes through that login.
    """
    from ..specs import units

    app = options.open_app()
    if close:
        ended = app.logout(name)
        show.note(f"closed: {', '.join(ended)}" if ended else "no login was open")
        return
    try:
        keep_s = units.duration(keep)
        if keep_s > _LONGEST_S:
            raise ValueError("at most 365d, which ssh still takes")
    except ValueError as problem:
        raise UsageError(f"--keep {keep}: {problem}") from None
    for master, anew in app.login(name, keep_s):
        what = "logged in" if anew else "a login stands already,"
        show.note(f"{master.name}: {what} as {master.user} at {master.hostname}")
    until = time.strftime("%a %H:%M", time.localtime(time.time() + keep_s))
    show.note(f"it stays while it is used, and {keep} longer (until {until} if nothing uses it); --close ends it")
