"""A login node that wants a key and a password: typed once with ``zerun login``, never asked for again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e_site import PROGRAM, Site
from testbed.second_factor import PASSWORD, at_terminal, second_factor

ZERUN = str(Path(sys.executable).with_name("zerun"))
SCRIPT = """\
import os
print("rank", os.environ["RANK"], "here", flush=True)
"""

WAITS = """\
import os, sys, time
while not os.path.exists(os.path.expanduser("~/go")):
    time.sleep(0.1)
sys.exit(3)
"""


def _master(site: Site) -> int:
    """The pid of the login that stands open."""
    sockets = [p for p in (Path(site.environment["XDG_RUNTIME_DIR"]) / "zerun").iterdir() if not p.suffix]
    said = subprocess.run(["ssh", "-F", "none", "-S", sockets[0], "-O", "check", "x"], capture_output=True, text=True)
    found = re.search(r"pid=(\d+)", said.stderr)
    assert found, said
    return int(found[1])


def _login(site: Site, *passwords: str, more: tuple[str, ...] = ()) -> tuple[int, str]:
    typed = [("password:", word) for word in passwords]
    return at_terminal([ZERUN, "login", "guarded", *more], typed, cwd=site.folder, env=site.environment)


@pytest.mark.full
def test_a_second_factor_is_typed_once(slurm: Site, testbed: Any, tmp_path: Path) -> None:
    slurm.environment["XDG_RUNTIME_DIR"] = str(tmp_path)
    slurm.write("script.py", SCRIPT)
    job = slurm.write(
        "jobs/say.yaml",
        PROGRAM.format(name="say", nodes=2, time="2:00", python="/usr/bin/python3", more=""),
    )
    with second_factor(testbed, tmp_path, sessions=2) as guard:
        text = (slurm.folder / "clusters/uni.yaml").read_text().replace("name: uni", "name: guarded")
        text = text.replace(str(testbed.ssh_config), str(guard.config))
        slurm.write("clusters/guarded.yaml", text)
        by_fabric = slurm.zerun("submit", str(job), "--cluster", "guarded", code=4).stderr
        assert "second factor" in by_fabric and "via: openssh" in by_fabric and "zerun login guarded" in by_fabric
        slurm.write("clusters/guarded.yaml", text.replace("{host: login}", "{host: login, via: openssh}"))

        refused = slurm.zerun("submit", str(job), "--cluster", "guarded", code=4)
        assert "zerun login guarded" in refused.stderr and refused.stdout == ""
        assert not list(slurm.folder.glob("runs/say*"))
        status, said = _login(slurm, "wrong", "wrong again", "and again")
        assert status == 4 and "Permission denied" in said, said
        status, said = _login(slurm, PASSWORD)
        assert status == 0 and "logged in as trainer" in said and "until" in said and PASSWORD not in said, said

        run = slurm.zerun("submit", str(job), "--cluster", "guarded").stdout.strip()
        assert slurm.zerun("wait", run).returncode == 0
        slurm.write("script.py", WAITS)
        going = slurm.zerun("submit", str(job), "--cluster", "guarded").stdout.strip()
        # Four of them share a login that gives two sessions at a time.
        asking = [slurm.start("logs", run) for _ in range(4)]
        for process in asking:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err.decode()
            assert sorted(re.findall(r"rank \d here", out.decode())) == [f"rank {i} here" for i in range(4)]
        slurm.zerun("collect", run)
        assert (slurm.run_folder(run) / "attempts/1/logs/rank-00003.log").read_text() == "rank 3 here\n"
        assert guard.log.read_text().count("Accepted password") == 1

        os.kill(_master(slurm), signal.SIGKILL)
        assert "zerun login guarded" in slurm.json("status", going)["why"]
        assert "  next     zerun login guarded\n" in slurm.zerun("status", going).stdout
        for verb in (("logs", run), ("submit", str(job), "--cluster", "guarded"), ("cancel", going)):
            lost = slurm.zerun(*verb, code=4)
            assert "zerun login guarded" in lost.stderr
        assert _login(slurm, PASSWORD)[0] == 0
        # The cancel reached nobody: how the run ends is what its ranks do.
        (testbed.home() / "go").touch()
        try:
            assert "exit code 3" in slurm.zerun("wait", going, code=1).stderr
        finally:
            (testbed.home() / "go").unlink()
        assert slurm.json("status", going)["state"] == "failed"
        slurm.zerun("logs", run)
        assert "closed: login" in _login(slurm, more=("--close",))[1]
        slurm.zerun("logs", run, code=4)
        assert "no login was open" in _login(slurm, more=("--close",))[1]
    assert "keeps no login open" in slurm.zerun("login", "uni", code=2).stderr
