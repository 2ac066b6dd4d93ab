"""What a rank sees in its environment, byte for byte, and what it must not see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent_job import Job, MakeJob

from launcher.agent.environment import site
from launcher.contract.launch import Node

ODD = {
    "COMMAS": "a,b,,c",
    "QUOTES": 'it\'s "so" `x`',
    "DOLLAR": "$HOME ${X} $(id)",
    "NEWLINES": "one\ntwo\n\n",
    "ACCENT": "café ☕",
    "EQUALS": "a=b==c",
    "PERCENT": "%j %t %%",
    "BACKSLASH": "\\n \\",
    "EMPTY": "",
    "SPACES": "  two  ",
}
# Written by the rank itself: no shell or log is between its environment and the file.
WRITE = 'import os, sys; open(sys.argv[1] + os.environ["RANK"], "wb").write(open("/proc/self/environ", "rb").read())'


def _seen(one: Job, tmp_path: Path, rank: int = 0) -> dict[str, str]:
    raw = (tmp_path / f"env{rank}").read_bytes().rstrip(b"\0").split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in raw)


def _ran(one: Job, tmp_path: Path, env: dict[str, str] | None = None) -> dict[str, str]:
    assert one.agent(env=env).wait(40) == 0
    return _seen(one, tmp_path)


def test_values_arrive_byte_equal_whatever_the_agents_locale(job: MakeJob, tmp_path: Path) -> None:
    one = job(sys.executable, "-c", WRITE, str(tmp_path / "env"), env=ODD)
    seen = _ran(one, tmp_path, {"PATH": os.environ["PATH"], "LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"})
    assert {name: seen[name] for name in ODD} == ODD


def test_the_submitters_environment_does_not_leak(job: MakeJob, tmp_path: Path) -> None:
    one = job(sys.executable, "-c", WRITE, str(tmp_path / "env"))
    seen = _ran(one, tmp_path, {**os.environ, "LEAK": "1", "PYTHONPATH": "/leak", "HOME": "/leak", "SLURM_NTASKS": "9"})
    assert "LEAK" not in seen and "SLURM_NTASKS" not in seen
    assert "leak" not in seen["PYTHONPATH"]  # the shipped runtime, and nothing else
    assert seen["HOME"] == site({})["HOME"] != "/leak"


def test_what_the_launcher_owns(job: MakeJob, tmp_path: Path) -> None:
    nodes = (Node("localhost", 2),)
    one = job(
        sys.executable, "-c", WRITE, str(tmp_path / "env"), nodes=nodes, resume_step=12, env={"RANK": "9", "MINE": "1"}
    )
    seen = [_ran(one, tmp_path), _seen(one, tmp_path, 1)]
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"], s["MINE"]) for s in seen] == [
        ("0", "0", "2", "1"),
        ("1", "1", "2", "1"),
    ]
    assert seen[1]["ZERUN_RESUME_FROM"] == f"{one.spec.run_dir}/checkpoints/step-00000012"
    assert seen[1]["ZERUN_STOP_FILE"] == str(one.folder / "stop")
    assert (seen[1]["MASTER_ADDR"], seen[1]["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert seen[1]["ZERUN_TOKEN"] == one.spec.token
    assert int(seen[1]["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_slurm_says_who_we_are(job: MakeJob, tmp_path: Path) -> None:
    one = job(sys.executable, "-c", WRITE, str(tmp_path / "env"), nodes=(Node("", 1),))
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        "SLURMD_NODENAME": "gpu07",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert one.agent("", env={**os.environ, **slurm}).wait(40) == 0
    seen = _seen(one, tmp_path)
    assert (seen["SLURM_JOB_ID"], seen["CUDA_VISIBLE_DEVICES"], seen["ZERUN_NODE"]) == ("7", "0,1", "gpu07")
    assert not [name for name in seen if name.startswith("SLURM_NTASKS")]
    assert "SLURM_PROCID" not in seen and "SLURM_LOCALID" not in seen
    assert one.record("gpu07").job_id == "7"


def test_setup_then_env_then_ours(job: MakeJob, tmp_path: Path) -> None:
    setup = "echo hello\nexport A=setup B='two\nlines' RANK=5\nUNSEEN=1\nexport C=$NOT_SET_BEFORE"
    one = job(sys.executable, "-c", WRITE, str(tmp_path / "env"), setup=setup, env={"A": "job"})
    seen = _ran(one, tmp_path)
    assert (seen["A"], seen["B"], seen["C"], seen["RANK"]) == ("job", "two\nlines", "", "0")
    assert "UNSEEN" not in seen
    assert b"hello\n" in (one.folder / "logs" / "setup-localhost.log").read_bytes()


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        ("true\nfalse\nexport A=1", "line 2 failed with status 1: false"),
        ("if true; then\n  module-that-is-not-there\nfi", "line 2 failed with status 127"),
        ("exit 3", "status 3"),
        ("if ; then", "bash could not read it"),
    ],
)
def test_a_setup_that_fails_says_where(job: MakeJob, setup: str, says: str) -> None:
    one = job("true", setup=setup)
    assert one.run() == 1
    failure = one.record().failure
    assert failure is not None and failure.kind == "setup_failed" and says in failure.message, failure


def test_setup_survives_what_it_sources_and_leaves_running(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "conda.sh").write_text("false\nexport FROM_CONDA=1\n")
    setup = f". {tmp_path}/conda.sh\nfalse || true\nsleep 300 &\necho $! > {tmp_path}/pid"
    one = job(sys.executable, "-c", WRITE, str(tmp_path / "env"), setup=setup)
    assert _ran(one, tmp_path)["FROM_CONDA"] == "1"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_python_is_looked_up_after_setup(job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "snake").symlink_to("/bin/echo")
    one = job("python", "found", python="snake", setup=f"export PATH={tmp_path}/bin:$PATH")
    assert one.run() == 0
    assert one.log(0) == b"found\n"


SECRET = "s3cr3t-" + "x" * 20


def test_secrets_reach_ranks_and_nothing_else(job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"KEY": SECRET, "OTHER": "no"}))
    path.chmod(0o600)
    one = job(
        "sh",
        "-c",
        "echo ${#KEY}${OTHER-none}",
        secrets=("KEY",),
        secrets_file=str(path),
        setup='echo "setup sees ${KEY-nothing}"',
    )
    assert one.run() == 0
    assert one.log(0) == b"%dnone\n" % len(SECRET)
    assert b"setup sees nothing" in (one.folder / "logs" / "setup-localhost.log").read_bytes()
    assert not path.exists()
    found = subprocess.run(["grep", "-rlF", SECRET, str(tmp_path)], capture_output=True)
    assert found.stdout == b""


def test_a_secrets_file_that_others_can_read_is_refused(job: MakeJob, tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"KEY": SECRET}))
    path.chmod(0o644)
    one = job("true", secrets=("KEY",), secrets_file=str(path))
    assert one.run() == 1
    failure = one.record().failure
    assert failure is not None and "0600" in failure.message
