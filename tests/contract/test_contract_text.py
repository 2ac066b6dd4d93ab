"""Text to token files: a split by file that nothing but a file's own name decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.contract import text
from launcher.contract.errors import UsageError


def _files(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True)
    files = []
    for number in range(count):
        file = folder / f"f{number:03d}.txt"
        file.write_text(f"text {number}\n" * 3)
        files.append(file)
    return files


def test_prepare_splits_by_file_and_writes_bytes(tmp_path: Path) -> None:
    files = _files(tmp_path / "in", 120)
    counts = text.prepare(files, tmp_path / "out")
    train = (tmp_path / "out" / "train.bin").read_bytes()
    held = (tmp_path / "out" / "heldout.bin").read_bytes()
    assert counts["train_files"] + counts["heldout_files"] == 120
    assert 1 <= counts["heldout_files"] <= 15
    assert (counts["train_tokens"], counts["heldout_tokens"]) == (len(train), len(held))
    for file in files:
        data = file.read_bytes()
        assert (data in train) != (data in held)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["heldout.bin", "train.bin"]


def test_the_split_depends_on_relative_names_alone(tmp_path: Path) -> None:
    first, second = _files(tmp_path / "here", 60), _files(tmp_path / "there" / "deeper", 60)
    text.prepare(first, tmp_path / "a")
    text.prepare(list(reversed(second)), tmp_path / "b")
    for name in ("train.bin", "heldout.bin"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    fewer = [f for f in first if text.is_held_out(f.name)] + first[:10]
    text.prepare(fewer, tmp_path / "c")
    assert (tmp_path / "c" / "heldout.bin").read_bytes() == (tmp_path / "a" / "heldout.bin").read_bytes()


def test_two_files_are_enough_and_one_is_not(tmp_path: Path) -> None:
    files = _files(tmp_path / "in", 2)
    counts = text.prepare(files, tmp_path / "out")
    assert counts["train_files"] == counts["heldout_files"] == 1
    with pytest.raises(UsageError, match="cannot be split"):
        text.prepare(files[:1], tmp_path / "out")
    with pytest.raises(UsageError, match="no files"):
        text.prepare([], tmp_path / "out")
    with pytest.raises(UsageError, match="is a folder") as folder:
        text.prepare([tmp_path], tmp_path / "out")
    assert folder.value.hint == "give the files in it: FOLDER/*.txt"
    with pytest.raises(UsageError, match="nothing is no file"):
        text.prepare([tmp_path / "nothing"], tmp_path / "out")


def test_the_standard_library_is_a_corpus_of_real_size(tmp_path: Path) -> None:
    named = text.corpus("python-stdlib")
    assert named == sorted(named)
    counts = text.write_split(named, tmp_path)
    assert counts["train_tokens"] >= 5_000_000
    assert 0.01 < counts["heldout_tokens"] / counts["train_tokens"] < 0.3
    assert not any("/test/" in f"/{name}" for name, _ in named)
    with pytest.raises(UsageError, match="no corpus is named 'bible'"):
        text.corpus("bible")
