"""Verbs about token files: data prepare, data push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options, show

data_verbs = typer.Typer(help="Token files.", no_args_is_help=True)


@data_verbs.command("prepare")
def data_prepare(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Text files.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where train.bin and heldout.bin go.")],
    as_json: options.Json = False,
) -> None:
    """Turns text files into token files: train.bin and heldout.bin.

    A token is a byte; whole files go to one side or the other, so that no text is in both.
    """
    made = options.open_app().prepare_data(files, out)
    if as_json:
        show.data_json(made)
        return
    for key, value in made.items():
        show.data(f"{key}: {show.num_bytes(value) if key.endswith('_bytes') else value}")


@data_verbs.command("push")
def data_push(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name in the cluster's `datasets:`.", show_default=False)
    ],
    cluster: options.ClusterAlone = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FOLDER", help="Where the files are here. Default: data/NAME."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Copies a dataset's files to every node of a cluster without a shared disk, and proves them there.

    Says first what will move where; a rerun goes on where it stopped. Exit 7: bytes arrived wrong twice; 8: some
    nodes could not be served.
    """
    app = options.open_app()
    with show.progress(f"pushing {name}") as advance:
        pushed = app.push_data(name, cluster, source, notice=show.note, progress=advance)
    if as_json:
        show.data_json(pushed)
        return
    for file in pushed.files:
        show.data(f"{file.digest}  {show.num_bytes(file.bytes)}  {file.path}")
    moved = f"moved to {', '.join(pushed.moved)}" if pushed.moved else "nothing had to move"
    show.data(f"{pushed.dataset} is right on {', '.join(pushed.nodes)}; {moved}")
