"""Data and a job's own files on a node: read once, staged and proven, never led out of the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import environment, staging
from launcher.agent.claim import claim
from launcher.agent.digest import of_file
from launcher.bundles import runtime_bundle
from launcher.contract.data_files import DataFile
from launcher.contract.errors import NoSpace, UsageError, VerificationFailed
from launcher.contract.folder import RunFolder
from launcher.contract.kept import Foreign
from launcher.contract.launch import LaunchSpec, Node, Program
from launcher.contract.plain import dumps


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "rt.zip"
    path.write_bytes(runtime_bundle().data)
    return path


def verb(runtime: Path, name: str, request: dict[str, Any], code: int = 0) -> Any:
    argv = [sys.executable, "-E", "-S", str(runtime), name]
    done = subprocess.run(argv, input=json.dumps(request).encode(), capture_output=True)
    assert done.returncode == code, done.stderr.decode() + done.stdout.decode()
    return json.loads(done.stdout)


def spec(run: Path, runtime: Path, **more: Any) -> LaunchSpec:
    return LaunchSpec(
        "r", 1, str(run), str(runtime), (Node("n1", 1),), True, "t" * 32, sys.executable, sys.executable,
        program=Program(("x",)), **more,
    )  # fmt: skip


def write_launch(run: Path, launch: LaunchSpec) -> None:
    folder = run / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "launch.json").write_bytes(dumps(launch))
    (folder / "script").write_text("#!/bin/sh\n")


def test_a_file_is_read_once_until_it_changes(runtime: Path, tmp_path: Path) -> None:
    tokens, cache = tmp_path / "train.bin", tmp_path / "runs" / ".data" / "digests.json"
    tokens.write_bytes(b"ab" * 5000)
    asked = [{"path": str(tokens)}, {"path": str(tmp_path / "none")}, {"path": str(tmp_path)}]
    request = {"files": asked, "python": sys.executable, "setup": "", "cache": str(cache)}
    said = verb(runtime, "data", request)
    found = [(row["bytes"], row["digest"], row["problem"]) for row in said["files"]]
    assert found[0] == (10_000, of_file(str(tokens)), None) and str(found[0][1]).startswith("xxh3:")
    assert found[1][2] == "is not there" and found[2][2] == "is no plain file"
    assert said["free_bytes"][str(tmp_path)] > 0
    kept = json.loads(cache.read_text())
    kept[str(tokens)]["digest"] = "xxh3:" + 32 * "0"
    cache.write_text(json.dumps(kept))
    assert verb(runtime, "data", request)["files"][0]["digest"] == "xxh3:" + 32 * "0", "known, and not read again"
    assert verb(runtime, "data", {**request, "fresh": True})["files"][0]["digest"] == found[0][1]
    os.utime(tokens, (1, 1))
    assert verb(runtime, "data", request)["files"][0]["digest"] == found[0][1]
    asked[0]["algorithm"] = "sha256"
    assert verb(runtime, "data", request)["files"][0]["digest"] == of_file(str(tokens), "sha256")


def test_setup_finds_the_python_that_reads_and_any_python_will_do(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    request = {"files": [{"path": str(tmp_path / "f")}], "cache": str(tmp_path / "c"), "fresh": True}
    setup = f"export PATH={Path(sys.executable).parent}:$PATH; echo noise"
    with_setup = verb(runtime, "data", {**request, "python": Path(sys.executable).name, "setup": setup})
    assert with_setup["files"][0]["digest"].startswith("xxh3:")
    without = verb(runtime, "data", {**request, "python": "no-such-python", "setup": ""})
    assert without["files"][0]["digest"].startswith("sha256:"), "the agent's own Python has no xxhash"


def test_staging_proves_what_it_copied(runtime: Path, tmp_path: Path) -> None:
    source = tmp_path / "lustre.bin"
    source.write_bytes(b"tokens" * 1000)
    file = DataFile("tokens", str(source), 6000, str(of_file(str(source))))
    base = {"PATH": os.environ["PATH"], "JOB_DISK": str(tmp_path / "disk")}
    launch = spec(tmp_path / "r", runtime, stage=(file,), node_local="$JOB_DISK")
    said: list[str] = []
    told = json.loads(staging.stage(launch, base, str(tmp_path), said.append)[environment.STAGED])
    copy = Path(told[str(source)])
    assert copy.parent == tmp_path / "disk" / "zerun-data" and copy.read_bytes() == source.read_bytes()
    before = copy.stat().st_ino
    staging.stage(launch, base, str(tmp_path), said.append)
    assert copy.stat().st_ino == before and "already" in said[-1]
    copy.unlink()
    source.write_bytes(b"Tokens" * 1000)
    with pytest.raises(VerificationFailed, match=r"is not xxh3:.*which it was when the job was submitted"):
        staging.stage(launch, base, str(tmp_path), said.append)
    assert [p.name for p in copy.parent.iterdir() if p.suffix != ".proven"] == [], "no wrong copy, and no part of one"
    huge = spec(
        tmp_path / "r",
        runtime,
        stage=(DataFile("tokens", str(source), 2**60, file.digest),),
        node_local=base["JOB_DISK"],
    )
    with pytest.raises(NoSpace, match="are to be staged to"):
        staging.stage(huge, base, str(tmp_path), said.append)
    with pytest.raises(UsageError, match=r"paths.node_local: .*NO_SUCH is not set"):
        staging.stage(
            spec(tmp_path / "r", runtime, stage=(file,), node_local="$NO_SUCH"), base, str(tmp_path), said.append
        )


def test_digests_are_of_the_jobs_own_files_alone(runtime: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    write_launch(run, spec(run, runtime))
    (run / "code").mkdir()
    (run / "code" / "w.pt").write_bytes(b"w")
    (run / "code" / "link.pt").symlink_to("/etc/passwd")
    (run / "code" / "out").symlink_to("/etc")
    said = verb(runtime, "digests", {"run_dir": str(run), "files": ["code/w.pt"]})
    assert said["digests"] == {"code/w.pt": of_file(str(run / "code" / "w.pt"))}
    for name in ("code/link.pt", "code/out/passwd", "../r/code/w.pt", "attempts/1/launch.json", "/etc/passwd"):
        refused = verb(runtime, "digests", {"run_dir": str(run), "files": [name]}, code=5)
        assert "is no file of the job's own" in refused["error"]


def test_a_job_that_begins_again_goes_on_from_the_programs_newest_whole_checkpoint(
    runtime: Path, tmp_path: Path
) -> None:
    run = tmp_path / "r"
    write_launch(run, spec(run, runtime, foreign=Foreign("ck/*", "DONE")))
    for step, whole in ((9, True), (10, True), (11, False)):
        (run / "code" / "ck" / f"step-{step}").mkdir(parents=True)
        if whole:
            (run / "code" / "ck" / f"step-{step}" / "DONE").touch()
    folder = RunFolder.at(str(tmp_path), "r")
    assert claim(folder, 1, "7", 0) == 1 and claim(folder, 1, "7", 1) == 2
    assert json.loads((run / "attempts" / "2" / "launch.json").read_text())["resume_from"] == "code/ck/step-10"
