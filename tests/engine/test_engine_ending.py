"""The exit of a script of one's own (plain torchrun, no launcher) that spoke by gloo."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.engine.comm import ending

# One import of torch, then a fork a try: each child speaks, and goes as any script goes. Its gloo threads are slow to
# let go: they have the one core only when nobody else wants it, and the interpreter only when it is given up.
TRIES = """
import atexit, json, os, resource, sys, tempfile
import torch, torch.distributed as dist
from launcher.engine import comm
from launcher.engine.comm import ending

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def speak():
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    groups = [dist.new_group([0]) for _ in range(24)]
    comm.connect()  # what ZeroEngine does
    cpu = min(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cpu})
        if open(f"/proc/self/task/{thread}/comm").read().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    sys.setswitchinterval(1000)
    for group in groups:
        dist.all_reduce(torch.ones(8), group=group)

def attempt(hook):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    speak()
    if not hook:
        atexit.unregister(ending.wait_until_at_rest)
    return None

def main():
    told = {"with": [], "without": []}
    for hook in (False, True):
        for _ in range(8 if hook else 6):
            status = attempt(hook)
            if status is None:
                return
            told["with" if hook else "without"].append(status)
            if not hook and status:
                break
    print(json.dumps(told))

main()
"""


@pytest.mark.full
def test_the_interpreter_goes_when_gloo_has_let_go(tmp_path: Path) -> None:
    script = tmp_path / "tries.py"
    script.write_text(TRIES)
    root = str(Path(ending.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    assert told["without"][-1] == signal.SIGABRT, "it cannot be provoked here: the hook may have had its day"
    assert told["with"] == [0] * 8, told


def test_rest_is_the_kernels_word_on_gloos_threads() -> None:
    """A thread under their name that works, then waits."""
    begun, go_on, rest = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
        begun.set()
        while not go_on.is_set():
            pass
        rest.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    try:
        assert not ending.wait_until_at_rest(limit_s=0.2)
        go_on.set()
        assert ending.wait_until_at_rest(limit_s=20.0)
    finally:
        go_on.set()
        rest.set()
        thread.join()
