"""What a killed export leaves beside its target, and who takes it away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.checkpoints.parts import beside, clear_abandoned

WRITES = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[2])
from launcher.checkpoints.parts import beside
with beside(pathlib.Path(sys.argv[1])) as folder:
    (folder / "model.safetensors").write_bytes(b"x" * 5000)
    print(folder, flush=True)
    time.sleep(60)
"""


def test_the_next_export_takes_away_what_a_killed_one_left(tmp_path: Path) -> None:
    target = tmp_path / "model"
    root = str(Path(__file__).parents[2])
    writing = subprocess.Popen([sys.executable, "-c", WRITES, str(target), root], stdout=subprocess.PIPE)
    assert writing.stdout is not None
    part = Path(writing.stdout.readline().decode().strip())
    kept = [tmp_path / ".other.123.part", tmp_path / ".model.part", tmp_path / ".model.x.part"]
    for folder in kept:
        folder.mkdir()
    (tmp_path / ".model.7.part").symlink_to(kept[0])
    (tmp_path / ".model.8.part").write_text("no folder")
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), beside(target, said.append):
        raise ZeroDivisionError
    assert (part / "model.safetensors").exists() and not said, "its writer lives"
    writing.kill()
    writing.communicate()
    if not os.geteuid():
        of_another = tmp_path / ".model.9.part"
        of_another.mkdir()
        os.chown(of_another, 65534, 65534)
        kept.append(of_another)
    with beside(target, said.append) as folder:
        assert not part.exists() and folder.is_dir()
        (folder / "file").write_text("whole")
    assert said == [f"removed {part} (4.9 KiB), which a command that was killed had left"]
    assert [p.name for p in target.iterdir()] == ["file"]
    assert all(folder.is_dir() for folder in kept) and (tmp_path / ".model.7.part").is_symlink()
    clear_abandoned(tmp_path)  # of all targets
    assert not kept[0].exists() and kept[1].is_dir()
