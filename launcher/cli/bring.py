"""Verbs that bring home and prove: collect, ckpt ls, ckpt verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import options, show

if TYPE_CHECKING:
    from ..checkpoints import Candidate, Collected

checkpoint_verbs = typer.Typer(
    help="Checkpoints: which are whole, and whether their bytes are right.", no_args_is_help=True
)


def collect_verb(
    run: options.Run,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="WHICH", help="newest, none, or a step.")
    ] = "newest",
    weights: Annotated[
        bool, typer.Option("--weights", help="Of the checkpoint keeps the consolidated weights: runs/RUN/weights.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Brings logs, metrics and a checkpoint home to runs/RUN, verified at arrival.

    Done again it moves only what lacks. Exit 8: some machines did not answer, what the others have came, and it is
    said whether the checkpoint is whole. Exit 7 names rank, file and block of what is wrong. With --weights the shards
    that came for it go again, and one whole model in safetensors stays, without the optimizer's tensors.
    """
    app = options.open_app()
    name = app.resolve(run)
    with show.progress(f"collecting {name}") as advance:
        if weights:
            from ..app.keeping import collect_weights

            collected, made = collect_weights(app, name, checkpoint, show.note, advance)
        else:
            collected, made = app.collect(name, checkpoint, advance), None
    if as_json:
        show.data_json({**show.plain(collected), **({"weights": made} if weights else {})})
        return
    for line in _collected_lines(collected):
        show.data(line)
    if made is not None:
        show.data(f"  weights     {show.count(made.tensors, 'tensor')}, {show.num_bytes(made.bytes)}: {made.folder}")


def _collected_lines(got: Collected) -> list[str]:
    moved, here = show.count(got.moved_files, "file"), show.count(got.here_files, "file")
    lines = [
        f"{got.run} is at {got.folder}",
        f"  moved       {moved}, {show.num_bytes(got.moved_bytes)}",
        f"  were here   {here}, {show.num_bytes(got.here_bytes)}",
    ]
    if got.step is not None and got.checkpoint is not None:
        lines.append(
            f"  checkpoint  step {got.step}, {show.count(got.verified_shards, 'shard')} verified: {got.checkpoint}"
        )
    if got.name:
        lines.append(f"  checkpoint  {got.name}, {show.count(got.verified_shards, 'file')} verified: {got.checkpoint}")
    if got.note:
        lines.append(f"  note        {show.visible(got.note)}")
    return lines


@checkpoint_verbs.command("ls")
def checkpoint_ls(run: options.Run, as_json: options.Json = False) -> None:
    """Lists a run's checkpoints on its cluster, oldest first, and says what is wrong with those that are not whole.

    at home: whole at home alone; a resume sends it back. unfinished: it has no manifest. damaged: shards are missing,
    short, or were found wrong by whoever read them. let go: only nodes that the newest attempt left out still have
    parts of it. Left behind: a resume went on from an earlier step; it stays, and only --step takes it.
    """
    app = options.open_app()
    found = app.checkpoints(app.resolve(run))
    if as_json:
        show.data_json(found)
        return
    rows = [
        (
            c.name or str(c.step),
            "at home" if c.whole and c.at_home else "yes" if c.whole else c.state,
            show.num_bytes(c.bytes) if c.bytes else "-",
            str(c.ranks or "-"),
            str(c.attempt or "-"),
            " ".join(c.where) or "-",
            show.visible(c.problem or _note(c)),
        )
        for c in found
    ]
    show.table(("step", "whole", "size", "ranks", "attempt", "nodes", "note"), rows, right=(0, 2, 3, 4))


def _note(candidate: Candidate) -> str:
    told = [f"whole ({candidate.from_replicas})"] if candidate.from_replicas else []
    told += ["whole at home, not on the cluster: a resume sends it back"] if candidate.at_home else []
    told += [f"left behind: {candidate.left}"] if candidate.left else []
    return "; ".join(told)


@checkpoint_verbs.command("verify")
def checkpoint_verify(
    run: options.RunOrFolder,
    step: Annotated[
        int | None, typer.Option("--step", metavar="S", min=0, help="Default: the newest that is at home.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Reads a checkpoint that is at home whole and holds every block against its digest.

    Exit 7 names rank, file and block of what is wrong.
    """
    from ..app.keeping import step_in_folder
    from ..checkpoints import verify

    folder = step_in_folder(run, step)
    app = options.open_app()
    report = app.verify(app.resolve(run), step) if folder is None else verify(folder)
    if as_json:
        show.data_json({**show.plain(report), "ok": report.ok})
    elif report.ok:
        what = "file" if report.step is None else "shard"
        named = "" if report.step is None else f"step {report.step}: "
        told = f"{show.count(report.num_shards, what)}, {show.num_bytes(report.bytes)}"
        show.data(f"{named}{told}, every {'block' if named else 'file'} is right: {report.folder}")
    report.require()
