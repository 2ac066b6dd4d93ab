"""Whatever a value holds, a real shell and a real sbatch read it back as it was."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from render_cases import launched, load

from launcher.contract.errors import UsageError
from launcher.render import commented, node_path, render, sbatch_quoted, shell_quoted

HOSTILE = [
    "a b",
    "$HOME `id` $(id)",
    'it\'s "quoted"',
    "line\nbreak\r\nhere",
    "%j%%\\",
    "é=ü,ß",
    "-rf",
    "#x",
    "!$?*[a]{b}~",
    ";&|<>",
]
texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30),
)
paths = texts.map(lambda text: "/" + text.replace("/", "_"))
many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program at an awkward path, as agent_python and srun: writes its arguments and stdin, one file a call.

    ``claim`` answers 7, as the agent answers with the attempt that it made its own.
    """
    folder = tmp_path_factory.mktemp('it\'s a $1\n`odd` "place" é')
    program = folder / "python"
    program.write_text(
        "#!/bin/sh\n"
        'out="$OUT/$(ls "$OUT" | wc -l)"\n'
        'printf \'%s\\0\' "$@" >"$out"\n'
        '[ "$2" != claim ] || echo 7\n'
        '[ "$2" != start ] || { printf %s "---"; cat; } >>"$out"\n'
    )
    program.chmod(0o755)
    (folder / "srun").symlink_to("python")
    return program


def calls(script: bytes, folder: Path, stand_in: Path, *arguments: str) -> list[list[str]]:
    """Runs ``script`` in bash and gives back what it called, in order."""
    out = Path(folder) / f"calls-{time.monotonic_ns()}"
    out.mkdir()
    environment = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "OUT": str(out), "LC_ALL": "C.UTF-8"}
    shell = ["bash" if script.startswith(b"#!/bin/bash") else "sh", "-c", script.decode(), "script", *arguments]
    done = subprocess.run(shell, env=environment, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr.decode()
    return [p.read_bytes().decode().split("\0") for p in sorted(out.iterdir(), key=lambda p: int(p.name))]


@many
@given(run_dir=paths, runtime=paths)
def test_slurm_paths_arrive_byte_equal(run_dir: str, runtime: str, stand_in: Path, tmp_path: Path) -> None:
    job, cluster = load("slurm", "slurm-site")
    if any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in run_dir):
        run_dir = "/plain"  # refused: see below
    plan, launch = launched(job, cluster.model_copy(update={"agent_python": str(stand_in)}), run_dir=run_dir)
    script = render(plan, cluster, replace(launch, runtime=runtime))
    claim, srun = calls(script, tmp_path, stand_in)
    assert claim[:-1] == [runtime, "claim", "--run-dir", run_dir, "--attempt", "1"]
    at = srun.index(str(stand_in))
    assert srun[at:-1] == [str(stand_in), runtime, "agent", "--run-dir", run_dir, "--attempt", "7"]
    assert {"--nodes=4", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--export=ALL", "--gres=gpu:a100:2"} <= set(
        srun[:at]
    )
    assert {"--cpus-per-task=32", "--mem=245760M"} <= set(srun[:at])


@many
@given(run_dir=paths, runtime=paths, announced=texts)
def test_direct_requests_arrive_equal(
    run_dir: str, runtime: str, announced: str, stand_in: Path, tmp_path: Path
) -> None:
    job, cluster = load("ssh", "ssh-lab")
    plan, launch = launched(job, cluster.model_copy(update={"agent_python": str(stand_in)}), run_dir=run_dir)
    script = render(plan, cluster, replace(launch, runtime=runtime))
    announcement = {"address": announced, "port": 1, "control_port": 2}
    (first,) = calls(script, tmp_path, stand_in, "node01")
    (other,) = calls(script, tmp_path, stand_in, "node03", json.dumps(announcement))
    run_dir = str(PurePosixPath(run_dir)) if run_dir == "/" else run_dir
    assert first[:2] == other[:2] == [runtime, "start"]
    assert json.loads(first[2].removeprefix("---")) == {"run_dir": run_dir, "attempt": 1, "node": "node01"}
    assert json.loads(other[2].removeprefix("---")) == {
        "run_dir": run_dir, "attempt": 1, "node": "node03", "rendezvous": announcement,
    }  # fmt: skip


def test_a_node_that_is_not_of_the_attempt_is_refused() -> None:
    plan, launch = launched(*load("ssh", "ssh-lab"), run_dir="/r/x")
    script = render(plan, load("ssh", "ssh-lab")[1], launch)
    done = subprocess.run(["sh", "-c", script.decode(), "script", "node99"], capture_output=True, text=True)
    assert done.returncode == 2 and "node99 is no node of this attempt" in done.stderr


@many
@given(texts)
def test_shell_quoting_and_comments(text: str) -> None:
    script = f"# {commented(text)}\nprintf %s {shell_quoted(text)}"
    assert subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout.decode() == text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("~/it's/python", "/home/ann smith/it's/python"),
        ("~", "/home/ann smith"),
        ("/opt/$SITE/bin/$SITE-py", "/opt/a b/bin/a b-py"),
        ("/opt/~/${SITE}/$1 `id`", "/opt/~/${SITE}/$1 `id`"),
        ("~ann/python", "~ann/python"),
    ],
)
def test_a_path_that_the_node_expands(path: str, expected: str) -> None:
    script = f'set -u; x={node_path(path)}; printf %s "$x"'
    environment = {"HOME": "/home/ann smith", "SITE": "a b", "PATH": os.environ["PATH"]}
    assert subprocess.run(["bash", "-c", script], env=environment, capture_output=True).stdout.decode() == expected


def parsed_by_sbatch(line: str) -> list[str]:
    """The rule of sbatch's own reader (_get_argument), which the next test holds against the real one."""
    words, word, quote, escaped, started = [], "", "", False, False
    for char in line:
        if escaped:
            word, escaped = word + char, False
        elif char == "\\":
            escaped = started = True
        elif quote:
            quote, word = ("", word) if char == quote else (quote, word + char)
        elif char in "'\"":
            quote, started = char, True
        elif char == "#":
            break
        elif char.isspace():
            words, word, started = ([*words, word], "", False) if started else (words, "", False)
        else:
            word, started = word + char, True
    return [*words, word] if started else words


@given(texts)
def test_sbatch_quoting(text: str) -> None:
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        with pytest.raises(UsageError, match="cannot hold the character"):
            sbatch_quoted(text)
    else:
        assert parsed_by_sbatch(f"--x={sbatch_quoted(text)}") == [f"--x={text}"]


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="sbatch is not installed")
def test_the_real_sbatch_reads_what_was_meant(tmp_path: Path) -> None:
    """It prints what it understood before it looks for a controller, and here there is none."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
    )
    names = ["comment", "mail-user", "wckey", "licenses", "network"]
    extra = dict(zip(names, ["a b #c", 'it\'s "q" \\ %j', "$HOME `id`", "é=ü,ß;|&", "-x !*[1]"], strict=True))
    job, cluster = load("slurm", "slurm-site")
    slurm = cluster.slurm.model_copy(
        update={"extra": {**extra, "spread-job": None}, "partition": "one two", "gpus_by": "none"}
    )
    cluster = cluster.model_copy(update={"slurm": slurm})
    plan, launch = launched(job, cluster, run_dir='/r/100% it\'s\t"x"'.replace("\t", " "))
    path = tmp_path / "job.sh"
    path.write_bytes(render(plan, cluster, launch))
    environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf"), "LC_ALL": "C.UTF-8"}
    said = subprocess.run(["sbatch", "-v", str(path)], env=environment, capture_output=True, timeout=60).stderr.decode()
    told = dict(line.removeprefix("sbatch: ").split(" : ", 1) for line in said.splitlines() if " : " in line)
    told = {name.strip(): value for name, value in told.items()}
    assert {name: told.get(name) for name in names} == extra
    assert told["job-name"] == "zerun-run-1" and told["partition"] == "one two" and told["account"] == "0123"
    assert told["output"] == '/r/100%% it\'s "x"/attempts/1/logs/slurm-%j.out'  # %% is sbatch's own %
    assert told["chdir"] == '/r/100% it\'s "x"'
    assert told["export"] == "NONE" and told["open-mode"] == "a" and told["spread-job"] == "set"
    assert told["signal"].startswith("USR2@120") and told["mem"] == "240G" and told["cpus-per-task"] == "32"
    assert told["ntasks-per-node"] == "1" and told["nodes"] == "4" and told["time"] == "00:30:00"


@pytest.mark.parametrize("run_dir", ["/r/a\nb", "/r/a\\b", "/r/a\x07"])
def test_what_no_sbatch_line_can_hold_is_refused(run_dir: str) -> None:
    job, cluster = load("slurm", "slurm-site")
    plan, launch = launched(job, cluster, run_dir=run_dir)
    with pytest.raises(UsageError, match=r"#SBATCH line cannot hold|backslash"):
        render(plan, cluster, launch)


def test_a_nul_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        shell_quoted("a\0b")


@pytest.mark.parametrize(("how", "status"), [("exit 7", 7), ("exit 75", 75), ("kill -9 $$", 137)])
def test_the_script_ends_as_srun_ends(how: str, status: int, tmp_path: Path) -> None:
    assert _start(tmp_path, f"{how}\n").wait(timeout=20) == status


def test_signals_pass_through_the_batch_shell(tmp_path: Path) -> None:
    """USR2 reaches srun at once and TERM does not end the shell before srun has ended."""
    ready = tmp_path / "ready"
    srun = f"trap 'exit 75' USR2\n: >{shlex.quote(str(ready))}\nwhile :; do sleep 0.05; done\n"
    shell = _start(tmp_path, srun)
    deadline = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    shell.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert shell.poll() is None
    shell.send_signal(signal.SIGUSR2)
    assert shell.wait(timeout=20) == 75


def _start(folder: Path, srun: str) -> subprocess.Popen[bytes]:
    """The rendered batch script, with a program of the test's in srun's place."""
    programs = folder / "bin"
    programs.mkdir()
    for name, body in (("srun", srun), ("agent-python", "echo 1\n")):
        (programs / name).write_text("#!/bin/bash\n" + body)
        (programs / name).chmod(0o755)
    job, cluster = load("slurm", "slurm-site")
    plan, launch = launched(job, cluster.model_copy(update={"agent_python": "agent-python"}), run_dir="/r/run-1")
    script = folder / "job.sh"
    script.write_bytes(render(plan, cluster, launch))
    return subprocess.Popen(["bash", str(script)], env={"PATH": f"{programs}:{os.environ['PATH']}"})
