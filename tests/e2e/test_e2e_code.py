"""The job's code over SSH: what goes through the wire when a file of it changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_site import PROGRAM, Site

from launcher.app import App
from launcher.transports.fabric import FabricTransport

NODES = ("node01", "node02")
HERE = "/scratch/trainer/zerun/.blobs"
TELL = """\
import hashlib
import pathlib
for path in sorted(pathlib.Path().rglob("*")):
    if path.suffix in (".bin", ".txt"):
        print(hashlib.sha256(path.read_bytes()).hexdigest()[:16], path, flush=True)
"""


def received(testbed: Any, node: str) -> int:
    """Bytes that came to the node from anywhere, by its kernel's count."""
    lines = testbed.exec(node, ["cat", "/proc/net/dev"]).stdout.decode().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if not line.strip().startswith("lo:"))


def submit(rack: Site, testbed: Any, *more: str) -> tuple[list[str], dict[str, int], str]:
    """What it said, what each node received for it, and the line about the code."""
    before = {node: received(testbed, node) for node in NODES}
    said = rack.zerun("submit", "jobs/p.yaml", "--cluster", "rack", *more).stderr.splitlines()
    came = {node: received(testbed, node) - before[node] for node in NODES}
    (line,) = (line for line in said if line.startswith("code: "))
    return said, came, line


def found(said: list[str]) -> list[set[str]]:
    """What a rank of each node found in its code."""
    return [{line.split("  ", 1)[1] for line in said if line.startswith(f"{rank}@")} for rank in (0, 2)]


@pytest.fixture
def tree(rack: Site, testbed: Any) -> Site:
    for node in NODES:
        testbed.exec(node, ["rm", "-rf", HERE])
    rack.write("script.py", TELL)
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=2, time="5:00", python="python3", more=""))
    noise = random.Random(3)
    for number in range(60):
        rack.write(f"src/{number}.txt", noise.randbytes(200).hex())
    (rack.folder / "src/big.bin").write_bytes(noise.randbytes(3_000_000))
    return rack


def test_one_changed_file_is_all_that_goes_to_each_node(tree: Site, testbed: Any) -> None:
    _, came, line = submit(tree, testbed)
    assert min(came.values()) > 3_000_000 and line.endswith(", all sent")
    tree.zerun("wait", "last")  # its slots are the next one's
    (tree.folder / "src/7.txt").write_text("changed\n" + os.urandom(1500).hex())
    # What lies on a node is read, not believed: here one byte of the large file flips.
    spoil = f"f=$(find {HERE}/contents -size +1M -type f); printf x | dd of=$f bs=1 seek=77 conv=notrunc"
    testbed.exec("node02", ["sh", "-c", spoil])
    said, came, line = submit(tree, testbed, "--follow")
    assert came["node01"] < 200_000 < 3_000_000 < came["node02"] < 3_200_000, came
    assert ", 2 of 64 files sent to the node that lacked most (3.0 MB of 3.0 MB)" in line, line
    first, second = found(said)
    assert first == second and len(first) == 61


@pytest.mark.full
def test_a_submit_killed_while_it_sends_is_gone_on_with(tree: Site, testbed: Any) -> None:
    noise = random.Random(5)
    for number in range(20):
        (tree.folder / f"src/big{number}.bin").write_bytes(noise.randbytes(1_500_000))
    process = tree.start("submit", "jobs/p.yaml", "--cluster", "rack")
    count = ["sh", "-c", f"find {HERE}/contents/?? -size +1M 2>/dev/null | wc -l; ls {HERE} | grep -c tree"]
    while True:
        assert process.poll() is None, "it was sent before it could be killed"
        number, lists = testbed.exec("node01", count, check=False).stdout.split()
        if int(number):
            break
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert int(lists) == 0
    time.sleep(1)  # what was on its way arrives
    there, lists = testbed.exec("node01", count, check=False).stdout.split()
    assert 0 < int(there) < 21 and int(lists) == 0
    said, came, line = submit(tree, testbed, "--follow")
    assert came["node01"] < 33_600_000 - 1_500_000 * int(there) and " of 84 files sent to " in line, (came, line)
    first, second = found(said)
    assert first == second and len(first) == 81


@pytest.mark.full
def test_a_run_of_an_older_zerun_is_resumed_with_its_archive(laptop: Site) -> None:
    laptop.write("script.py", "raise SystemExit(3)\n")
    laptop.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    run = laptop.zerun("submit", "jobs/p.yaml", "--cluster", "here", "--follow", code=1).stdout.strip()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        script = b"print('out of the archive')\n"
        info = tarfile.TarInfo("script.py")
        info.size = len(script)
        archive.addfile(info, io.BytesIO(script))
    name = f"{hashlib.sha256(packed.getvalue()).hexdigest()}.tar.gz"
    blobs = laptop.folder / "runs/.blobs"
    (blobs / name).write_bytes(packed.getvalue())
    shutil.rmtree(blobs / "contents")
    about = laptop.run_folder(run) / "run.json"
    told = json.loads(about.read_bytes())
    about.write_text(json.dumps({**told, "code": {**told["code"], "name": name}}))
    laptop.zerun("resume", run, "--follow")
    assert "out of the archive" in laptop.zerun("logs", run).stdout
    assert json.loads((laptop.run_folder(run) / "attempts/2/launch.json").read_bytes())["code"].endswith(name)


@pytest.mark.full
def test_a_submit_to_slurm_is_three_commands_over_ssh_and_one_for_what_changed(
    slurm: Site, testbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.write("script.py", "print('well')\n")
    slurm.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=""))
    testbed.exec("login", ["rm", "-rf", "/home/trainer/zerun"])
    calls: list[str] = []
    start = FabricTransport._start

    def counted(self: FabricTransport, argv: Sequence[str]) -> Any:
        calls.append("look" if "-c" in argv[:4] and "-S" in argv else argv[-1] if "-S" in argv else argv[0])
        return start(self, argv)

    monkeypatch.setattr(FabricTransport, "_start", counted)
    monkeypatch.setenv("XDG_CONFIG_HOME", slurm.environment["XDG_CONFIG_HOME"])
    app = App(slurm.folder)
    seen = []
    for text in ("print('well')\n", "print('well')\n", "print('other')\n"):
        slurm.write("script.py", text)
        calls.clear()
        submitted = app.submit(Path(slurm.folder / "jobs/p.yaml"), "uni")
        seen.append(list(calls))
        app.cancel(submitted.run)
    tested = "/bin/sh"  # `sbatch --test-only`; before it, the first time, the runtime is put
    assert seen[0] == ["look", "/bin/sh", tested, "receive", "submit"]
    assert seen[1] == ["look", tested, "submit"]
    assert seen[2] == ["look", tested, "receive", "submit"]
