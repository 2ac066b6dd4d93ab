"""The agent's small verbs as the cluster runs them: out of the shipped zip, without a cluster."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_kit import RUNTIME

from launcher.agent import expand
from launcher.backends.states import state_of, why_queued
from launcher.contract.errors import Exit


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / RUNTIME.name
    path.write_bytes(RUNTIME.data)
    return path


def ask(zipped: Path, verb: str, request: Any, **env: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-E", "-S", zipped, verb],
        input=json.dumps(request).encode(),
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": "/home/somebody", **env},
    )
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)


def test_expand(zipped: Path) -> None:
    paths = ["~", "~/a b", "/x/$V/${V}y", "/$V/é $", "/a//b/../c"]
    code, said = ask(zipped, "expand", {"paths": paths}, V="v w")
    assert (code, said["paths"]) == (0, ["/home/somebody", "/home/somebody/a b", "/x/v w/v wy", "/v w/é $", "/a/c"])
    for bad, why in (("/$NOT_SET", "not set there"), ("$V/x", "no absolute path"), ("~other/x", "only one's own home")):
        code, said = ask(zipped, "expand", {"paths": [bad]}, V="relative")
        assert code != 0 and why in said["error"], said


def test_a_shipped_file_is_there_only_when_it_is_what_its_name_says(tmp_path: Path) -> None:
    (tmp_path / ".blobs").mkdir()
    whole, cut, none = RUNTIME.name, f"{'b' * 64}.zip", f"{'c' * 64}.zip"
    (tmp_path / ".blobs" / whole).write_bytes(RUNTIME.data)
    (tmp_path / ".blobs" / cut).write_bytes(b"")
    said = expand.look({"runs": str(tmp_path), "blobs": [whole, cut, none]})
    assert said["have"] == [whole]


def test_install_writes_inside_the_run_alone(zipped: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "r"
    text = base64.b64encode(b"\0bytes").decode()
    request = {
        "run_dir": str(run_dir),
        "files": {"attempts/1/script": text, "a b/é": text},
        "modes": {"attempts/1/script": 0o755},
        "secrets": {"path": str(tmp_path / "runs/.secrets/r.json"), "values": {"K": "v\né"}},
    }
    assert ask(zipped, "install", request) == (0, {})
    assert (run_dir / "a b/é").read_bytes() == b"\0bytes"
    assert (run_dir / "attempts/1/script").stat().st_mode & 0o777 == 0o755
    assert json.loads((tmp_path / "runs/.secrets/r.json").read_bytes()) == {"K": "v\né"}
    assert (tmp_path / "runs/.secrets/r.json").stat().st_mode & 0o777 == 0o600
    for bad in ("../x", "/x", "a/../../x", "", "a//b", "./a"):
        code, said = ask(zipped, "install", {"run_dir": str(run_dir), "files": {bad: text}})
        assert code == Exit.REFUSED, said
    inside = {**request, "secrets": {"path": str(run_dir / "s.json"), "values": {}}}
    assert ask(zipped, "install", inside)[0] == Exit.REFUSED


def test_probe_of_a_python_with_and_without_the_modules(zipped: Path, tmp_path: Path) -> None:
    request = {
        "python": sys.executable,
        "modules": ["torch", "no_such_module"],
        "resolve": ["localhost", "no-such-host.invalid"],
        "path": str(tmp_path / "not/yet"),
        "setup": "echo noise; export SEEN=1",
    }
    code, said = ask(zipped, "probe", request)
    assert code == 0 and said["missing"] == ["no_such_module"] and said["modules"]["torch"]
    assert said["unresolved"] == ["no-such-host.invalid"] and said["writable"] and said["free_bytes"] > 0
    code, said = ask(zipped, "probe", {**request, "python": "/no/python"})
    assert code == 0 and "/no/python" in said["python_problem"]
    broken = {**request, "python": "no-such-python", "setup": "no-such-module load cuda"}
    code, said = ask(zipped, "probe", broken)
    assert code == 0 and said["python_problem"].splitlines() == [
        "`no-such-python` after `setup`: command not found",
        "setup said: line 1: no-such-module: command not found",
    ]
    code, said = ask(zipped, "probe", {**request, "setup": "exit 3"})
    assert code == 0 and said["python_problem"]


def test_submit_where_there_is_no_slurm(zipped: Path, tmp_path: Path) -> None:
    request = {"run_dir": str(tmp_path / "r"), "attempt": 1, "files": {}, "sbatch": ["sbatch"], "name": "n"}
    code, said = ask(zipped, "submit", request, PATH="/nowhere")
    assert code == Exit.USAGE and "squeue is not here" in said["error"]
    assert not (tmp_path / "r/attempts/1/submitting").exists()


def test_every_word_of_slurms_has_a_state_and_unknown_ones_are_unknown() -> None:
    assert state_of("CANCELLED by 1000") == "ended" and state_of("NODE_FAIL") == "ended"
    assert state_of("REQUEUE_HOLD") == "queued" and state_of("COMPLETING") == "running"
    assert state_of("SOMETHING_NEW") == "unknown" and state_of("") == "unknown"


def test_reasons_in_plain_words() -> None:
    assert why_queued("PENDING", "Priority") == "other jobs come first (Priority)"
    assert why_queued("PENDING", "QOSMaxJobsPerUserLimit").startswith("is above a limit of its qos")
    assert why_queued("PENDING", "ReqNodeNotAvail, UnavailableNodes:node[01-02]").startswith("a node that it needs")
    assert "after a requeue (BeginTime)" in why_queued("PENDING", "BeginTime")
    assert why_queued("PENDING", "SomethingNew") == "SomethingNew"
    assert why_queued("CONFIGURING", "None") == "its nodes are being prepared"
