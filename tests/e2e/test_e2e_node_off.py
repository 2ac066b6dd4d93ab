"""A machine is off for good: the run goes on without it, and every verb says what it has and what it lacks."""

from __future__ import annotations

from typing import Any

import pytest
from e2e_site import GPT, PROGRAM, Site
from test_e2e_slurm import wait_for_checkpoint


@pytest.mark.full
def test_a_machine_of_an_earlier_attempt_is_off(rack: Site, testbed: Any) -> None:
    rack.write("jobs/g.yaml", GPT.format(name="g", nodes=3, stage=2, steps=4000, every=10).replace("al: 16", "al: 12"))
    run = rack.zerun("submit", "jobs/g.yaml", "--cluster", "rack").stdout.strip()
    wait_for_checkpoint(rack, run, 10)
    rack.zerun("cancel", run, code=None)
    step = max(c["step"] for c in rack.json("ckpt", "ls", run) if c["whole"])
    rack.zerun("collect", run)  # its part of the checkpoint is at home, where the resume takes it from
    testbed.kill("node03")
    try:
        said = rack.zerun("resume", run, "--nodes", "2", "--follow", "--set", f"steps={step + 10}")
        assert "  done: " in said.stderr and "asking again" not in said.stderr, said.stderr
        for follow in ((), ("-f",)):
            logs = rack.zerun("logs", run, *follow)
            assert logs.stdout and "node03" not in logs.stdout + logs.stderr, logs.stderr
        state = rack.json("status", run)
        assert state["state"] == "done" and state["nodes"] == ["node01", "node02"]

        came = rack.zerun("collect", run, code=8).stderr
        assert f"the checkpoint of step {step + 10} whole (4 shards verified); node03 did not answer" in came, came
        assert f"zerun collect {run} again" in came
        rack.zerun("ckpt", "verify", run)

        left = rack.zerun("rm", run, "--remote", "--yes", code=8)
        assert "removed on node01, node02" in left.stdout, left.stdout
        assert (
            "what lies on node03 and at home stays" in left.stderr
            and f"zerun rm {run} --remote once more" in left.stderr
        )
        assert rack.run_folder(run).is_dir()
    finally:
        testbed.start("node03")
    rack.zerun("rm", run, "--remote", "--yes")
    assert not rack.run_folder(run).exists()
    gone = testbed.exec("node03", ["ls", f"/scratch/{testbed.user}/zerun"]).stdout.decode()
    assert run not in gone


@pytest.mark.full
def test_a_machine_of_the_followed_attempt_goes_off(rack: Site, testbed: Any) -> None:
    """What it ran is told as the run's end, and its name once; nobody waits for it for ever."""
    rack.write("script.py", "import time\nprint('here', flush=True)\ntime.sleep(500)\n")
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=3, time="5:00", python="python3", more=""))
    following = rack.start("submit", "jobs/p.yaml", "--cluster", "rack", "--follow")
    assert following.stdout is not None and following.stderr is not None
    following.stdout.readline()
    told = b""
    while told.count(b"here") < 6:
        told += following.stderr.readline()
    testbed.kill("node03")
    try:
        _, rest = following.communicate(timeout=150)
    finally:
        testbed.start("node03")
    words = rest.decode()
    assert following.returncode == 1, words
    assert words.count("the logs on node03 could not be read to their end") == 1
    assert words.count("still no answer") == 1 and "failed since" in words


@pytest.mark.full
def test_a_setup_that_fails_leads_to_what_it_said(rack: Site, testbed: Any) -> None:
    rack.write("script.py", "")
    more = "setup: |\n  echo looking for the module\n  false"
    rack.write("jobs/p.yaml", PROGRAM.format(name="p", nodes=1, time="5:00", python="python3", more=more))
    rack.zerun("submit", "jobs/p.yaml", "--cluster", "rack", "--follow", code=1)
    said = rack.zerun("status", "last").stdout
    run = said.split()[0]
    assert f"zerun collect {run} --checkpoint none" in said and "zerun logs" not in said, said
    rack.zerun("collect", run, "--checkpoint", "none")
    (log,) = (rack.run_folder(run) / "attempts/1/logs").glob("setup-*.log")
    assert "looking for the module" in log.read_text()
