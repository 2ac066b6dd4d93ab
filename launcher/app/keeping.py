"""The use cases around checkpoints that are at home: exported, imported, verified.

Beside :mod:`launcher.app`, and like it: returns data, prints nothing, raises ``ZerunError``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints import Collected, Report, local_steps, verify
from ..checkpoints.convert import export_dcp, import_state
from ..checkpoints.export import Exported, Wish, export, refuse_dtype
from ..checkpoints.foreign import collected, verify_foreign
from ..checkpoints.parts import clear_abandoned
from ..contract.errors import UsageError
from ..contract.folder import step_of
from ..contract.holdings import checkpoints_here
from ..contract.lineage import left_behind, resumed_from
from ..contract.pruning import remove_checkpoint
from ..runs import Run
from ..runs.locks import hold

if TYPE_CHECKING:
    from . import App

Notice = Callable[[str], None]
Progress = Callable[[int, int], None]
FORMS = {"safetensors": export, "dcp": export_dcp}


def step_at_home(run: Run, step: int | None) -> Path:
    """The folder of a run's checkpoint here: of ``step``, or the newest. Raises UsageError naming what is here."""
    steps = local_steps(run.folder)
    found = {int(c["step"]): int(c["attempt"]) for c in checkpoints_here(str(run.folder)) if c["manifest"]}
    behind = left_behind(found, resumed_from(str(run.folder)))
    newest = max([s for s in steps if s not in behind] or steps, default=None)
    chosen = step if step is not None else newest
    if chosen is None or chosen not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise UsageError(
            f"no checkpoint {'' if step is None else f'of step {step} '}of {run.name} at home (here: {have})",
            hint=f"zerun collect {run.name}" + (f" --checkpoint {step}" if step is not None else ""),
        )
    return Path(str(run.paths.checkpoint(chosen).root))


def step_in_folder(name: str, step: int | None) -> Path | None:
    """A checkpoint in a folder that is no run's: of a loop of one's own, ``zero.save(FOLDER)``. ``name`` is that folder
    or one step's in it; None where it says a run.

    Raises UsageError where it is a path and no such checkpoint is there.
    """
    folder = Path(name).absolute()
    manifests = [folder / "manifest.json"] if step_of(folder.name) is not None else folder.glob("step-*/manifest.json")
    found = {step_of(path.parent.name): path.parent for path in manifests if path.is_file()}
    steps = sorted(known for known in found if known is not None)
    if not steps and "/" not in name and name not in (".", ".."):
        return None
    chosen = step if step is not None else max(steps, default=None)
    if chosen not in steps:
        have = ", ".join(map(str, steps)) or "none"
        raise UsageError(
            f"no checkpoint {'' if step is None else f'of step {step} '}in {name} (there: {have})",
            hint="a path is a folder of step-N folders with a manifest.json each, or one of these",
        )
    return found[chosen]


def verify_at_home(run: Run, step: int | None) -> Report:
    """Reads a checkpoint that is here whole; of a program that has its own, the one that was brought last, or the
    newest whose name says ``step``."""
    own = [] if local_steps(run.folder) else collected(run.folder)
    if step is not None:
        own = [name for name in own if re.findall("[0-9]+", name)[-1:] and int(re.findall("[0-9]+", name)[-1]) == step]
    return verify_foreign(run.folder, own[-1]) if own else verify(step_at_home(run, step))


def export_checkpoint(
    folder: Path,
    target: Path,
    wish: Wish,
    *,
    form: str = "safetensors",
    notice: Notice,
    progress: Progress | None = None,
) -> Exported:
    """The parameters of a checkpoint's ``folder``, consolidated in the new folder ``target``, in one of ``FORMS``."""
    if form not in FORMS:
        raise UsageError(f"--form {form!r}: accepted are {', '.join(FORMS)}")
    refuse_dtype(wish.dtype)
    return FORMS[form](folder, target.absolute(), wish, notice, progress)


def import_file(source: Path, target: Path, most_bytes: int, notice: Notice) -> tuple[Exported, str]:
    """A plain torch state dict as the safetensors that ``model: {weights: …}`` takes."""
    return import_state(source, target.absolute(), most_bytes, notice)


def collect_weights(
    app: App, name: str, checkpoint: str, notice: Notice, progress: Progress | None = None
) -> tuple[Collected, Exported | None]:
    """Collects a run, and keeps of its checkpoint the consolidated weights alone, in ``RUN/weights/step-N``.

    Shards that were at home before stay, and those that another collect counts on meanwhile; those that came for
    this go again. None where there is no checkpoint.
    """
    run = app.store.load(name)
    with hold(run.folder / ".weighing") as ours:
        if not ours:
            raise UsageError(f"the weights of {name} are being collected by another command", hint="wait for it")
        return _collect_weights(app, run, checkpoint, notice, progress)


def _collect_weights(
    app: App, run: Run, checkpoint: str, notice: Notice, progress: Progress | None
) -> tuple[Collected, Exported | None]:
    name, had = run.name, set(local_steps(run.folder))
    got = app.collect(name, checkpoint, progress)
    if got.step is None:
        return got, None
    shards = step_at_home(run, got.step)
    made = _export_again(shards, run.folder / "weights" / shards.name, notice)
    with hold(run.folder / ".collecting") as ours:
        if got.step not in had and ours and _brought(app.store.load(name), got.step) == _brought(run, got.step) + 1:
            remove_checkpoint(str(shards))
            got = replace(got, checkpoint=None)
    return got, made


def _brought(run: Run, step: int) -> int:
    """How many collects have brought, or found at home, the checkpoint of ``step``."""
    return sum(1 for e in run.events if e.event == "collected" and e.data.get("checkpoint") == step)


def _export_again(shards: Path, target: Path, notice: Notice) -> Exported:
    """An export in the place of an older one of the step (an attempt may have written it again), which stays until
    the new one is whole."""
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    if old.is_dir() and not target.exists():
        old.rename(target)  # a collect was killed just between the two renames below
    for left in (fresh, old):  # of a collect that was killed
        shutil.rmtree(left, ignore_errors=True)
    clear_abandoned(target.parent, notice=notice)
    made = export(shards, fresh, Wish(), notice)
    if target.is_dir():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return replace(made, folder=str(target))
