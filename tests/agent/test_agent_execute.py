"""A command beside a rank: its very environment and folder, without its secrets; who leaves takes it along."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from agent_job import Job, MakeJob, lives, until

from launcher.contract.launch import Node

WAIT = "import os, time; open('up-' + os.environ['RANK'], 'w').close(); time.sleep(600)"
SHOW = "echo $RANK $FROM_SETUP ${PLANTED-none}; pwd; echo err >&2; exit 3"


def _beside(job: Job, *argv: str, rank: int | None = None) -> tuple[bytes, bytes, dict[str, Any]]:
    """(stdout, stderr, the last event)"""
    request = {"run_dir": job.spec.run_dir, "attempt": 1, "node": "localhost", "rank": rank, "argv": list(argv)}
    done = subprocess.run(
        [sys.executable, job.spec.runtime, "exec"], input=json.dumps(request).encode(), capture_output=True, timeout=60
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert all(len(line) < 1000 for line in done.stdout.splitlines())  # srun hands on such lines whole
    said = [b"".join(base64.b64decode(e["data"]) for e in events if e.get("out") == out) for out in (1, 2)]
    return said[0], said[1], events[-1]


def test_beside_a_rank(job: MakeJob, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets.json"
    secrets.touch(0o600)
    secrets.write_text('{"PLANTED": "hush"}')
    one = job(
        *(sys.executable, "-c", WAIT),
        nodes=(Node("localhost", 2),),
        setup="export FROM_SETUP=loaded",
        secrets=("PLANTED",),
        secrets_file=str(secrets),
    )
    spec = one.spec
    one.agent()
    folder = Path(spec.run_dir)
    until(lambda: len(list(folder.glob("up-*"))) == 2)
    until(lambda: one.state() == "running")  # the ranks may be quicker than the record that their agent writes
    pid = next(r.pid for r in one.record().ranks if r.rank == 0)
    assert b"PLANTED=hush" in Path(f"/proc/{pid}/environ").read_bytes()  # the rank has it
    out, err, last = _beside(one, "sh", "-c", SHOW)
    assert (out, err, last) == (f"0 loaded none\n{folder}\n".encode(), b"err\n", {"status": 3})
    assert _beside(one, "printenv", "RANK", rank=1)[0] == b"1\n"
    assert _beside(one, "sh", "-c", "kill -9 $$")[2] == {"status": 137}
    assert _beside(one, "no-such-thing")[1:] == (b"no-such-thing: command not found\n", {"status": 127})
    assert "no rank 7 runs on localhost" in _beside(one, "true", rank=7)[2]["error"]
    assert _beside(one, "seq", "5000")[0] == "".join(f"{i}\n" for i in range(1, 5001)).encode()

    request = {"run_dir": spec.run_dir, "attempt": 1, "node": "localhost", "argv": ["sh", "-c", "echo $$; sleep 600"]}
    reading, writing = os.pipe()
    left = subprocess.Popen([sys.executable, spec.runtime, "exec"], stdin=subprocess.PIPE, stdout=writing)
    os.close(writing)
    assert left.stdin is not None
    with left.stdin:
        left.stdin.write(json.dumps(request).encode())
    with open(reading, "rb", buffering=0) as lines:
        said = next(line for line in lines if line.strip())  # an empty one now and then asks whether anybody reads
        shell = int(base64.b64decode(json.loads(said)["data"]))
        assert lives(shell)
    assert left.wait(40) == 141 and not lives(shell)
