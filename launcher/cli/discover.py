"""``zerun cluster discover``: writes a cluster's description from what the cluster tells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..contract.errors import UsageError
from . import options, show


def cluster_discover(
    target: Annotated[
        str,
        typer.Argument(
            metavar="HOST|CLUSTER",
            help="A login node, machines (node[01-04]), or a cluster in clusters/.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Writes it there: clusters/uni.yaml.")
    ] = None,
    ssh_config: Annotated[
        Path | None, typer.Option("--ssh-config", metavar="FILE", help="Used instead of ~/.ssh/config to reach a HOST.")
    ] = None,
) -> None:
    """Prints a cluster's description, made from what it tells of itself, with comments where a person has to fill in.

    Of Slurm: pools from its partitions and nodes (sinfo, scontrol). Of machines alone: their cores, GPUs and Python.
    A file that is there is not written over.
    """
    if out is not None and out.exists():
        raise UsageError(f"{out} is there already", hint="name another file, or move it away")
    text = options.open_app().discover_cluster(target, ssh_config=ssh_config, out=out)
    if out is None:
        show.data(text.rstrip("\n"))
        return
    from ..contract.plain import write_atomically

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    left = sum("# FILL IN " in line for line in text.splitlines())
    show.data(str(out))
    show.note(
        f"{left} line{'' if left == 1 else 's'} to fill in (grep 'FILL IN' {out}); then: zerun cluster check {out}"
    )
