"""Real runs of small programs on the laptop cluster, through the command line: ids, exit codes, words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZERUN = [sys.executable, "-c", "from launcher.cli.main import main; main()"]


class Shell:
    """A folder with jobs in it, and a zerun whose runs are kept there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ZERUN_") or k == "ZERUN_LEASES"}
        ours = {"PYTHONPATH": str(ROOT), "ZERUN_RUNS": str(folder / "runs"), "ZERUN_CLUSTER": "laptop"}
        self.environment = {**kept, **ours}

    def job(self, script: str, *, ranks: int = 2, more: str = "") -> str:
        (self.folder / "script.sh").write_text(script)
        text = f"name: small\nslots_per_node: {ranks}\nprogram: {{argv: [sh, script.sh], stop_grace: 2s}}\n{more}"
        (self.folder / "job.yaml").write_text(text)
        return "job.yaml"

    def run(self, *arguments: str, timeout_s: float = 90) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*ZERUN, *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def submit(self, job: str) -> str:
        done = self.run("submit", job)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 1
        return done.stdout.strip()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_follow_ends_as_the_job_ends_and_keeps_stdout_to_the_id(shell: Shell) -> None:
    # Of a folder at home no letter is special.
    shell.environment["ZERUN_RUNS"] = str(shell.folder / "my $NO_SUCH ~ 'runs'")
    done = shell.run("submit", shell.job('echo "hello of $RANK"'), "--follow")
    assert done.returncode == 0, done.stderr
    (run,) = done.stdout.splitlines()
    assert "0@localhost  hello of 0" in done.stderr and "1@localhost  hello of 1" in done.stderr
    assert Path(shell.environment["ZERUN_RUNS"], run, "run.json").exists()
    logs = shell.run("logs", "last", "--rank", "1")
    assert logs.returncode == 0 and logs.stdout == "1@localhost  hello of 1\n"
    logs = shell.run("logs", "last", "--rank", "2-7")
    assert logs.stdout == "" and logs.stderr == "it has no such rank; its ranks: 0-1\n"
    logs = shell.run("logs", "last", "--node", "node[1-2]", "--follow")
    assert logs.stdout == "" and "none of its ranks is on node1 node2; its nodes: localhost" in logs.stderr
    logs = shell.run("logs", "last", "--json", "--grep", "of 0$")
    assert [json.loads(line)["text"] for line in logs.stdout.splitlines()] == ["hello of 0"]


def test_a_failed_rank_is_named_with_its_code_and_its_words(shell: Shell) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo "no such planet" >&2; exit 7; fi; sleep 60'
    run = shell.submit(shell.job(script))
    waited = shell.run("wait", run)
    assert waited.returncode == 1, waited.stderr
    status = shell.run("status", run)
    assert status.returncode == 0, "a reading verb that could answer"
    assert "failed" in status.stdout and "rank 1" in status.stdout and "no such planet" in status.stdout
    assert "7" in status.stdout and "localhost" in status.stdout
    assert shell.run("status", run, "--exit-status").returncode == 1
    told = json.loads(shell.run("status", run, "--json").stdout)
    assert told["state"] == "failed" and told["exit_code"] == 1


def test_wait_gives_up_and_cancel_ends(shell: Shell, wait_until: Callable[..., None]) -> None:
    run = shell.submit(shell.job("echo $$ > pid.$RANK; sleep 300"))
    pids = [shell.folder / "runs" / run / "code" / f"pid.{rank}" for rank in range(2)]
    wait_until(lambda: all(file.is_file() and file.read_text() for file in pids), 30, "the ranks did not begin")
    waited = shell.run("wait", run, "--timeout", "1")
    assert waited.returncode == 10, waited.stderr
    cancelled = shell.run("cancel", run)
    assert cancelled.returncode == 0, cancelled.stderr
    assert "cancelled" in cancelled.stdout
    assert shell.run("wait", run[:-1]).returncode == 9
    for file in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


def test_the_time_limit_is_124(shell: Shell) -> None:
    run = shell.submit(shell.job("sleep 300", more="time: 2s\n"))
    assert shell.run("wait", run).returncode == 124


def test_ctrl_c_while_following_detaches(shell: Shell, wait_until: Callable[..., None]) -> None:
    command = [*ZERUN, "submit", shell.job("echo up; sleep 300"), "--follow"]
    with subprocess.Popen(
        command, cwd=shell.folder, env=shell.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None and following.stderr is not None
        run = following.stdout.readline().strip()
        for line in following.stderr:
            if "up" in line:
                break
        time.sleep(0.2)
        following.send_signal(signal.SIGINT)
        rest = following.stderr.read()
        assert following.wait(30) == 130
    assert f"zerun logs {run} -f" in rest and f"zerun cancel {run}" in rest and "Traceback" not in rest
    assert json.loads(shell.run("status", run, "--json").stdout)["state"] == "running"
    assert shell.run("cancel", run).returncode == 0


def test_a_cluster_whose_nodes_answer_and_are_not_well_is_no_unreachable_one(shell: Shell) -> None:
    (shell.folder / "odd.yaml").write_text(
        "name: odd\nbackend: direct\nnodes: {names: localhost}\npython: no-such-python\n"
    )
    done = shell.run("cluster", "check", "odd.yaml")
    assert done.returncode == 8 and "`no-such-python`: command not found" in done.stdout
    nowhere = shell.run("cluster", "check", "odd", "--json")
    assert nowhere.returncode == 2 and "no cluster is called 'odd'" in nowhere.stderr


def test_a_dry_run_prints_what_render_prints_and_submits_nothing(shell: Shell) -> None:
    job = shell.job("true")
    dry, rendered = shell.run("submit", job, "--dry-run"), shell.run("render", job)
    assert dry.returncode == rendered.returncode == 0, dry.stderr
    assert dry.stdout == rendered.stdout != ""
    assert "2 ranks" in dry.stderr or "ranks    2" in dry.stderr
    assert json.loads(shell.run("ls", "--json").stdout) == []


def test_data_that_git_ignores_are_told_of_before_anything_is_sent(shell: Shell) -> None:
    (shell.folder / "data").mkdir()
    for name in ("train.bin", "heldout.bin"):
        (shell.folder / "data" / name).write_bytes(bytes(range(256)) * 4)
    (shell.folder / "job.yaml").write_text(
        "name: own\nmodel: {kind: gpt, layers: 1, hidden: 8, heads: 1, seq_len: 8}\nzero: {stage: 0}\n"
        "data: {tokens: ./data/train.bin, heldout: data/heldout.bin}\noptimizer: {lr: 1e-3}\n"
        "batch: {micro: 1, accumulation: 1}\nsteps: 1\n"
    )
    subprocess.run(["git", "init", "-q", "."], cwd=shell.folder, check=True)
    assert shell.run("submit", "job.yaml", "--dry-run").returncode == 0
    (shell.folder / ".gitignore").write_text("/data/\n")
    done = shell.run("submit", "job.yaml")
    assert done.returncode == 2 and done.stdout == ""
    assert "data.tokens: ./data/train.bin is not in the code that is shipped" in done.stderr
    assert "git ignores it" in done.stderr
    done = shell.run("submit", "job.yaml", "--set", "data.tokens=data/other.bin")
    assert done.returncode == 2 and "there is no such file" in done.stderr


def test_a_journal_that_takes_no_line_keeps_nobody_from_reading(shell: Shell) -> None:
    """A full disk, or an archive that may only be read: what is seen is told, and noted by who can."""
    run = shell.submit(shell.job("true", ranks=1))
    journal = shell.folder / "runs" / run / "events.jsonl"
    full = ["bash", "-c", 'ulimit -f 0; exec "$0" "$@"', *ZERUN]
    for verb in (["wait", run], ["ls"], ["status", run]):
        done = subprocess.run([*full, *verb], cwd=shell.folder, env=shell.environment, capture_output=True, text=True)
        assert done.returncode == 0 and f"{run}  done" in done.stdout, done.stderr
    assert '"ended"' not in journal.read_text()
    assert shell.run("ls").returncode == 0 and '"ended"' in journal.read_text()
