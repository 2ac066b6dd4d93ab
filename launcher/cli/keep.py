"""Verbs that make something of checkpoints, or an end of them: ckpt export, ckpt import, ckpt prune."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..contract.errors import UsageError
from . import options, show
from .clear import Yes, confirmed

if TYPE_CHECKING:
    from ..checkpoints.prune import Pruning

To = Annotated[
    Path,
    typer.Option("--to", metavar="FOLDER", help="A folder that is not there yet, or is empty.", show_default=False),
]
MaxShard = Annotated[str, typer.Option("--max-shard", metavar="BYTES", help="The most of one file: 5GB, 500MB.")]


def _bytes(text: str) -> int:
    from ..specs.units import parse_bytes

    try:
        found = parse_bytes(text)
    except ValueError as problem:
        raise UsageError(f"--max-shard: {problem}") from problem
    if found < 1:
        raise UsageError(f"--max-shard {text}: a file holds at least one byte")
    return found


def export_verb(
    run: options.RunOrFolder,
    to: To,
    step: Annotated[
        int | None, typer.Option("--step", metavar="S", min=0, help="Default: the newest that is at home.")
    ] = None,
    form: Annotated[
        str, typer.Option("--form", metavar="FORM", help="safetensors, or dcp (torch.distributed.checkpoint).")
    ] = "safetensors",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="fp32 or bf16. Default: as the checkpoint has it.")
    ] = None,
    max_shard: MaxShard = "5GB",
    as_json: options.Json = False,
) -> None:
    """Writes the parameters of a checkpoint that is at home as one whole model, verified as they are read.

    safetensors is what Hugging Face's and torch's loaders open; names are the module's, tied weights stand once. dcp
    needs a Python with torch (ZERUN_TORCH_PYTHON) and twice the bytes for a while. Exit 7 names a damaged block, 6 a
    disk without room; nothing half-written is left.
    """
    from ..app.keeping import export_checkpoint, step_at_home, step_in_folder
    from ..checkpoints.export import Wish

    folder, name = step_in_folder(run, step), run
    if folder is None:
        store = options.open_app().store
        name = store.resolve(run)
        folder = step_at_home(store.load(name), step)
    wish = Wish(dtype, _bytes(max_shard))
    with show.progress(f"exporting {name}") as advance:
        made = export_checkpoint(folder, to, wish, form=form, notice=show.note, progress=advance)
    if as_json:
        show.data_json(made)
        return
    what = (
        f"{show.count(made.tensors, 'tensor')}, {show.num_bytes(made.bytes)} in {show.count(len(made.files), 'file')}"
    )
    show.data(f"step {made.step}: {what}: {made.folder}")
    if form == "safetensors":
        show.note("a new job begins from it with model: {…, weights: PATH}: a copy inside the job's code (relative),")
        show.note("or, where that is too large to travel, one that you put on the cluster (absolute)")


def import_verb(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A torch file: model.state_dict().", show_default=False)],
    to: To,
    max_shard: MaxShard = "5GB",
    as_json: options.Json = False,
) -> None:
    """Turns a plain torch state dict into safetensors, for `weights:` of a job's model.

    Read with weights_only=True by a Python with torch (ZERUN_TORCH_PYTHON): nothing in the file is run.
    """
    from ..app.keeping import import_file

    made, prefix = import_file(file, to, _bytes(max_shard), show.note)
    if as_json:
        show.data_json(made)
        return
    if prefix:
        show.note(f"names began with {prefix!r}: taken off")
    what = (
        f"{show.count(made.tensors, 'tensor')}, {show.num_bytes(made.bytes)} in {show.count(len(made.files), 'file')}"
    )
    show.data(f"{what}: {made.folder}")


def prune_verb(
    run: options.Run,
    keep: Annotated[
        int, typer.Option("--keep", metavar="N", min=1, help="How many of the newest whole ones stay.")
    ] = 1,
    remote: Annotated[bool, typer.Option("--remote", help="On the run's cluster, instead of at home.")] = False,
    yes: Yes = False,
    as_json: options.Json = False,
) -> None:
    """Deletes a run's older checkpoints, those that are damaged, and those that a resume left behind.

    Says first which go, which stay and how many bytes that is, and asks; off a terminal --yes is needed. The newest
    whole one always stays, and so does the one that a running attempt went on from.
    """
    from ..app.pruning import prune_checkpoints

    app = options.open_app()
    name = app.resolve(run)

    def sure(pruning: Pruning) -> bool:
        for line in pruning_lines(pruning):
            show.note(line)
        return bool(pruning.gone) and confirmed(f"delete {show.num_bytes(pruning.bytes)}?", yes)

    done = prune_checkpoints(app, name, keep=keep, remote=remote, sure=sure, notice=show.note)
    if done is None:
        show.note(f"{name}: nothing was deleted")
        return
    pruning, freed, left = done
    if as_json:
        show.data_json({"steps": [c.step for c in pruning.gone], "bytes": freed, "left": left})
        return
    for file in left:
        show.note(f"{file} is none of ours: it stays")
    show.data(f"{name}  {show.count(len(pruning.gone), 'checkpoint')} deleted, {show.num_bytes(freed)} free again")


def pruning_lines(pruning: Pruning) -> list[str]:
    lines = [f"{pruning.run}  {show.count(len(pruning.gone), 'checkpoint')}, {show.num_bytes(pruning.bytes)}, go"]
    lines[0] += f" {pruning.where}"
    for candidate in pruning.gone:
        lines.append(f"  goes   {show.num_bytes(candidate.bytes):>10}  {show.visible(candidate.sentence())}")
    for candidate, reason in pruning.stay:
        lines.append(f"  stays  {show.num_bytes(candidate.bytes):>10}  step {candidate.step}: {reason}")
    return lines
