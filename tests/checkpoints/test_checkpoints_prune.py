"""Deleting checkpoints: what goes is told first, the newest whole one and what is gone on from never go."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_places import LocalBackend, local_backend
from test_checkpoints_lineage import folder_of, found, resume, step_of
from written import write_checkpoint, write_run

from launcher.agent.prune import prune
from launcher.checkpoints.prune import decide

NODES = ["node01", "node02"]


@pytest.fixture
def shared(tmp_path: Path) -> LocalBackend:
    backend = local_backend(tmp_path / "cluster", [None])
    write_run(backend.places(), NODES)
    for step in (50, 100, 150, 200):
        write_checkpoint(backend.places(), NODES, step)
    return backend


def test_what_goes_and_what_stays(shared: LocalBackend) -> None:
    def gone(keep: int = 1, pinned: frozenset[int] = frozenset(), alive: bool = False) -> list[int]:
        return [c.step for c in decide("r", "", found(shared), keep=keep, pinned=pinned, alive=alive).gone]

    assert gone() == [50, 100, 150] and gone(3) == [50] and gone(9) == []
    assert gone(pinned=frozenset({50})) == [100, 150]
    (step_of(shared, 200) / "manifest.json").unlink()
    assert gone() == [50, 100, 200], "never finished, and nobody is there who would"
    assert gone(alive=True) == [50, 100], "it may be being written"
    (step_of(shared, 150) / "rank-00000.safetensors").unlink()
    assert gone() == [50, 150, 200], "the newest whole one is now an older one"
    resume(shared, 2, 50)
    write_checkpoint(shared.places(), NODES, 60, attempt=2)
    assert gone() == [50, 100, 150, 200] and gone(2) == [100, 150, 200], "what was left behind does not count"
    for step in (50, 60, 100):
        (step_of(shared, step) / "rank-00001.safetensors").unlink()
    decided = decide("r", "", found(shared), keep=1, pinned=frozenset(), alive=False)
    assert not decided.gone and {why for _, why in decided.stay} == {"no checkpoint is whole"}


def test_only_what_was_looked_at_and_is_ours_goes(shared: LocalBackend) -> None:
    run_dir = str(folder_of(shared))
    (step_of(shared, 50) / "notes.txt").write_text("mine")
    (step_of(shared, 50) / ".rank-00001.safetensors.77.part").write_text("half")
    (step_of(shared, 100) / "damaged-rank-00001.json").write_text("{}")
    outside = folder_of(shared) / "outside"
    outside.write_text("kept")
    (step_of(shared, 100) / "rank-00007.safetensors").symlink_to(outside)
    write_checkpoint(shared.places(), NODES, 150, attempt=2)  # written again since it was looked at
    before = sum(p.stat().st_size for s in (50, 100) for p in step_of(shared, s).iterdir() if not p.is_symlink())
    asked = [{"step": s, "attempt": 1} for s in (50, 100, 150, 7)]
    answer = prune({"run_dir": run_dir, "checkpoints": asked})
    assert answer["steps"] == [50, 100] and answer["left"] == ["step-00000050/notes.txt"]
    assert answer["bytes"] == before - len("mine")
    assert [p.name for p in step_of(shared, 50).iterdir()] == ["notes.txt"] and not step_of(shared, 100).exists()
    assert outside.read_text() == "kept" and [c.step for c in found(shared) if c.whole] == [150, 200]
