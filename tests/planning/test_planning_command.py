"""``zerun plan``: what it prints, its JSON by name, its exit codes, and what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "jobs" / "quickstart.yaml")
DGX = str(ROOT / "clusters" / "dgx2-25.yaml")
LAPTOP = str(ROOT / "clusters" / "laptop.yaml")
STAGE_KEYS = {
    "zero_stage", "parameters_bytes", "gradients_bytes", "optimizer_bytes", "total_bytes", "all_ranks_bytes",
    "floor_bytes", "fits", "smallest_ranks_that_fit",
}  # fmt: skip
JOB_KEYS = {
    "stages", "step", "peak_bytes", "peak_holds", "sent_bytes_per_step", "bounds_s", "device_bytes", "verdict",
    "because", "try",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("ZERUN_CLUSTER", raising=False)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert run(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run(["plan", *arguments]) == code
    out, error = capsys.readouterr()
    return out, error


def test_a_count_without_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--parameters", "7.5e9", "--ranks", "64", "--device-memory", "32GB")
    assert all(set(stage) == STAGE_KEYS for stage in found["stages"])
    assert [s["total_bytes"] for s in found["stages"]] == [
        120_000_000_000, 31_406_250_000, 16_640_625_000, 1_875_000_000,
    ]  # fmt: skip
    assert [s["fits"] for s in found["stages"]] == [False, True, True, True]
    assert [s["smallest_ranks_that_fit"] for s in found["stages"]] == [None, 45, 7, 4]
    assert [s["floor_bytes"] for s in found["stages"]] == [120 * 10**9, 30 * 10**9, 15 * 10**9, 0]
    assert found["largest_parameters"] == [2 * 10**9, 7_641_791_044, 14_422_535_211, 128 * 10**9]
    assert found["device_bytes"] == 32 * 10**9


def test_a_floor_above_the_device_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "--parameters", "7B", "--ranks", "64", "--device-memory", "12GB")
    stage_2 = next(line for line in out.splitlines() if line.startswith("2 "))
    assert "never: the floor 14 GB is above the 12 GB" in stage_2


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ([], 16),
        (["--precision", "fp32"], 16),
        (["--precision", "bf16", "--gradient-dtype", "fp32"], 18),
        (["--optimizer", "momentum"], 12),
        (["--optimizer", "sgd"], 8),
        (["--precision", "fp32", "--optimizer", "sgd"], 8),
    ],
)
def test_bytes_of_a_parameter_are_computed(options: list[str], each: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--parameters", "1B", "--ranks", "1", *options)
    assert found["stages"][0]["total_bytes"] == each * 10**9


def test_frozen_parameters_and_a_tensor_degree(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--parameters", "1e9", "--frozen", "7e9", "--ranks", "8", "--tensor", "2")
    assert found["parameters"] == 8 * 10**9
    assert found["stages"][0]["total_bytes"] == (16 * 10**9 + 2 * 7 * 10**9) // 2


def test_the_table_is_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = told(capsys, "--parameters", "1T", "--table")
    row = next(line for line in out.splitlines() if line.strip().startswith("1024"))
    assert row.split()[1:] == ["16", "TB", "4.01", "TB", "2.01", "TB", "15.6", "GB"]
    found = answer(capsys, "--parameters", "128B", "--ranks", "64", "--table")
    rows = {row["ranks"]: [s["total_bytes"] // 10**9 for s in row["stages"]] for row in found["table"]}
    assert rows[1024] == [2048, 513, 257, 2] and rows[16] == [2048, 608, 368, 128]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "plan what? a JOB, or --parameters N --ranks N"),
        (["--parameters", "7.5e9"], "--parameters needs --ranks"),
        (["--parameters", "lots", "--ranks", "4"], "'lots' is not a whole number of parameters"),
        (["--parameters", "1.5", "--ranks", "4"], "'1.5' is not a whole number"),
        (["--parameters", "nan", "--ranks", "4"], "'nan' is not a whole number"),
        (["--parameters", "1B", "--ranks", "6", "--tensor", "4"], "the degree must divide the ranks"),
        (["--parameters", "1B", "--ranks", "6", "--optimizer", "adam"], "accepted: adamw, momentum, sgd"),
        (["--parameters", "1B", "--ranks", "6", "--precision", "fp8"], "accepted: fp32, bf16, fp16"),
        (["--parameters", "1B", "--ranks", "6", "--device-memory", "32Gb"], "--device-memory: '32Gb' is in bits"),
        (["--parameters", "1B", "--ranks", "6", "--search"], "need a job"),
        ([QUICK, "--parameters", "1B"], "--parameters goes without a job"),
        ([QUICK, "--device-memory", "32GB"], "--device-memory goes without a job"),
    ],
)
def test_wrong_usage_says_what_is_accepted(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, error = told(capsys, *arguments, code=2)
    assert out == "" and said in error and "Traceback" not in error


def test_a_job_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, QUICK, "--cluster", LAPTOP, "--set", "batch.global=32")
    assert set(found) >= JOB_KEYS
    assert found["peak_bytes"] is None and found["peak_holds"] is None  # until a simulation says
    assert all({"what", "bytes", "source"} <= set(line) for line in found["step"])
    assert found["verdict"] == "cannot be said" and found["try"] is None
    psi = found["parameters"]
    assert (
        found["sent_bytes_per_step"] == (2 + 1) * psi * 4 // 2
    )  # two micro-steps reduced, one gather, half of it leaves
    assert set(found["bounds_s"]) == {"compute", "inside", "between", "step"}


def test_what_does_not_fit_is_exit_3_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--set", "model.seq_len=128", "--set", "batch.global=32"]
    tight = [QUICK, "--cluster", LAPTOP, *sizes, "--set", "cluster.device.memory=40MB"]
    found = answer(capsys, *tight, code=3)
    assert found["verdict"] == "does not fit" and found["try"] == "batch.micro=4"
    out, error = told(capsys, *tight, code=3)
    assert "try      --set batch.micro=4" in out and "hint: this would fit: --set batch.micro=4" in error
    again = answer(capsys, *tight, "--set", found["try"])
    assert again["verdict"] == "fits" and again["global_batch"] == found["global_batch"]


def test_a_search_and_a_table_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    paper = [str(ROOT / "jobs" / "paper" / "dp-8b.yaml"), "--cluster", DGX]
    found = answer(capsys, *paper, "--search", "--table")
    bounds = [one["step_s"] for one in found["search"]["found"]]
    assert bounds and bounds == sorted(bounds)
    assert [row["ranks"] for row in found["table"]] == [1, 4, 16, 64, 128, 256, 1024]
    out, _ = told(capsys, *paper, "--search")
    assert "lower bounds, not predictions" in out and "--set zero.stage=" in out


def test_a_program_is_planned_without_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("name: own\nprogram: {argv: [python, train.py]}\n")
    found = answer(capsys, str(own), "--cluster", LAPTOP)
    assert found["verdict"] == "cannot be said" and "a program of the user's own" in found["because"]
    assert found["stages"] == [] and found["step"] == [] and found["sent_bytes_per_step"] is None
    _, error = told(capsys, str(own), "--cluster", LAPTOP, "--table", code=2)
    assert f"error: {own}:2:10: on cluster laptop: a table needs a model whose parameters are counted here" in error
    _, error = told(capsys, QUICK, "--cluster", LAPTOP, "--search", code=2)
    assert error.startswith(f"error: {LAPTOP}:") and ": job quickstart: cluster laptop has no device memory" in error


def test_thousands_of_ranks_are_planned_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["--set", "cluster.nodes.names=dgx[001-256]", "--set", "nodes=256", "--set", "batch.global=4096"]
    wide += ["--set", "batch.micro=16", "--set", "zero.stage=3"]
    found = answer(capsys, str(ROOT / "jobs/paper/memory-100b-c4.yaml"), "--cluster", DGX, *wide)
    assert found["ranks"] == 4096 and found["verdict"] == "fits"
    assert {line["what"] for line in found["step"]} >= {"gathered parameters", "stored for recomputation"}


def test_a_global_batch_that_no_ranks_make(capsys: pytest.CaptureFixture[str]) -> None:
    _, error = told(capsys, QUICK, "--cluster", LAPTOP, "--set", "batch.global=40", "--set", "batch.micro=8", code=2)
    assert "the nearest that are: 32 and 48; or keep it with micro 5" in error


def test_planning_loads_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys; from launcher.cli.main import run; "
        f"assert run(['plan', {QUICK!r}, '--cluster', {LAPTOP!r}]) == 0; "
        "sys.exit([m for m in sys.modules if m.split('.')[0] == 'torch' or m.startswith('launcher.engine')] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_planned_is_told_where_it_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "pools.yaml").write_text(
        "name: pools\nbackend: slurm\npaths: {runs: /r}\npools:\n"
        "  a: {slots: 4, device: {kind: gpu}}\n  b: {slots: 4, device: {kind: gpu, precisions: [fp16]}}\n"
    )
    (tmp_path / "clusters" / "rack.yaml").write_text(
        "name: rack\nbackend: direct\npaths: {runs: /r}\nnodes:\n"
        "  - {name: one, slots: 2, device: {kind: gpu}}\n  - {name: two, slots: 2}\n"
    )
    text = Path(QUICK).read_text()
    assert "precision: fp32" in text
    (tmp_path / "own.yaml").write_text(text)
    (tmp_path / "left-out.yaml").write_text(text.replace("precision: fp32", "pool: b"))
    own = next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith("precision:"))

    def refused(*arguments: str) -> str:
        out, error = told(capsys, *arguments, code=2)
        assert out == ""
        return error

    said = "precision fp32 is not supported by the device gpu\nhint: precision: fp16\n"
    on_b = refused("own.yaml", "--cluster", "pools", "--set", "pool=b")
    assert on_b == f"error: own.yaml:{own}:12: on cluster pools: {said}"
    told_by_default = refused("left-out.yaml", "--cluster", "pools")
    assert told_by_default == f"error: {tmp_path}/clusters/pools.yaml:6:49: job quickstart: {said}"
    assert refused("own.yaml", "--cluster", "rack", "--set", "nodes=2", "--set", "slots_per_node=2").startswith(
        f"error: {tmp_path}/clusters/rack.yaml:5:3: job quickstart: ranks of one job compute on one kind of device: "
    )
    three = ("--set", "zero.replicas=3", "--set", "zero.stage=2")
    assert refused("own.yaml", "--cluster", "pools", *three).startswith(
        "error: --set zero.replicas: on cluster pools: zero.replicas: 3 does not divide "
    )


def test_an_include_that_matches_nothing_is_told_where_the_job_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERUN_RUNS", str(tmp_path / "runs"))
    job = tmp_path / "j.yaml"
    job.write_text("name: j\nslots_per_node: 1\ncode:\n  include: [j.yaml, data/*.bin]\nprogram: {argv: [x]}\n")
    dry = ["submit", str(job), "--cluster", LAPTOP, "--dry-run"]
    assert run(dry) == 2
    assert f"{job}:4:21: 'data/*.bin' matches no file below {tmp_path}" in capsys.readouterr().err
    assert run([*dry, "--set", "code.include=[j.yaml]", "--set", "data.tokens=j.yaml"]) == 0
    assert run(["plan", str(job), "--cluster", LAPTOP, "--set", "data.tokens=/lustre/t.bin"]) == 0
    assert "data     ZERUN_DATA_TRAIN: /lustre/t.bin\n" in capsys.readouterr().out
