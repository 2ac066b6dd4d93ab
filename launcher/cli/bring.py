"""Verbs that bring home and prove: collect, ckpt ls, ckpt verify."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options, show

checkpoint_verbs = typer.Typer(help="Checkpoints: which are whole, and whether their bytes are right.")


def collect_verb(
    run: options.Run,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="WHICH", help="newest, none, or a step.")
    ] = "newest",
    as_json: options.Json = False,
) -> None:
    """Brings logs, metrics and a checkpoint home to runs/RUN, verified at arrival.

    Done again it moves only what lacks. Exit 7 names rank, file and block of what is wrong.
    """
    app = options.open_app()
    name = app.resolve(run)
    with show.progress(f"collecting {name}") as advance:
        collected = app.collect(name, checkpoint, advance)
    if as_json:
        show.data_json(collected)
        return
    for key, value in show.plain(collected).items():
        if value not in (None, [], {}):
            show.data(f"{key.removesuffix('_bytes')}: {show.num_bytes(value) if key.endswith('_bytes') else value}")
