"""``zerun exec``: a command beside the ranks of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import options


def exec_verb(
    run: options.Run,
    argv: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.", show_default=False)
    ],
    node: Annotated[str | None, typer.Option("--node", metavar="NODE", help="On this node alone.")] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help="On this rank's node, in its environment.")
    ] = None,
) -> None:
    """Runs a command on the nodes of a run that runs: `zerun exec last -- nvidia-smi`.

    It gets the environment and the folder of a rank (the node's first, unless --rank says another): modules, PATH and
    CUDA_VISIBLE_DEVICES as the rank has them, but not the values of the job's `secrets`. Under Slurm it is a step that
    shares the job's resources; elsewhere the agent's Python starts it over SSH. stdin is empty. Output of several nodes
    is prefixed by the node's name. Exits with the command's status, of several nodes the largest; 2 when nothing of
    the run runs there.
    """
    streams = {1: sys.stdout.buffer, 2: sys.stderr.buffer}

    def write(out: int, data: bytes) -> None:
        streams[out].write(data)
        streams[out].flush()

    status = options.open_app().execute(run, argv, node=node, rank=rank, sink=write)
    if status:
        raise typer.Exit(status)
