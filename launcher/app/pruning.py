"""The use case of ``ckpt prune``: what may go is decided, told and asked about; then it goes, here or there.

Beside :mod:`launcher.app`, and like it: returns data, prints nothing, raises ``ZerunError``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import specs
from ..agent.prune import prune
from ..bundles import runtime_bundle
from ..checkpoints import candidates
from ..checkpoints.parts import clear_abandoned
from ..checkpoints.prune import Pruning, decide
from ..contract.folder import RunFolder
from ..contract.holdings import checkpoints_here
from ..contract.lineage import resumed_from

if TYPE_CHECKING:
    from ..runs import Run
    from . import App


def prune_checkpoints(
    app: App,
    name: str,
    *,
    keep: int,
    remote: bool,
    sure: Callable[[Pruning], bool],
    notice: Callable[[str], None] = lambda _: None,
) -> tuple[Pruning, int, tuple[str, ...]] | None:
    """Deletes all but the newest ``keep`` whole checkpoints of a run: here, or with ``remote`` on its cluster.

    ``sure`` is asked once it is known what would go; None when it says no, or when nothing would. Returns what went,
    the bytes that are free again, and what stayed in their folders because it is not ours. With them goes what a killed
    ``collect --weights`` left half written at home.
    """
    run = app.store.load(name)
    done = _prune(app, run, keep, remote, sure)
    if done is not None:
        clear_abandoned(run.folder / "weights", notice=notice)
    return done


def _prune(
    app: App, run: Run, keep: int, remote: bool, sure: Callable[[Pruning], bool]
) -> tuple[Pruning, int, tuple[str, ...]] | None:
    name = run.name
    if not remote and not specs.cluster_from_plain(run.about["cluster"]).local:
        rows = [{"checkpoints": checkpoints_here(str(run.folder)), "resumed": resumed_from(str(run.folder))}]
        pruning = decide(name, f"at home: {run.folder}", candidates(rows), keep=keep, pinned=frozenset(), alive=False)
        return _pruned(pruning, sure, lambda request: [prune(request | {"run_dir": str(run.folder)})])
    backend = app.attempts.open(specs.cluster_from_plain(run.about["cluster"]), runtime_bundle())
    try:
        state = app.attempts.look(backend, [run])[0]
        places = list(backend.places())
        folders = {id(p): str(RunFolder.at(p.runs, name).root) for p in places}

        def ask(verb: str, request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
            return [backend.call(p, verb, {**request, "run_dir": folders[id(p)]}) for p in places]

        answers = [backend.call(p, "state", {"run_dirs": [folders[id(p)]], "attempt": None}) for p in places]
        about = [a["runs"][folders[id(p)]] for p, a in zip(places, answers, strict=True)]
        found = [c for c in candidates(about, run.folder) if not getattr(c, "name", "")]
        pinned = frozenset() if state.ended else _goes_on_from(about, state.attempt)
        where = f"on {state.cluster}: {', '.join(sorted({f'{p.transport.name}:{folders[id(p)]}' for p in places}))}"
        pruning = decide(name, where, found, keep=keep, pinned=pinned, alive=not state.ended)
        return _pruned(pruning, sure, lambda request: ask("prune", request))
    finally:
        backend.close()


def _goes_on_from(about: Sequence[Mapping[str, Any]], attempt: int) -> frozenset[int]:
    """The step that a living attempt was resumed from: a rank of it may read there still, or begin there again."""
    steps = {answer.get("resumed", {}).get(str(attempt)) for answer in about}
    return frozenset(int(step) for step in steps if step is not None)


def _pruned(
    pruning: Pruning, sure: Callable[[Pruning], bool], act: Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]
) -> tuple[Pruning, int, tuple[str, ...]] | None:
    if not sure(pruning) or not pruning.gone:
        return None
    answers = act({"checkpoints": [{"step": c.step, "attempt": c.attempt} for c in pruning.gone]})
    left = sorted({name for answer in answers for name in answer["left"]})
    return pruning, sum(int(answer["bytes"]) for answer in answers), tuple(left)
