"""What should be a file and is none, numbers that nobody wrote, folders without end: told, never waited for."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_places import local_backend
from written import write_checkpoint, write_run

from launcher.agent.removal import remove
from launcher.checkpoints.blocks import ShardReader
from launcher.checkpoints.convert import import_state
from launcher.checkpoints.foreign import verify_foreign
from launcher.checkpoints.verify import read_manifest, verify
from launcher.contract.errors import UsageError, VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.holdings import checkpoints_here, read_json, tree_size
from launcher.contract.kept import outputs_here
from launcher.contract.lineage import resumed_from
from launcher.contract.weights import INDEX, read_weights
from launcher.runs import RunStore


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """A FIFO that is opened would be waited for without end: the test fails instead."""

    def late(*_: Any) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    backend = local_backend(tmp_path, [None])
    write_run(backend.places(), ["node01"])
    write_checkpoint(backend.places(), ["node01"], 50)
    return Path(RunFolder.at(backend.places()[0].runs, "job-1").root)


def _fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_a_fifo_in_the_place_of_any_file_is_told(run: Path, tmp_path: Path) -> None:
    step = run / "checkpoints/step-00000050"
    assert verify(step).ok
    manifest = read_manifest(step / "manifest.json")
    _fifo(step / "rank-00001.safetensors")
    with pytest.raises(VerificationFailed, match="rank 1's shard"):
        ShardReader(step, manifest.shards[1])
    assert "no plain file" in verify(step).problems[0]
    _fifo(step / "damaged-rank-00000.json")
    _fifo(step / "manifest.json")
    assert "is no plain file" in verify(step).problems[0]
    assert "is no plain file" in checkpoints_here(str(run))[0]["problem"]
    _fifo(run / "attempts/1/launch.json")
    assert read_json(str(run / "attempts/1/launch.json")) is None
    assert resumed_from(str(run)) == {}
    _fifo(run / "run.json")
    with pytest.raises(UsageError, match=r"run\.json cannot be read"):
        RunStore(run.parent).load(run.name)
    with pytest.raises(UsageError, match="is no plain file"):
        import_state(_fifo(tmp_path / "m.pt"), tmp_path / "out", 10**9, lambda _: None)
    (tmp_path / "w").mkdir()
    _fifo(tmp_path / "w/model.safetensors")
    with pytest.raises(UsageError, match="is no plain file"):
        read_weights(tmp_path / "w")
    for damaged in (
        [],
        {"code/c": None},
        {"code/c": {"files": []}},
        {"code/c": {"files": {"../x": {}}}},
        {"code/c": {"files": {"code/x": 5}}},
    ):
        (run / "foreign.json").write_text(json.dumps(damaged))
        with pytest.raises(VerificationFailed, match=r"foreign\.json is damaged"):
            verify_foreign(run, "code/c")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("layout", "units", 0, "ranks"), 0),
        (("layout", "units", 0, "ranks"), 4),
        (("layout", "units", 0, "replicas"), 0),
        (("layout", "units", 0, "parameters", 0, "shape", 0), -1),
        (("layout", "units", 0, "parameters", 0, "shape", 0), 10**400),
        (("layout", "units", 0, "parameters", 0, "tensor_axis"), 7),
        (("layout", "units", 0, "parameters", 0, "tensor_parts"), 0),
        (("written_at",), 10**400),
    ],
)
def test_numbers_that_nobody_wrote_are_damage(run: Path, place: tuple[str | int, ...], value: int) -> None:
    step = run / "checkpoints/step-00000050"
    about = json.loads((step / "manifest.json").read_bytes())
    at = about
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (step / "manifest.json").write_text(json.dumps(about))
    report = verify(step)
    assert not report.ok and "manifest.json" in report.problems[0]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ('{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}', "no whole numbers"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1e999]}}', "no whole numbers"),
        ('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.5, 8.5]}}', "no whole numbers"),
        ('{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}', "no whole numbers"),
        (
            '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
            ' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
            "overlap",
        ),
        ("[]", "no mapping"),
    ],
)
def test_headers_of_weights_that_lie(tmp_path: Path, header: str, said: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with pytest.raises(UsageError, match=said):
        read_weights(tmp_path)


def test_folders_deeper_than_python_recurses(run: Path) -> None:
    top = run / "code/deep"
    top.mkdir(parents=True)
    before = os.getcwd()
    try:
        os.chdir(top)
        for _ in range(1300):
            os.mkdir("d")
            os.chdir("d")
        Path("x.csv").write_text("1")
    finally:
        os.chdir(before)
    (top / "link").symlink_to("/etc")
    assert [row["bytes"] for row in outputs_here(str(run), ["**/*.csv", "**/**/**/x.csv"])] == [1]
    size, files = tree_size(str(run))
    assert files > 5 and size > 100_000
    (run / "attempts/1/nodes/node01.json").unlink()  # it says that we, who wrote it, are its agent
    assert remove({"run_dir": str(run), "really": True})["removed"]
    assert [p.name for p in run.parent.iterdir() if "job-1" in p.name] == [] and Path("/etc/passwd").exists()
