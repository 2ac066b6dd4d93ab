"""A job's own files in a run's folder: what patterns take, and that nothing leads out of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.contract.kept import Foreign, foreign_here, is_kept, outputs_here, pattern_problem, whole_when_problem


def write(run: Path, *names: str) -> None:
    for name in names:
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def taken(run: Path, *patterns: str) -> set[str]:
    return {row["path"] for row in outputs_here(str(run), patterns)}


def test_patterns_begin_in_the_working_folder_or_the_runs_own(tmp_path: Path) -> None:
    write(
        tmp_path, "code/samples/a.png", "code/samples/deep/b.png", "code/train.py", "code/samples/.hidden", "out/x.csv"
    )
    write(tmp_path, "attempts/1/launch.json", "checkpoints/step-00000001/manifest.json", "data/train.bin", "run.json")
    os.utime(tmp_path / "code/train.py", (0, 0))  # as it was unpacked
    png = {"code/samples/a.png", "code/samples/deep/b.png"}
    assert taken(tmp_path, "samples/**") == png | {"code/samples/.hidden"} == taken(tmp_path, "samples")
    assert taken(tmp_path, "samples/*.png") == {"code/samples/a.png"} and taken(tmp_path, "**/*.png") == png
    assert taken(tmp_path, "**") == png | {"code/samples/.hidden"}, "what was shipped and is unchanged is at home"
    assert taken(tmp_path, "$ZERUN_RUN_DIR/out/*", "$ZERUN_RUN_DIR/*/*.csv") == {"out/x.csv"}
    os.utime(tmp_path / "code/train.py")
    assert "code/train.py" in taken(tmp_path, "*.py")


def test_links_are_passed_over(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    write(outside, "key")
    run = tmp_path / "run"
    write(run, "code/samples/a.png")
    (run / "code/samples/to_file").symlink_to(outside / "key")
    (run / "code/samples/to_folder").symlink_to(outside)
    (run / "code/other").symlink_to(outside)
    (run / "elsewhere").symlink_to(outside)
    os.mkfifo(run / "code/samples/pipe")
    assert taken(run, "samples/**", "other/*", "**", "$ZERUN_RUN_DIR/elsewhere/**") == {"code/samples/a.png"}


@pytest.mark.parametrize(
    "name",
    ["run.json", "attempts/1/x", "checkpoints/a/b", "data/x", "../x", "code/../../x", "/etc/passwd", "code//x",
     ".ssh/x", "code/a\nb", "-x/y", "code"],
)  # fmt: skip
def test_names_from_elsewhere_that_are_no_file_of_the_jobs_own(name: str) -> None:
    assert not is_kept(name)


def test_patterns_that_lead_out_or_at_what_is_ours() -> None:
    bad = ["../x", "/etc/*", "a/../b", "~/x", "$HOME/x", "", "$ZERUN_RUN_DIR/attempts/*", "$ZERUN_RUN_DIR/*", "a//b"]
    assert [p for p in bad if not pattern_problem(p)] == []
    assert not pattern_problem("samples/**") and not pattern_problem("$ZERUN_RUN_DIR/out/[0-9]*")
    assert whole_when_problem("a/b") and not whole_when_problem("{}.done")


def test_a_programs_checkpoints_are_whole_when_their_file_is_there(tmp_path: Path) -> None:
    write(
        tmp_path,
        "code/ck/step-9/w",
        "code/ck/step-9/DONE",
        "code/ck/step-10/w",
        "code/ck/step-10/deep/v",
        "code/ck/last/w",
    )
    (tmp_path / "code/ck/last/DONE").symlink_to("/etc/passwd")
    found = foreign_here(str(tmp_path), Foreign("ck/*", "DONE"))
    assert [(row["name"], row["step"], row["whole"]) for row in found] == [
        ("code/ck/last", None, False), ("code/ck/step-9", 9, True), ("code/ck/step-10", 10, False)
    ]  # fmt: skip
    assert found[2]["problem"] == "DONE is not there: it was never finished" and found[2]["bytes"] == 39
    write(tmp_path, "pt/e=1-step=20.ckpt", "pt/e=2-step=30.ckpt", "pt/e=1-step=20.ckpt.ok")
    files = foreign_here(str(tmp_path), Foreign("$ZERUN_RUN_DIR/pt/*.ckpt", "{}.ok"))
    assert [(row["name"], row["step"], row["whole"]) for row in files] == [
        ("pt/e=1-step=20.ckpt", 20, True), ("pt/e=2-step=30.ckpt", 30, False)
    ]  # fmt: skip
    assert [row["whole"] for row in foreign_here(str(tmp_path), Foreign("$ZERUN_RUN_DIR/pt/*.ckpt"))] == [True, True]
