"""The end of a run's files: at home, and where they lie on its cluster. Counted before anything is removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .contract import shipped
from .contract.errors import PartialAnswer, Unreachable, UsageError
from .contract.folder import RunFolder
from .contract.holdings import tree_size
from .contract.pruning import remove_tree
from .observe import ask
from .runs import Run, RunState

if TYPE_CHECKING:
    from .backends.protocol import Backend, Place


@dataclass(frozen=True)
class Heap:
    """What of a run lies in one folder. ``place`` None: at home."""

    where: str
    folder: str
    bytes: int
    files: int
    place: Place | None = None
    shipped_bytes: int = 0  # code beside it that no other run needs, which goes too
    shipped_files: int = 0


@dataclass(frozen=True)
class Clearing:
    """``only_there``: steps of whole checkpoints on the cluster that are not whole at home. While machines are
    ``silent`` what is at home is no heap: it stays, by it the rest is found again."""

    run: Run
    heaps: Sequence[Heap]
    stays: str = ""  # where more of it lies, which is not asked to go
    only_there: tuple[int, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)  # machines that may hold some of it, and do not answer

    @property
    def bytes(self) -> int:
        return sum(heap.bytes + heap.shipped_bytes for heap in self.heaps)


def look(backend: Backend | None, run: Run, state: RunState, *, remote: bool, local: bool) -> Clearing:
    """What would go. Raises UsageError while the run goes on, Unreachable when that is not known, PartialAnswer when
    what is left of it may only lie where nobody answers.

    ``local``: the cluster is this machine, and what lies there is what lies at home.
    """
    if state.state == "unknown" and (remote or state.handle is not None):
        hint = f"zerun status {run.name} says when it is known; nothing was removed"
        raise Unreachable(f"{run.name}: whether it still runs is not known ({state.why})", hint=hint)
    if not state.ended and state.state != "unknown":
        raise UsageError(f"{run.name} is {state.state}", hint=f"zerun cancel {run.name} first")
    size, files = tree_size(str(run.folder))
    unneeded = shipped.unused(str(run.folder.parent), run.name)
    beside = (sum(found.bytes for found in unneeded), len(unneeded))
    heaps = [Heap("at home", str(run.folder), size, files, None, *beside)]
    if local and backend is not None:  # what lies there lies here: asked all the same whether anything still runs
        for place in backend.places():
            folder = str(RunFolder.at(place.runs, run.name).root)
            backend.call(place, "remove", {"run_dir": folder, "really": False})
    if local or backend is None or not remote:
        return Clearing(run, heaps, "" if local else state.cluster)
    silent: dict[str, str] = {}
    for place in backend.places():
        folder = str(RunFolder.at(place.runs, run.name).root)
        try:
            found = backend.call(place, "remove", {"run_dir": folder, "really": False})
        except Unreachable as problem:
            silent[place.transport.name] = problem.message
            continue
        if found["files"]:
            code = found.get("shipped", {})  # the agent that the run was submitted with may be an older one
            beside = (int(code.get("bytes", 0)), int(code.get("files", 0)))
            heaps.append(Heap(place.transport.name, folder, int(found["bytes"]), int(found["files"]), place, *beside))
    if silent:
        heaps = heaps[1:]
    if silent and not heaps:
        said = "; ".join(silent.values())
        raise PartialAnswer(
            f"nothing of {run.name} was removed: nothing lies where somebody answers, and {said}", hint=the_rest(run)
        )
    return Clearing(run, heaps, only_there=_only_there(backend, run), silent=silent)


def the_rest(run: Run) -> str:
    """What to do about machines that do not answer."""
    again = f"zerun rm {run.name}"
    return f"when they answer: {again} --remote once more; if they never do: {again} (what is at home)"


def _only_there(backend: Backend, run: Run) -> tuple[int, ...]:
    from .checkpoints import candidates, local_steps

    answers, _ = ask(backend, [run])
    folders = [answer["runs"].get(str(RunFolder.at(place.runs, run.name).root), {}) for place, answer in answers]
    return tuple(sorted({c.step for c in candidates(folders) if c.whole} - set(local_steps(run.folder))))


def clear(backend: Backend | None, clearing: Clearing) -> None:
    """Removes it: the cluster's part first, so that what is cut can still be found from home and begun again. What is
    at home stays as long as machines are silent."""
    for heap in clearing.heaps:
        if heap.place is not None and backend is not None:
            backend.call(heap.place, "remove", {"run_dir": heap.folder, "really": True}, timeout_s=600.0)
    if clearing.silent:
        return
    gone = clearing.run.folder.with_name(f".removed-{clearing.run.name}")
    clearing.run.folder.rename(gone)
    remove_tree(str(gone))
    shipped.clear_unused(str(clearing.run.folder.parent), clearing.run.name)
