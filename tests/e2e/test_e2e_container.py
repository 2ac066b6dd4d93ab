"""Ranks in real containers (Debian's podman), the agent outside; on the laptop cluster."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from e2e_site import GPT, PROGRAM, Site

IMAGE = "localhost/zerun-test:1"
# This machine's kernel lets nobody raise a limit, and mixes both kinds of cgroups: runc takes it.
CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""


def empty_image(folder: Path) -> bytes:
    """A root without programs, whose /usr is mounted; a file tells that one is inside."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "root"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(entry)
        for name in ("bin", "lib", "lib64", "sbin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        for name, data in (("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"), ("etc/inside", b"the image\n")):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


@pytest.fixture
def boxed(laptop: Site, tmp_path: Path) -> Site:
    """The laptop cluster with its ranks in containers; skipped by name where no container can be run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not there (scripts/test.sh installs it as root): no rank was run in a container")
    conf = tmp_path / "containers.conf"
    conf.write_text(CONF)
    laptop.environment["CONTAINERS_CONF"] = str(conf)
    podman(laptop, "import", "-", IMAGE, stdin=empty_image(tmp_path))
    said = podman(laptop, "run", "--rm", "--network=host", "--pid=host", "-v", "/usr:/usr:ro", IMAGE, "/usr/bin/true")
    if said.returncode:
        pytest.skip(f"podman runs no container on this machine: {said.stderr.decode().strip()[-200:]}")
    mounts = json.dumps([f"{path}:{path}:ro" for path in ("/usr", sys.prefix, sys.base_prefix)])
    laptop.write(
        "clusters/here.yaml",
        "name: here\nbackend: direct\nnodes: {names: localhost, slots: 2}\n"
        f"env: {{OMP_NUM_THREADS: '1', CONTAINERS_CONF: {conf}}}\npython: {sys.executable}\n"
        f"container: {{runtime: podman, image: {IMAGE}, mounts: {mounts}}}\n",
    )
    return laptop


def podman(site: Site, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    conf = site.environment["CONTAINERS_CONF"]
    environment = {"PATH": "/usr/bin:/usr/sbin:/bin", "HOME": "/root", "CONTAINERS_CONF": conf}
    return subprocess.run(["podman", *words], input=stdin, env=environment, capture_output=True, timeout=120)


def test_ranks_train_in_containers_and_cancel_ends_those(boxed: Site) -> None:
    boxed.write("jobs/g.yaml", GPT.format(name="g", nodes=1, stage=2, steps=4, every=2))
    run = boxed.zerun("submit", "jobs/g.yaml", "--cluster", "here", "--follow").stdout.strip()
    assert boxed.json("status", run)["checkpoints"] == [2, 4]
    boxed.zerun("ckpt", "verify", run)

    boxed.write(
        "script.py",
        "import os, time\n"
        "print(open('/etc/inside').read().strip(), os.environ['RANK'], os.environ['WORD'], os.getcwd(), flush=True)\n"
        "time.sleep(300)\n",
    )
    more = "env: {WORD: 'a \"b\" $c'}"
    boxed.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python", more=more))
    run = boxed.zerun("submit", "jobs/p.yaml", "--cluster", "here").stdout.strip()
    end = time.monotonic() + 120
    while boxed.zerun("logs", run).stdout.count("the image") < 2:
        assert time.monotonic() < end, "the ranks did not come up"
    code = boxed.run_folder(run) / "code"
    assert f'1@localhost  the image 1 a "b" $c {code}' in boxed.zerun("logs", run).stdout
    names = podman(boxed, "ps", "--format", "{{.Names}}").stdout.decode().split()
    assert {f"zerun-{run}-1-rank-0", f"zerun-{run}-1-rank-1"} <= set(names)
    boxed.zerun("cancel", run, code=None)
    assert boxed.json("status", run)["state"] == "cancelled"
    assert run not in podman(boxed, "ps", "--all", "--format", "{{.Names}}").stdout.decode()
    assert not running_in(code), "what ran inside has ended with the container"
    # The kernel may kill the runtime's client, or our agent: neither leaves a container behind for good.
    for killed in ("client", "agent"):
        run = boxed.zerun("submit", "jobs/p.yaml", "--cluster", "here").stdout.strip()
        record = boxed.run_folder(run) / "attempts" / "1" / "nodes" / "localhost.json"
        end = time.monotonic() + 120
        while run not in podman(boxed, "ps", "--format", "{{.Names}}").stdout.decode():
            assert time.monotonic() < end, "the ranks did not come up"
        told = json.loads(record.read_bytes())
        os.kill(told["ranks"][0]["pid"] if killed == "client" else told["agent"]["pid"], signal.SIGKILL)
        boxed.zerun("wait", run, code=1)
        if killed == "agent":
            boxed.zerun("cancel", run, code=None)
        end = time.monotonic() + 60
        while run in podman(boxed, "ps", "--all", "--format", "{{.Names}}").stdout.decode():
            assert time.monotonic() < end, killed


def running_in(folder: Path) -> list[str]:
    """Processes whose working folder it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found.append(process.name)
        except OSError:
            continue
    return found


def test_an_image_that_is_not_there_is_told_before_anything_is_made(boxed: Site) -> None:
    boxed.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python", more=""))
    said = boxed.zerun("submit", "jobs/p.yaml", "-c", "here", "--set", "cluster.container.image=nosuch:9", code=2)
    assert "podman has no image nosuch:9" in said.stderr
    assert boxed.json("ls") == []
